"""Planner leaderboard: what must travel, how even the work is and what it would take, beside peers and bounds.

    python -m bench.plans --quick                         # 131,072 tokens on 8 ranks, every mix; under a minute
    python -m bench.plans --tokens 1048576 --ranks 64     # any part of the grid; all of it by default
    python -m bench.plans --lengths batch.txt --ranks 8   # a batch of yours: document lengths, one a line
    python -m bench.plans --exact                         # against the optimum on small grids
    python -m bench.plans --out page                      # page/plans.csv and page/plans.png as well

Ratios are to an all-gather's keys (T - T / n to each of n ranks): `worst` the rank that receives most, `total` all,
`padded` a gathered buffer as long as the fullest rank's; `step` counts forward and backward in bytes, every class in
its dtype. `priced` says how: `keys`, closed forms with each key sent once where it is needed, alike for peers and for
presets that do so; or `steps`, a plan's own steps, walked one by one with their waits. Times are a layer's attention;
`plan_ms` is the processor's time for a plan, the median.
"""

import argparse
import csv
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.exact import planned, solve
from bench.plans.packs import bounds, packs
from bench.plans.peers import PEERS
from bench.table import Report, Row
from data.sources.mixes import MIXES
from kernels.mask_spec import MaskSpec
from parallel.plan.ir import AttentionShape
from parallel.plan.layout import PackedLayout
from parallel.plan.mesh import MeshSpec
from parallel.plan.tokens import TokenSet
from parallel.price.cluster import Cluster, key_bytes, load_cluster, predict_needs
from parallel.price.needs import Needs
from parallel.price.predict import predict_plan
from parallel.sharding.planner import Planner
from parallel.strategy import Strategy, load_strategy, preset_names

SHAPE = AttentionShape(32, 8, 128, 128, "bf16")  # Llama-3-8B's
TOKENS, RANKS = (32_768, 131_072, 524_288, 1_048_576), (4, 8, 16, 32, 64)
EXACT = Path(__file__).resolve().parents[2] / "tests" / "bench" / "exact_plans.json"
MOST_STEPS = 131_072 * 8  # tokens x ranks up to which plans are written out step by step


@dataclass(frozen=True)
class Entry:
    """A row's contender: a peer's placement, or a preset with its planner."""

    name: str
    strategy: Strategy | None

    @property
    def by_keys(self) -> bool:
        s = self.strategy
        return s is None or (s.exchange == "sequence_aware" and s.inner_exchange is None)


def entries(cluster: str, effort: str = "fast") -> list[Entry]:
    """Peers, then presets; those with a planner once for each objective."""
    found = [Entry(name, None) for name in PEERS]
    for name in preset_names():
        strategy = load_strategy(name)
        if strategy.exchange in ("none", "auto") or strategy.batch_groups != 1:
            continue
        if strategy.sharding == "whole_document":
            for objective in ("time", "bytes"):
                found.append(Entry(name, replace(strategy, planner=Planner(effort, objective, cluster=cluster))))
        else:
            found.append(Entry(name, strategy))
    return found


def measure(entry: Entry, lengths: list[int], ranks: int, cluster: Cluster) -> dict[str, float]:
    """One pack's figures, by column."""
    layout = PackedLayout.from_lengths(lengths, row_length=sum(lengths) + _padding(lengths, ranks))
    mesh = entry.strategy.mesh(ranks, SHAPE.H, SHAPE.Hkv) if entry.strategy else MeshSpec(cp_outer=ranks)
    began = time.process_time()
    if entry.strategy is None:
        sets: tuple[TokenSet, ...] = tuple(PEERS[entry.name](layout, ranks))
    else:
        placement = entry.strategy.shard(layout, mesh, SHAPE)
        sets = placement.sets
    figures = {"plan_ms": (time.process_time() - began) * 1e3}
    if entry.by_keys:
        return figures | _by_keys(layout, sets, mesh, cluster)
    assert entry.strategy is not None
    plan = entry.strategy.plan(entry.strategy.shard(layout, mesh, SHAPE), SHAPE, MaskSpec())
    figures["plan_ms"] = (time.process_time() - began) * 1e3
    gathered = (layout.total_tokens - layout.total_tokens / ranks) * key_bytes(SHAPE)[0]
    step = (layout.total_tokens - layout.total_tokens / ranks) * sum(key_bytes(SHAPE))
    forward = np.sum(list(plan.bytes_of("forward").values()), axis=0)
    both = np.sum(list(plan.bytes.values()), axis=0)
    for matrix in (forward, both):
        np.fill_diagonal(matrix, 0)
    seconds = predict_plan(plan, cluster)
    return figures | {
        "imbalance": float(plan.work.max() / plan.work.mean()),
        "worst_bytes_ratio": float(forward.sum(0).max() / gathered),
        "total_bytes_ratio": float(forward.sum() / ranks / gathered),
        "padded_ratio": float(Needs.of(layout, sets).sent_once.max() / (layout.total_tokens / ranks)),
        "worst_step_ratio": float(both.sum(0).max() / step),
        "total_step_ratio": float(both.sum() / ranks / step),
        "messages": float((forward > 0).sum()),
        "rounds": float(plan.rounds["forward"]),
        "shards": float(Needs.of(layout, sets).parts.sum()),
        **_milliseconds(seconds),
    }


def _padding(lengths: list[int], ranks: int) -> int:
    """Tokens that make the batch divide by the ranks, which the peers need."""
    return -sum(lengths) % ranks


def _by_keys(layout: PackedLayout, sets: tuple[TokenSet, ...], mesh: MeshSpec, cluster: Cluster) -> dict[str, float]:
    needs = Needs.of(layout, sets)
    ranks, T = len(sets), layout.total_tokens
    gathered = T - T / ranks
    there, back = key_bytes(SHAPE)
    extra = (back - there) * (needs.keys.sum(0) - needs.received)  # gradients come home to those who sent keys
    step = needs.received * (there + back) + extra
    return {
        "imbalance": float(needs.work.max() / needs.work.mean()),
        "worst_bytes_ratio": float(needs.received.max() / gathered),
        "total_bytes_ratio": float(needs.received.sum() / ranks / gathered),
        "padded_ratio": float(needs.sent_once.max() / (T / ranks)),
        "worst_step_ratio": float(step.max() / gathered / (there + back)),
        "total_step_ratio": float(step.sum() / ranks / gathered / (there + back)),
        "messages": float((needs.keys > 0).sum()),
        "rounds": float(max((needs.keys > 0).sum(0).max(), (needs.keys > 0).sum(1).max())),
        "shards": float(needs.parts.sum()),
        **_milliseconds(predict_needs(needs, mesh, SHAPE, cluster)),
    }


def _milliseconds(seconds: tuple[float, float, float, float]) -> dict[str, float]:
    return {f"{name}_ms": value * 1e3 for name, value in zip(("attn", "copy", "exposed", "total"), seconds)}


def row(entry: Entry, mix: str, batches: list[list[int]], ranks: int, cluster: Cluster) -> Row:
    """Means over `batches`; planning time is the median."""
    figures = [measure(entry, lengths, ranks, cluster) for lengths in batches]
    means = {name: statistics.fmean(f[name] for f in figures) for name in figures[0]}
    means["plan_ms"] = statistics.median(f["plan_ms"] for f in figures)
    worst, total = (
        statistics.fmean(b) for b in zip(*(bounds(lengths, ranks, _padding(lengths, ranks)) for lengths in batches))
    )
    planner = entry.strategy.planner if entry.strategy and entry.strategy.sharding == "whole_document" else None
    head: Row = {
        "mix": mix,
        "tokens": sum(batches[0]),
        "ranks": ranks,
        "preset": entry.name,
        "peer": int(entry.strategy is None),
        "planner": planner.effort if planner else "-",
        "objective": planner.objective if planner else "-",
        "packs": len(batches),
        "priced": "keys" if entry.by_keys else "steps",
    }
    columns = (
        "imbalance", "worst_bytes_ratio", "total_bytes_ratio", "padded_ratio", "worst_step_ratio", "total_step_ratio",
        "messages", "rounds", "shards", "attn_ms", "copy_ms", "exposed_ms", "total_ms", "plan_ms",
    )  # fmt: skip
    limits = {"bound_worst": round(worst, 5), "bound_total": round(total, 5)}
    return head | {name: round(means[name], 5) for name in columns} | limits


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """The part of the grid that was asked for."""
    for tokens in args.tokens:
        for ranks in args.ranks:
            cluster = load_cluster("h100_8" if ranks <= 8 else "h100_64")
            for mix, batches in _batches(args, tokens):
                for entry in entries(cluster.name, args.effort):
                    if entry.by_keys or sum(batches[0]) * ranks <= MOST_STEPS:
                        few = batches if entry.by_keys else batches[:2]
                        yield row(entry, mix, few, ranks, cluster)


def _batches(args: argparse.Namespace, tokens: int) -> Iterator[tuple[str, list[list[int]]]]:
    if args.lengths is not None:
        yield args.lengths.stem, [_lengths(args.lengths)]
        return
    for mix in args.mixes:
        yield mix, list(packs(mix, tokens, args.packs))


def _lengths(path: Path) -> list[int]:
    """The document lengths of a file, one a word. SystemExit, one sentence, for what is no length or no file."""
    try:
        words = path.read_text().split()
    except OSError as error:
        raise SystemExit(f"--lengths {path}: {error.strerror}; give a file of document lengths, one a line") from error
    bad = [word for word in words if not word.isdecimal() or int(word) < 1]
    if bad or not words:
        what = f"{bad[0]!r} is no length" if bad else "it is empty"
        raise SystemExit(f"--lengths {path}: {what}; give document lengths of at least 1 token, one a line")
    return [int(word) for word in words]


def draw(table: list[Row], path: Path) -> None:
    """Keys received by the worst rank, and predicted time, beside peers; one panel a mix of the table's first size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = (table[0]["tokens"], table[0]["ranks"])
    shown = [r for r in table if (r["tokens"], r["ranks"]) == first and r["priced"] == "keys"]
    mixes = list(dict.fromkeys(str(r["mix"]) for r in shown))
    figure, axes = pyplot.subplots(2, len(mixes), figsize=(3 * len(mixes), 6), squeeze=False, sharey="row")
    for column, mix in enumerate(mixes):
        some = [r for r in shown if r["mix"] == mix]
        names = [str(r["preset"]) + ("" if r["objective"] == "-" else f" ({r['objective']})") for r in some]
        colours = ["#999999" if r["peer"] else "#2a6fbb" for r in some]
        axes[0][column].bar(names, [float(r["worst_bytes_ratio"]) for r in some], color=colours)
        axes[0][column].axhline(float(some[0]["bound_worst"]), color="black", linestyle=":")
        axes[0][column].set_title(mix)
        fastest = min(float(r["total_ms"]) for r in some)
        axes[1][column].bar(names, [float(r["total_ms"]) / fastest for r in some], color=colours)
        axes[0][column].tick_params(axis="x", labelbottom=False)
        axes[1][column].tick_params(axis="x", rotation=90)
    axes[0][0].set_ylabel("worst rank's keys\nof an all-gather's\n(dotted: bound)")
    axes[1][0].set_ylabel("predicted time\nover the fastest")
    figure.suptitle(f"{first[0]:,} tokens on {first[1]} ranks (blue: presets, grey: peers)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def exact(report: Report, count: int) -> None:
    """The planner against optima that were proven once and kept, and one small batch solved here."""
    kept = json.loads(EXACT.read_text())
    mine = best = 0.0
    for case in kept["cases"][:count]:
        found, most = planned(case["lengths"], kept["ranks"])
        mine, best = mine + found, best + case["optimum"]
        mean = sum(n * (n + 1) / 2 for n in case["lengths"]) / kept["ranks"]
        line: Row = {"documents": len(case["lengths"]), "cells": sum(case["lengths"]), "planner": found}
        line |= {
            "optimum": case["optimum"],
            "imbalance": round(most / mean, 4),
            "limit": round(case["limit"] / mean, 4),
        }
        report.row(line)
    report.note(f"planner over optimum, all cases: {mine / best:.3f}")
    value, proven = solve([5, 3, 2, 2], 3, limit=12, seconds=20)
    report.note(f"solved here, 12 cells on 3 ranks: {value} ({'proven' if proven else 'not proven'})")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.plans", description="Planner leaderboard.")
    parser.add_argument("--quick", action="store_true", help="131,072 tokens on 8 ranks, few packs")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines on stdout")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--mixes", nargs="+", default=list(MIXES), choices=list(MIXES))
    parser.add_argument("--packs", type=int, default=5)
    parser.add_argument("--effort", choices=("fast", "deep"), default="fast")
    parser.add_argument("--lengths", type=Path, help="a file of document lengths, instead of mixes")
    parser.add_argument("--exact", action="store_true", help="the planner against the optimum on small grids")
    parser.add_argument("--out", type=Path, help="a folder for plans.csv and plans.png")
    args = parser.parse_args()
    report = Report(args.json)
    if args.exact:
        exact(report, 10 if args.quick else 50)
        return
    if args.quick:
        args.tokens, args.ranks, args.packs = [131_072], [8], 20
    if args.lengths is not None:
        args.tokens = [0]
    table: list[Row] = []
    for line in rows(args):
        table.append(line)
        report.row(line)
    drawn = len(table)
    if args.quick and args.lengths is None:
        batches = list(packs("wlb", 131_072, 300))
        strategy = replace(load_strategy("flashcp_hsap"), planner=Planner(objective="bytes"))
        table.append(row(Entry("flashcp_hsap", strategy), "wlb", batches, 8, load_cluster("h100_8")))
        report.row(table[-1])
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "plans.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(table[0]))
            writer.writeheader()
            writer.writerows(table)
        draw(table[:drawn], args.out / "plans.png")
        report.note(f"written: {args.out / 'plans.csv'}, {args.out / 'plans.png'}")


if __name__ == "__main__":
    main()
