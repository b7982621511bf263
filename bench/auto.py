"""What strategy=auto's choice costs beside the fastest preset, both measured: two gloo ranks on this machine.

    python -m bench.auto                  # 30 batches: six mixes, five sizes; some minutes on 2 cores
    python -m bench.auto --quick          # six batches
    python -m bench.auto --json           # rows as JSON lines, the last one the summary

A row is a batch: what auto chose with the constants of conf/cluster/cpu2.yaml, which preset was fastest, and the
regret, how much longer the choice took. Presets take turns, a layer's attention forward and backward at a time, and
what counts is the slower rank's median: what slows the machine slows them all. Presets that come to one schedule (on
two ranks, basp and ulysses) are timed once: of several equal things, the luckiest would be called the fastest. Where
neighbours take the cores away, `processor_regret` still says something: the same of processor time, the shortest turn
of each, waits left out. `predicted_x` is the model's time over the measured one, of the choice.
`bench.cluster` measures the constants.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import fmean, median

import numpy as np
import torch
from torch import Tensor

from bench.plans.packs import packs
from bench.ranks import Seconds, TimedRanks
from bench.table import Report, Row
from data.sources.mixes import MIXES
from kernels.mask_spec import MaskSpec
from parallel.api import ContextParallel
from parallel.auto import candidate, candidates, resolve
from parallel.plan.ir import AttentionShape
from parallel.plan.layout import PackedLayout
from parallel.plan.mesh import MeshSpec
from parallel.plan.plan import DIRECTIONS, Plan
from parallel.runtime.groups import Groups
from parallel.sharding.planner import Planner
from parallel.strategy import Strategy, load_strategy
from tests.ranks.pool import RankPool

SHAPE = AttentionShape(8, 2, 64, 64, "fp32")
SIZES = (1024, 1536, 2048, 3072, 4096)
DRAWN = 131_072  # tokens of a pack before it is scaled
ENOUGH = 0.1  # regret up to which a choice counts as right


Turns = dict[str, list[Seconds]]  # of each preset


def auto_strategy(cluster: str = "cpu2") -> Strategy:
    """strategy=auto, priced on `cluster`."""
    return load_strategy("auto", dp=1, planner=Planner(cluster=cluster))


def batches(quick: bool, seed: int) -> list[tuple[str, list[int]]]:
    """(mix, lengths) of each batch: at every size, a pack of DRAWN tokens of each mix to scale, so that it keeps its
    shape; documents that shrink to nothing are left out."""
    found = []
    for number, size in enumerate(SIZES[2:3] if quick else SIZES):
        for mix in MIXES:
            lengths = list(packs(mix, DRAWN, number + 1, seed))[-1]
            edges = np.rint(np.cumsum(lengths) * (size / DRAWN)).astype(int)
            found.append((mix, [n for n in np.diff(edges, prepend=0).tolist() if n]))
    return found


def time_presets(
    lengths: list[int], auto: Strategy, shape: AttentionShape, repeats: int
) -> tuple[dict[str, float], Turns]:
    """A rank's job: (auto's prices, cheapest first; each candidate's seconds on the slower rank, a turn at a time)."""
    team = TimedRanks()
    layout = PackedLayout.from_lengths(lengths)
    prices = resolve(auto, auto.mesh(team.world, shape.H, shape.Hkv), layout, shape).seconds
    groups: dict[MeshSpec, Groups] = {}
    bound: dict[str, ContextParallel] = {}
    schedules: list[tuple[str, tuple[object, ...]]] = []
    same: dict[str, str] = {}  # preset -> the first one of its schedule
    for name in candidates():
        if name in prices:
            strategy = candidate(name, auto)
            mesh = strategy.mesh(team.world, shape.H, shape.Hkv)
            mine = _schedule(strategy.plan(strategy.shard(layout, mesh, shape), shape, MaskSpec()))
            same[name] = next((first for first, known in schedules if known == mine), name)
            if same[name] != name:
                continue
            schedules.append((name, mine))
            if mesh not in groups:
                groups[mesh] = Groups(mesh, team.rank)
            bound[name] = ContextParallel(strategy, mesh, groups[mesh], team.rank)
            bound[name].bind(layout, shape)
    draw = torch.Generator().manual_seed(team.rank)
    seconds: Turns = {name: [] for name in bound}
    for _ in range(repeats + 1):
        for name, cp in bound.items():
            tokens = cp.placement.sets[cp.rank].count
            sizes = ((shape.H, shape.D), (shape.Hkv, shape.D), (shape.Hkv, shape.Dv), (shape.H, shape.Dv))
            q, k, v, dout = (torch.randn(tokens, *size, generator=draw) for size in sizes)
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            seconds[name].append(team.timed(partial(_both_ways, cp, q, k, v, dout)))
    return prices, {name: seconds[same[name]][1:] for name in same}  # the first turn warms up


def _schedule(plan: Plan) -> tuple[object, ...]:
    """What tells a plan of all ranks from those that do the same under another name: shards, steps' kinds, bytes."""
    steps = [[type(step).__name__ for step in own.steps] for way in DIRECTIONS for own in plan.programs(way)]
    tables = {traffic: table.tolist() for traffic, table in plan.bytes.items() if table.any()}
    return [tokens.key for tokens in plan.placement.sets], plan.placement.split, steps, tables


def _both_ways(cp: ContextParallel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    cp.attention(q, k, v).backward(dout)


def judge(mix: str, lengths: list[int], prices: dict[str, float], turns: Turns) -> Row:
    """A batch's row. The choice is the first of `prices`; the fastest, the one of the least median."""
    measured = medians(turns)
    processor = {name: min(turn.processor for turn in some) for name, some in turns.items()}
    chosen, fastest = next(iter(prices)), min(measured, key=lambda name: measured[name])
    return {
        "mix": mix, "tokens": sum(lengths), "documents": len(lengths), "chosen": chosen, "fastest": fastest,
        "chosen_ms": measured[chosen] * 1e3, "fastest_ms": measured[fastest] * 1e3,
        "slowest_ms": max(measured.values()) * 1e3, "regret": measured[chosen] / measured[fastest] - 1,
        "processor_regret": processor[chosen] / min(processor.values()) - 1,
        "predicted_x": prices[chosen] / measured[chosen],
    }  # fmt: skip


def medians(turns: Turns) -> dict[str, float]:
    """Seconds by the clock."""
    return {name: median(turn.wall for turn in some) for name, some in turns.items()}


def summary(report: Report, rows: list[Row], turns: list[Turns]) -> None:
    """How many choices were within ENOUGH of the fastest; and what the best single preset for all batches costs."""
    found: Row = {"batches": len(rows)}
    for column, words in (("regret", "fastest measured preset"), ("processor_regret", "least processor time")):
        regrets = [float(row[column]) for row in rows]
        right = sum(regret <= ENOUGH for regret in regrets)
        found |= {f"{column}_right": right, f"{column}_mean": fmean(regrets), f"{column}_worst": max(regrets)}
        report.note(
            f"within {ENOUGH:.0%} of the {words}: {right} of {len(rows)}; regret {fmean(regrets):.1%} in the mean, "
            f"{max(regrets):.1%} at worst"
        )
    measured = [medians(batch) for batch in turns]
    always = {
        name: fmean(times[name] / min(times.values()) - 1 for times in measured)
        for name in measured[0]
        if all(name in times for times in measured)
    }
    one = min(always, key=lambda name: always[name])
    report.note(f"the best single preset, {one} for all batches: regret {always[one]:.1%} in the mean")
    if report.as_json:
        report.row(found | {"one_preset": one, "one_preset_mean": always[one]})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.auto", description="The regret of strategy=auto's choices.")
    parser.add_argument("--quick", action="store_true", help="a batch of each mix, few turns")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines on standard output, nothing else")
    parser.add_argument("--repeats", type=int, help="turns of each preset; 3 with --quick, else 7")
    parser.add_argument("--seed", type=int, default=0, help="of the batches")
    options = parser.parse_args(arguments)
    repeats = options.repeats or (3 if options.quick else 7)
    report, auto = Report(options.json), auto_strategy()
    rows: list[Row] = []
    measured: list[Turns] = []
    pool = RankPool(2)
    try:
        for mix, lengths in batches(options.quick, options.seed):
            answers = pool.run(time_presets, lengths, auto, SHAPE, repeats, world=2, timeout=600)
            prices, turns = answers[0]
            if list(answers[1][0].items()) != list(prices.items()):
                raise ValueError(f"the ranks weighed {mix} differently: {answers[0][0]} and {answers[1][0]}")
            measured.append(turns)
            rows.append(judge(mix, lengths, prices, turns))
            report.row(rows[-1])
    finally:
        pool.close()
    summary(report, rows, measured)


if __name__ == "__main__":
    main()
