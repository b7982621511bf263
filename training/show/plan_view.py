"""`run=plan`: the first batch's plan, proved, as a table per rank and two figures. No rank starts.

python train.py run=plan strategy=usp nproc=8 data=synthetic data.seq_len=32768 model.max_positions=32768
python train.py run=plan strategy=zigzag_ring nproc=4 'run.lengths=[40,8,8,8]'     documents of your own
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from parallel.auto import Resolved, resolve
from parallel.plan.ir import AttentionShape, Post
from parallel.plan.layout import PackedLayout
from parallel.plan.mesh import AXES, CP, LINKS, MeshSpec
from parallel.plan.plan import Plan
from parallel.price.cluster import load_cluster
from parallel.price.predict import predict_plan
from parallel.proof.verify import verify
from training.config import Config, Precision, config_hash
from training.outcome import Outcome
from training.show.coverage_figure import draw_coverage
from training.show.plan_style import save_figure
from training.show.timeline_figure import draw_timeline

MANY = 64  # ranks of a sequence from which on each part of the work is announced


@dataclass(frozen=True)
class RankLine:
    """What a plan asks of one rank in a step, forward and backward.

    Attributes:
        rank: the world rank.
        work: allowed (query, key) pairs, a head's pair counting 1 / H.
        sent, received: bytes by link; `self` is what the rank copies, counted once under `sent`.
        rounds: batches that it takes part in, forward and backward.
        peak: bytes of temporary buffers held at once.
    """

    rank: int
    tokens: int
    work: float
    sent: dict[str, int]
    received: dict[str, int]
    rounds: tuple[int, int]
    peak: int


def show_plan(config: Config, console: Console) -> Outcome:
    """Plan, verify, print and draw each distinct mask of the layers; figures go to `<run folder>`.

    Raises:
        ValueError: what the strategy, the model or the data refuse.
    """
    world = config.nproc or 1
    mesh = config.check_ranks(world)
    layout = first_layout(config, mesh)
    model = config.model
    dtype = "bf16" if config.run.precision is Precision.bf16 else "fp32"
    shape = AttentionShape(model.heads, model.kv_heads, model.head_dim, model.head_dim, dtype)
    folder = Path(config.run.dir or Path("runs") / f"{config.run.name}-{config_hash(config)}").absolute()
    ranks = mesh.group_of(0, *CP)
    masks = model.layer_masks()
    console.print(_heading(config, layout, mesh, world), highlight=False, markup=False)
    many, cluster = mesh.cp >= MANY, load_cluster(config.strategy.planner.cluster)
    if many:
        console.print(
            f"planning {mesh.cp} ranks, which share {layout.total_tokens:,} tokens: this can take minutes (fewer ranks "
            "take less)",
            highlight=False,
            markup=False,
        )
    began = time.perf_counter()
    resolved = resolve(config.strategy, mesh, layout, shape, masks)
    seconds = time.perf_counter() - began
    console.print(f"planned in {seconds * 1e3:.0f} ms{_weighed(resolved)}", highlight=False, markup=False)
    for mask in dict.fromkeys(masks):
        began = time.perf_counter()
        plan = resolved.plans[mask]
        if many:
            console.print(f"proving {mask}", highlight=False, markup=False)
        verify(plan)
        proved = time.perf_counter()
        console.print(
            f"\n{mask} ({masks.count(mask)} of {len(masks)} layers), for one layer: "
            f"verified in {(proved - began) * 1e3:.0f} ms, hash {plan.hash}, predicted attention "
            f"{predict_plan(plan, cluster).total_s * 1e3:.3g} ms on {cluster.name}",
            highlight=False,
            markup=False,
        )
        console.print(rank_table(plan, ranks))
        if many:
            console.print("drawing who computes which pair, and when", highlight=False, markup=False)
        name = f"{file_name(resolved.strategy.labelled(AXES))}-{plan.hash[:8]}"
        paths = save_figure(draw_coverage(plan), folder, f"{name}-coverage")
        paths += save_figure(draw_timeline(plan, ranks, cluster), folder, f"{name}-timeline")
        for path in paths:
            console.print(f"  {path}", highlight=False, markup=False, soft_wrap=True)
    return Outcome(0, None, folder)


def _weighed(resolved: Resolved) -> str:
    """What strategy=auto chose, and the prices of what it weighed."""
    if not resolved.seconds:
        return ""
    prices = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in resolved.seconds.items())
    return f"; auto chose {resolved.strategy.labelled(AXES)} (attention of all layers, predicted: {prices})"


def file_name(label: str) -> str:
    """A strategy's label as part of a file's name: 'local-with-exchange=ring'."""
    return re.sub(r"[^\w.=]+", "-", label)[:100]


def first_layout(config: Config, mesh: MeshSpec) -> PackedLayout:
    """The documents of the first micro-batch of the first replica, or `run.lengths` in one row."""
    if config.run.lengths:
        return PackedLayout.from_lengths(config.run.lengths)
    from data.loader import PackedLoader  # loads torch

    batch = PackedLoader(config.data, config.model.vocab_size, config.run.seed).batch(0)
    return batch.micro_batches(config.run.accumulate * mesh.dp)[0].layout


def rank_lines(plan: Plan, ranks: tuple[int, ...]) -> list[RankLine]:
    """A line for each cp rank; `ranks` are their world ranks.

    Raises:
        ValueError: a plan of some ranks only.
    """
    if len(plan.ranks) != plan.size:
        raise ValueError(f"the plan holds {len(plan.ranks)} of {plan.size} ranks; plan all of them to list them")
    total: NDArray[np.int64] = np.sum(list(plan.bytes.values()), axis=0)
    links = np.array([[LINKS.index(plan.placement.mesh.link(a, b)) for b in ranks] for a in ranks])
    lines = []
    for index, (rank, forward, backward) in enumerate(
        zip(ranks, plan.programs("forward"), plan.programs("backward"), strict=True)
    ):
        sent = {link: int(total[index][links[index] == n].sum()) for n, link in enumerate(LINKS)}
        received = {link: int(total[:, index][links[:, index] == n].sum()) for n, link in enumerate(LINKS)}
        posts = [sum(isinstance(step, Post) for step in program.steps) for program in (forward, backward)]
        lines.append(
            RankLine(
                rank,
                plan.placement.sets[index].count,
                float(plan.work[index]),
                sent,
                received,
                (posts[0], posts[1]),
                plan.peak_buffer_bytes(index),
            )
        )
    return lines


def rank_table(plan: Plan, ranks: tuple[int, ...]) -> Table:
    """`rank_lines` with a line of totals."""
    lines = rank_lines(plan, ranks)
    mean = sum(line.work for line in lines) / len(lines)
    table = Table(box=SIMPLE_HEAD, show_footer=True, padding=(0, 1))
    table.add_column("rank", "all", justify="right")
    table.add_column("tokens", f"{sum(line.tokens for line in lines):,}", justify="right")
    table.add_column("pairs", f"{sum(line.work for line in lines):,.0f}", justify="right")
    worst = max(line.work for line in lines) / mean if mean else 0.0
    table.add_column("of mean", f"max {worst:.2f}", justify="right")
    for name, link in (("sent in node", "intra"), ("sent between", "inter")):
        table.add_column(name, size(sum(line.sent[link] for line in lines)), justify="right")
    for name, link in (("received in node", "intra"), ("received between", "inter")):
        table.add_column(name, size(sum(line.received[link] for line in lines)), justify="right")
    table.add_column("copied", size(sum(line.sent["self"] for line in lines)), justify="right")
    rounds = plan.rounds
    table.add_column("rounds", f"{rounds['forward']} + {rounds['backward']}", justify="right")
    table.add_column("peak buffer", f"max {size(max(line.peak for line in lines))}", justify="right")
    for line in lines:
        table.add_row(
            str(line.rank),
            f"{line.tokens:,}",
            f"{line.work:,.0f}",
            f"{line.work / mean:.2f}" if mean else "-",
            *(size(side[link]) for side in (line.sent, line.received) for link in ("intra", "inter")),
            size(line.sent["self"]),
            f"{line.rounds[0]} + {line.rounds[1]}",
            size(line.peak),
        )
    return table


def size(count: int) -> str:
    """'0', '640 B', '1.5 MiB'."""
    if count == 0:
        return "0"
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def _heading(config: Config, layout: PackedLayout, mesh: MeshSpec, world: int) -> str:
    axes = " x ".join(f"{axis} {n}" for axis, n in zip(mesh.sizes._fields, mesh.sizes) if n > 1) or "one rank"
    rows = f"{layout.num_rows} row{'s' if layout.num_rows != 1 else ''} of {layout.row_length:,} tokens"
    whose = "given by run.lengths" if config.run.lengths else "of the first batch"
    replica = f"; the first of {mesh.dp} replicas" if mesh.dp > 1 else ""
    longest = sorted(layout.lengths.tolist(), reverse=True)
    shown = ", ".join(f"{n:,}" for n in longest[:6]) + (", ..." if len(longest) > 6 else "")
    return (
        f"strategy {config.strategy.labelled(AXES)} on {world} rank{'s' if world != 1 else ''} ({axes}){replica}: "
        f"{layout.num_documents:,} documents {whose} (longest: {shown}) in {rows}, {layout.padding_tokens:,} of padding"
    )
