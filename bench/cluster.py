"""Constants of conf/cluster/cpu2.yaml, measured: two gloo ranks on this machine, both busy at once.

    python -m bench.cluster               # prints them in the file's form, with what each fit leaves over
    python -m bench.cluster --json        # the same as rows

Attention: `launch_s` is what one token takes; blocks of a few shapes, timed forward and backward, give the others, as
`seconds = launch_s + c (pairs + short_rows x keys of last rows)` with the least relative error and one `short_rows`.
Wire: messages of four sizes both ways, `seconds = latency + bytes / rate`. Memory: gloo moves bytes with the cores that
compute, so a byte of a message costs the processor a place in the wire and its way through it. All but the wire is
timed by the processor, which neighbours disturb least; each time is the slower rank's, the shortest of many turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from bench.ranks import Seconds, TimedRanks
from bench.table import Report, Row
from kernels.api import IntervalMask, attention
from parallel.plan.ir import AttentionShape
from parallel.price.cluster import BACKWARD_PRODUCTS, FORWARD_PRODUCTS
from tests.ranks.pool import RankPool

SHAPE = AttentionShape(8, 2, 64, 64, "fp32")
BLOCKS = ([2048], [1024], [512], [512, 256, 128, 128], [256] * 4, [128] * 8, [64] * 16, [400, 300, 40, 20, 8])
WIRES = (4096, 65_536, 524_288, 2_097_152)  # bytes of a message


class Times(NamedTuple):
    """Seconds: of a token and each block of BLOCKS, forward and backward, by the processor; of each message of WIRES,
    by the clock; of filling one and moving it both ways, by the processor."""

    forward: list[float]
    backward: list[float]
    wire: list[float]
    moving: list[float]


def measure(repeats: int, blocks: Sequence[list[int]] = BLOCKS) -> Times:
    """A rank's job; both ranks do the same at the same time."""
    team, forward, backward = TimedRanks(), [], []
    for lengths in ([1], *blocks):
        there, back = _attention(team, lengths, repeats)
        forward.append(there)
        backward.append(back)
    wires = [_shortest(team, team.swap(size), 4 * repeats) for size in WIRES]
    filled = [_shortest(team, _fill(size), repeats).processor for size in WIRES]
    return Times(
        forward, backward, [wire.wall for wire in wires], [wire.processor + fill for wire, fill in zip(wires, filled)]
    )


def _shortest(team: TimedRanks, call: Callable[[], object], repeats: int) -> Seconds:
    turns = [team.timed(call) for _ in range(repeats + 1)][1:]
    return Seconds(min(turn.wall for turn in turns), min(turn.processor for turn in turns))


def _fill(size: int) -> Callable[[], object]:
    """Every other row gathered into a wire of `size` bytes, half of its heads, as a schedule's messages are."""
    rows = size // (4 * SHAPE.Hkv * SHAPE.D)
    x, wire, index = (
        torch.zeros(2 * rows, 2 * SHAPE.Hkv, SHAPE.D),
        torch.zeros(rows, SHAPE.Hkv, SHAPE.D),
        torch.arange(rows),
    )
    return lambda: wire.copy_(x[2 * index][:, : SHAPE.Hkv])


def _attention(team: TimedRanks, lengths: list[int], repeats: int) -> tuple[float, float]:
    edges = np.cumsum([0, *lengths]).tolist()
    mask, tokens = IntervalMask.from_cu_seqlens(edges), edges[-1]
    q, dout = torch.randn(2, tokens, SHAPE.H, SHAPE.D)
    k, v = torch.randn(2, tokens, SHAPE.Hkv, SHAPE.D)
    there = _shortest(team, lambda: attention(q, k, v, mask, backend="torch"), repeats).processor
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attention(inputs[0], inputs[1], inputs[2], mask, backend="torch")[0]
    back = _shortest(team, lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True), repeats)
    return there, back.processor


def fit(times: Times) -> tuple[dict[str, float], dict[str, float]]:
    """(constants by their names in the file, the mean relative error that each fit leaves)."""
    pairs = np.array([sum(n * (n + 1) / 2 for n in lengths) for lengths in BLOCKS])
    last = np.array([float(sum(lengths)) for lengths in BLOCKS])
    launch = max((times.forward[0] + times.backward[0]) / 2, 1e-6)
    both = np.array([times.forward[1:], times.backward[1:]]).ravel()
    best = (np.inf, 0.0, np.zeros(2))
    for short in np.arange(0.0, 257.0, 4.0):
        work, none = pairs + short * last, np.zeros_like(pairs)
        rows = np.concatenate([np.stack([work, none], 1), np.stack([none, work], 1)])
        found, error = _relative(rows, both - launch)
        if error < best[0]:
            best = (error, float(short), found)
    wires = np.stack([np.ones(len(WIRES)), np.array(WIRES, np.float64)], 1)
    (latency, per_byte), wire_error = _relative(wires, np.array(times.wire))
    (_, moved), moving_error = _relative(wires, np.array(times.moving))
    width = SHAPE.H * SHAPE.D
    rate, latency = 1 / max(per_byte, 1e-15), max(latency, 1e-6)
    constants = {
        "forward_flops": FORWARD_PRODUCTS * width / best[2][0],
        "backward_flops": BACKWARD_PRODUCTS * width / best[2][1],
        "short_rows": max(best[1], 1.0),
        "launch_s": launch,
        "copy_bytes_s": 2 / max(moved, 1e-15),  # a rank sends as much as it receives
        "intra_bytes_s": rate,
        "intra_latency_s": latency,
        "inter_bytes_s": rate,
        "inter_latency_s": latency,
    }
    return constants, {"attention": best[0], "wire": wire_error, "moving": moving_error}


def _relative(rows: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, float]:
    """The solution of rows @ x = seconds with the least squares of relative errors, and their mean size."""
    found = np.linalg.lstsq(rows / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
    return found, float(np.abs(rows @ found / seconds - 1).mean())


def report_constants(report: Report, times: Times) -> None:
    """What was measured, the constants, and how far these are from it."""
    constants, left = fit(times)
    for lengths, there, back in zip(([1], *BLOCKS), times.forward, times.backward):
        row: Row = {"documents": len(lengths), "tokens": sum(lengths)}
        report.row(row | {"forward_ms": there * 1e3, "backward_ms": back * 1e3})
    for name, value in constants.items():
        report.note(f"{name}: {value:.2e}")
        if report.as_json:
            report.row({"constant": name, "value": value})
    report.note(", ".join(f"mean relative error of {name}: {error:.1%}" for name, error in left.items()))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description="Measured constants of cpu2.")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines on standard output, nothing else")
    options = parser.parse_args(arguments)
    report, pool = Report(options.json), RankPool(2)
    try:
        answers = pool.run(measure, 5 if options.quick else 20, world=2, timeout=600)
    finally:
        pool.close()
    report_constants(report, answers[0])


if __name__ == "__main__":
    main()
