"""How long a batch waits for its plan, for every preset: processor time of one core, so that neighbours matter little.

python -m bench.plan_time            one rank's row at 128K tokens x 8 ranks; all rows at 1M tokens x 64 ranks
python -m bench.plan_time --quick    the same, fewer repeats
python -m bench.plan_time --json     rows as JSON lines

A row is what a training rank needs of each batch: placement, its steps forward and backward, the plan's hash. `work`
(allowed pairs) and the masks that a rank builds when it binds the plan are timed apart: neither is part of planning.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from bench.table import Report
from kernels.mask_spec import MaskSpec
from parallel.plan.ir import Attend, AttentionShape
from parallel.plan.layout import PackedLayout
from parallel.plan.plan import Plan
from parallel.runtime.bind import BoundPlan
from parallel.strategy import Strategy, load_strategy, preset_names

SHAPE = AttentionShape(64, 8, 128, 128, "bf16")  # Llama 3 70B
MASKS = {"causal": MaskSpec(), "window": MaskSpec(window=1024)}


@dataclass(frozen=True)
class PlanCase:
    """What is planned, and the bar: how long it may take, in ms."""

    name: str
    tokens: int
    ranks: int
    documents: int
    row: bool  # one rank's row instead of all
    bar_ms: float


CASES = (
    PlanCase("row", 1 << 17, 8, 40, True, 10.0),
    PlanCase("all rows", 1 << 20, 64, 1000, False, 500.0),
)


PRESETS = [name for name in preset_names() if name != "auto"]  # auto plans them all


def document_lengths(tokens: int, documents: int, seed: int) -> list[int]:
    """`documents` lengths with a long tail that sum to `tokens`."""
    rng = np.random.default_rng([seed, tokens, documents])
    share = rng.lognormal(sigma=1.2, size=documents)
    cuts = np.floor(np.cumsum(share) / share.sum() * (tokens - documents)).astype(int)
    cuts[-1] = tokens - documents
    return (np.diff(cuts, prepend=0) + 1).tolist()


def plan_once(strategy: Strategy, lengths: list[int], case: PlanCase, mask: MaskSpec, rank: int) -> Plan:
    """A fresh plan, as of a batch that was never seen."""
    layout = PackedLayout.from_lengths(lengths)
    placement = strategy.shard(layout, strategy.mesh(case.ranks, SHAPE.H, SHAPE.Hkv))
    plan = strategy.plan(placement, SHAPE, mask, [rank] if case.row else None)
    _ = plan.hash
    return plan


def bind_masks(plan: Plan, rank: int) -> int:
    """Build the masks of `rank`'s forward steps; how many."""
    bound = BoundPlan(plan, rank)
    steps = [step for step in bound.programs["forward"].steps if isinstance(step, Attend)]
    return len({id(bound.masks(step.q_tokens, step.k_tokens)) for step in steps})


def milliseconds(call: Callable[[], object], repeats: int) -> list[float]:
    """The processor time of each of `repeats` calls."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        times.append((time.process_time() - began) * 1e3)
    return times


def planning_section(report: Report, cases: tuple[PlanCase, ...], repeats: int, presets: list[str], seed: int) -> None:
    """A row for every case, mask and preset."""
    for case in cases:
        lengths = document_lengths(case.tokens, case.documents, seed)
        what = "one rank's row" if case.row else "all rows"
        report.note(
            f"{what}: {case.tokens:,} tokens, {case.ranks} ranks, {case.documents} documents; best and median of "
            f"{repeats}, in ms; bar {case.bar_ms:g} ms"
        )
        for preset in presets:
            for label, mask in MASKS.items():
                report.row(_measure(case, load_strategy(preset), lengths, label, mask, repeats))


def _measure(
    case: PlanCase, strategy: Strategy, lengths: list[int], label: str, mask: MaskSpec, repeats: int
) -> dict[str, str | int | float]:
    rank = 0 if strategy.exchange == "none" else case.ranks // 2
    times = milliseconds(lambda: plan_once(strategy, lengths, case, mask, rank), repeats)
    plan = plan_once(strategy, lengths, case, mask, rank)
    (work,) = milliseconds(lambda: plan.work, 1)
    masks: list[int] = []
    (bind,) = milliseconds(lambda: masks.append(bind_masks(plan, rank)), 1)
    return {
        "case": case.name,
        "preset": strategy.name,
        "mask": label,
        "best_ms": min(times),
        "median_ms": statistics.median(times),
        "best/bar": min(times) / case.bar_ms,
        "work_ms": work,
        "masks": masks[0],
        "masks_ms": bind,
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m bench.plan_time", description="How long planning takes.")
    parser.add_argument("--quick", action="store_true", help="three repeats instead of ten")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines on standard output, nothing else")
    parser.add_argument("--preset", nargs="*", default=PRESETS, choices=PRESETS, help="these only")
    parser.add_argument("--seed", type=int, default=0, help="of the documents' lengths")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # processor time of masks is then comparable with that of plans
    planning_section(Report(options.json), CASES, 3 if options.quick else 10, options.preset, options.seed)


if __name__ == "__main__":
    main()
