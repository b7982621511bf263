"""Strategies side by side on one batch, as the README and docs/ show them, counted and priced from plans.

Work and bytes are counts of what would run. Seconds are the walk over the plan's steps with the constants of a file in
conf/cluster: predicted, not measured.
"""

from functools import lru_cache

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from data.sources.mixes import draw_lengths
from kernels.mask_spec import MaskSpec
from parallel.plan.ir import AttentionShape
from parallel.plan.layout import PackedLayout
from parallel.plan.plan import DIRECTIONS, Plan
from parallel.price.cluster import load_cluster
from parallel.price.predict import predict_plan
from parallel.sharding.planner import Planner
from parallel.strategy import load_strategy
from training.pages.style import SMALL
from training.show.coverage_figure import coverage_of, draw_panel
from training.show.plan_style import entitle, new_figure, rank_colours

SHAPE = AttentionShape(32, 8, 64, 64, "bf16")  # the heads of llama32_1b
MIX, TOKENS, WORLD, CLUSTER = "wlb", 262_144, 16, "h100_64"  # two nodes of eight
LISTED = ("ring", "zigzag_ring", "llama3", "per_document", "usp", "hsap", "flashcp", "flashcp_hsap")
DRAWN = ("ring", "zigzag_ring", "flashcp_hsap")
DRAWN_LENGTHS = (24_000, 16_000, 9_000, 6_000, 4_500, 3_000, 2_000, 1_036)
CELLS = 128


def large_batch() -> PackedLayout:
    """Documents drawn from a mix of lengths, in one row."""
    return PackedLayout.from_lengths(draw_lengths(MIX, TOKENS, 0))


@lru_cache
def large_plan(name: str, objective: str = "time") -> Plan:
    """The plan of a preset for `large_batch`."""
    return _plan(name, large_batch(), WORLD, Planner(objective=objective, cluster=CLUSTER))


def _plan(name: str, layout: PackedLayout, world: int, planner: Planner) -> Plan:
    strategy = load_strategy(name)
    if strategy.sharding == "whole_document":
        strategy = load_strategy(name, planner=planner)
    mesh = strategy.mesh(world, SHAPE.H, SHAPE.Hkv)
    return strategy.plan(strategy.shard(layout, mesh, SHAPE), SHAPE, MaskSpec())


def imbalance(plan: Plan) -> float:
    """Allowed pairs of the busiest rank over the mean of ranks."""
    return float(plan.work.max() / plan.work.mean())


def busiest_bytes(plan: Plan) -> int:
    """Bytes that the rank with the most traffic receives from others, forward and backward."""
    parts = [part for direction in DIRECTIONS for part in plan.bytes_of(direction).values()]
    return int((np.sum(parts, axis=0) * (1 - np.eye(plan.size, dtype=np.int64))).sum(0).max())


def _figures(plan: Plan) -> str:
    """Three cells of a table: work, bytes, predicted time."""
    time = predict_plan(plan, load_cluster(CLUSTER)).total_s * 1e3
    return f"{imbalance(plan):.2f} | {busiest_bytes(plan) / 1e6:,.0f} MB | {time:.1f} ms"


def comparison_table() -> str:
    """Markdown: for each preset of LISTED its balance, its bytes and its predicted time."""
    lines = ["| strategy | work of the busiest rank / mean | most received by a rank | predicted time |"]
    lines += ["|---|---|---|---|"]
    lines += [f"| `{name}` | {_figures(large_plan(name))} |" for name in LISTED]
    return "\n".join(lines)


def planner_table() -> str:
    """Markdown: the objectives of the planner on the same batch."""
    lines = ["| preset | objective | work of the busiest rank / mean | most received by a rank | predicted time |"]
    lines += ["|---|---|---|---|---|"]
    for name in ("flashcp", "flashcp_hsap"):
        for objective in ("time", "bytes"):
            plan = large_plan(name, objective)
            lines.append(f"| `{name}` | {objective} | {_figures(plan)} |")
    return "\n".join(lines)


def exchange_table() -> str:
    """Markdown: what each exchange sends and holds for the same tokens on the same ranks (contiguous shards)."""
    lines = ["| exchange | batches forward + backward | sent forward | sent backward | peak buffer of a rank |"]
    lines += ["|---|---|---|---|---|"]
    layout = PackedLayout.from_lengths(list(DRAWN_LENGTHS))
    for name in ("ring", "double_ring", "llama3", "ulysses", "distflash", "flashcp", "hsap"):
        sharding = "zigzag" if name == "double_ring" else "contiguous"
        inner = {"cp_inner": 2} if name in ("double_ring", "hsap") else {}
        strategy = load_strategy(name, sharding=sharding, node_size=4, **inner)
        mesh = strategy.mesh(8, SHAPE.H, SHAPE.Hkv)
        plan = strategy.plan(strategy.shard(layout, mesh, SHAPE), SHAPE, MaskSpec())
        away = 1 - np.eye(plan.size, dtype=np.int64)
        sent = [sum(int((part * away).sum()) for part in plan.bytes_of(d).values()) for d in DIRECTIONS]
        peak = max(plan.peak_buffer_bytes(rank) for rank in range(plan.size))
        shown = {"double_ring": "ring, double", "hsap": "sequence_aware, heads inside pairs"}
        rounds = " + ".join(str(plan.rounds[d]) for d in DIRECTIONS)
        cells = " | ".join(f"{size / 1e6:,.0f} MB" for size in (*sent, peak))
        lines.append(f"| {shown.get(name, strategy.exchange)} | {rounds} | {cells} |")
    return "\n".join(lines)


def draw_comparison() -> Figure:
    """Who computes which pair under the presets of DRAWN, on four ranks."""
    layout = PackedLayout.from_lengths(list(DRAWN_LENGTHS))
    plans = [_plan(name, layout, 4, Planner()) for name in DRAWN]
    maps = [coverage_of(plan, CELLS)[0] for plan in plans]
    figure = new_figure(12.0, 4.9)
    axes = figure.subplots(1, len(plans), squeeze=False)[0]
    last = max(int(each.round.max(initial=0)) for each in maps)
    colours = rank_colours(4)
    for at, name, plan, cover in zip(axes, DRAWN, plans, maps):
        draw_panel(at, plan, cover, colours, last, alone=False)
        at.set_title(
            f"{name}\nbusiest rank: {imbalance(plan):.2f} x mean work, {busiest_bytes(plan) / 1e6:,.0f} MB received",
            fontsize=SMALL + 1,
        )
    entitle(figure, f"{len(DRAWN_LENGTHS)} documents, {layout.total_tokens:,} tokens, 4 ranks: who computes which pair")
    patches = [Patch(facecolor=tuple(colour), label=f"rank {rank}") for rank, colour in enumerate(colours)]
    patches += [
        Patch(facecolor="#595959", label="its first round"),
        Patch(facecolor="#c5c5c5", label="its last round"),
        Patch(facecolor="none", edgecolor="#333333", label="a document"),
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=7, fontsize=SMALL, frameon=False)
    return figure
