"""The GPU page: is our attention right in bf16 on this GPU, and how fast beside torch's?

One CSV row (or JSON object) each. First the error of out, dq, dk, dv against float64, beside the error that plain dense
torch makes in bf16; then useful TFLOP/s (4 x pairs x D x H forward, 2.5 times that backward) on one document and on the
six mixes of `data.mixes`. Medians of many; contenders take turns. Needs torch and triton, and what `kernels` and
`data.mixes` import (jaxtyping, numpy).
"""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.kernels import gpu_contenders
from bench.kernels.gpu_contenders import Attend
from data.sources.mixes import MIXES, draw_lengths
from kernels.api import IntervalMask, attention

HEADS, KV_HEADS = 16, 4
SECONDS = 200  # the page ends within four minutes: what is left then is left out, in so many words
EACH = 0.25  # seconds spent on one timing
REPEATS = (5, 50)

Row = dict[str, Any]
COLUMNS: tuple[str, ...] = (
    "section", "workload", "tokens", "documents", "head_dim", "contender", "direction", "ms", "tflops", "error",
    "plain_error", "right",
)  # fmt: skip


def gpu_page(quick: bool = False, as_json: bool = False) -> int:
    """Print the page; 1 where there is no GPU for it (with the reason on stderr), or where a result is wrong."""
    reason = refusal()
    if reason:
        print(reason, file=sys.stderr)
        return 1
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}", file=sys.stderr)
    right = True
    writer = csv.DictWriter(sys.stdout, COLUMNS, restval="")
    if not as_json:
        writer.writeheader()
    for row in page_rows(device, "triton", quick):
        right = right and row.get("right", True)
        if as_json:
            print(json.dumps(row))
        else:
            writer.writerow(row)
        sys.stdout.flush()
    return 0 if right else 1


def refusal() -> str | None:
    """Why the page cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no GPU here (torch.cuda.is_available() is False); python -m bench.kernels --static needs none"
    return None


def page_rows(device: torch.device, backend: str, quick: bool, seconds: float = SECONDS) -> Iterator[Row]:
    """All rows, in the order in which they matter if the time runs out."""
    end = time.monotonic() + seconds
    for head_dim in (64, 128):
        yield from correctness_rows(device, backend, head_dim)
    for tokens in (16384,) if quick else (16384, 131072):
        for head_dim in (128,) if quick else (64, 128):
            for workload in ("single", "web") if quick else ("single", *MIXES):
                lengths = [tokens] if workload == "single" else draw_lengths(workload, tokens, seed=0)
                base = {"section": "speed", "workload": workload, "tokens": tokens, "documents": len(lengths)}
                contenders = {
                    "ours": partial(gpu_contenders.ours, lengths, device, backend),
                    "sdpa": partial(gpu_contenders.sdpa, lengths, device),
                    "flex": partial(gpu_contenders.flex, lengths, device),
                }
                for row in speed_rows(contenders, lengths, head_dim, device, end):
                    yield base | {"head_dim": head_dim} | row


def correctness_rows(device: torch.device, backend: str, head_dim: int, tokens: int = 2048) -> Iterator[Row]:
    """Largest error of out, dq, dk, dv in bf16 against float64; right: at most twice plain torch's."""
    lengths = draw_lengths("web", tokens, seed=1)
    mask = gpu_contenders.document_mask(lengths, device)
    inputs = _inputs(tokens, head_dim, device, heads=4, kv_heads=2)
    exact = _results(partial(_attend, mask, "reference"), [x.double() for x in inputs])
    plain = _results(partial(_attend, mask, "reference"), inputs)
    found = _results(partial(_attend, mask, backend), inputs)
    for name, good, torch_result, result in zip(("out", "dq", "dk", "dv"), exact, plain, found):
        error, plain_error = ((x.double() - good).abs().max().item() for x in (result, torch_result))
        yield {
            "section": "correctness", "workload": "web", "tokens": tokens, "documents": len(lengths),
            "head_dim": head_dim, "contender": "ours", "direction": name, "error": error, "plain_error": plain_error,
            "right": bool(torch.isfinite(result).all()) and error <= 2 * plain_error,
        }  # fmt: skip


def _attend(mask: IntervalMask, backend: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, mask, backend=backend)[0]


def _inputs(tokens: int, head_dim: int, device: torch.device, heads: int, kv_heads: int) -> list[Tensor]:
    """q, k, v, dout in bf16, the same numbers on every device."""
    generator = torch.Generator().manual_seed(tokens + head_dim)
    shapes = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(tokens, h, head_dim, generator=generator).to(device, torch.bfloat16) for h in shapes]


def _results(attend: Attend, inputs: list[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv."""
    *leaves, dout = (x.detach().clone() for x in inputs)
    for x in leaves:
        x.requires_grad_()
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@dataclass
class _Timed:
    """A contender that is ready, and its milliseconds so far."""

    attend: Attend
    forward: list[float]
    backward: list[float]


def speed_rows(
    contenders: dict[str, Callable[[], Attend]],
    lengths: list[int],
    head_dim: int,
    device: torch.device,
    end: float,
) -> Iterator[Row]:
    """Forward and backward of each contender, or why it is left out. `end`: the monotonic second to stop at."""
    tokens = sum(lengths)
    q, k, v, dout = _inputs(tokens, head_dim, device, HEADS, KV_HEADS)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ready: dict[str, _Timed] = {}
    for name, build in contenders.items():
        if time.monotonic() > end:
            print(f"{name} on {len(lengths)} documents, {tokens} tokens left out: the time is up", file=sys.stderr)
            continue
        try:
            timed = _Timed(build(), [], [])
            _step(timed, leaves, dout, device)  # compiles
            ready[name] = _Timed(timed.attend, [], [])
        except Exception as error:  # a peer that fails is left out; ours must not
            if name == "ours":
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"{name} on {len(lengths)} documents, {tokens} tokens left out: {reason[:200]}", file=sys.stderr)
    began = time.monotonic()
    for repeat in range(REPEATS[1]):
        spent = time.monotonic() - began
        if repeat >= REPEATS[0] and (spent > 2 * EACH * len(ready) or time.monotonic() > end):
            break
        for timed in ready.values():
            _step(timed, leaves, dout, device)
    flops = forward_flops(lengths, head_dim)
    for name, timed in ready.items():
        for direction, times, work in (("forward", timed.forward, 1.0), ("backward", timed.backward, 2.5)):
            ms = median(times)
            yield {"contender": name, "direction": direction, "ms": ms, "tflops": flops * work / ms / 1e9}


def _step(timed: _Timed, leaves: list[Tensor], dout: Tensor, device: torch.device) -> None:
    """A forward, with what training keeps for the backward, and its backward."""
    ms, out = milliseconds(lambda: timed.attend(*leaves), device)
    timed.forward.append(ms)
    ms, _ = milliseconds(lambda: torch.autograd.grad(out, leaves, dout), device)
    timed.backward.append(ms)


def forward_flops(lengths: list[int], head_dim: int, heads: int = HEADS) -> int:
    """FLOP of two products over the pairs that causal documents allow."""
    return 4 * sum(n * (n + 1) // 2 for n in lengths) * head_dim * heads


def milliseconds(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """One call's time on the device (on the CPU: the wall's), and what it returned."""
    if device.type != "cuda":
        start = time.perf_counter()
        result = call()
        return (time.perf_counter() - start) * 1e3, result
    begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    result = call()
    done.record()
    done.synchronize()
    return begin.elapsed_time(done), result
