"""The timeline of a plan: for each rank a lane of computing and one for each class of links, over predicted time."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from parallel.plan.plan import DIRECTIONS, Plan
from parallel.price.cluster import Cluster
from parallel.price.predict import Bar, walk
from training.show.plan_style import COPYING, INTER, INTRA, WAITING, describe, entitle, new_figure, rank_colours, shaded
from training.show.round_numbers import round_numbers

MOST_RANKS = 8
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


NAMES = {"compute": "", "intra": "inside", "inter": "between"}


def draw_timeline(plan: Plan, world_ranks: tuple[int, ...], cluster: Cluster) -> Figure:
    """Forward above, backward below; time runs to the right, predicted from the cluster's constants."""
    bars = {direction: walk(plan, cluster, direction, world_ranks) for direction in DIRECTIONS}
    ranks = sorted({round(i * (plan.size - 1) / (MOST_RANKS - 1)) for i in range(MOST_RANKS)})
    ranks = list(range(plan.size)) if plan.size <= MOST_RANKS else ranks
    lanes = {
        d: [lane for lane in NAMES if lane == "compute" or lane in {bar.lane for bar in bars[d]}] for d in DIRECTIONS
    }
    heights = [len(ranks) * (1 + 0.6 * (len(lanes[d]) - 1)) for d in DIRECTIONS]
    figure = new_figure(12.0, 1.9 + 0.22 * sum(heights))
    axes = figure.subplots(2, 1, height_ratios=[max(h, 1) for h in heights], squeeze=False)[:, 0]
    end = max((bar.stop for d in DIRECTIONS for bar in bars[d]), default=1.0)
    scale, unit = next((s, u) for s, u in UNITS if end >= s or s == UNITS[-1][0])
    for at, direction in zip(axes, DIRECTIONS):
        numbers = [round_numbers(program) for program in plan.programs(direction)]
        _draw(at, bars[direction], numbers, lanes[direction], ranks, scale)
        at.set_title(_summary(direction, bars[direction], plan.size), fontsize=9, loc="left")
    axes[-1].set_xlabel(
        f"{unit}, predicted for a layer's attention with the constants of conf/cluster/{cluster.name}.yaml", fontsize=9
    )
    shown = f", {len(ranks)} of {plan.size} ranks" if len(ranks) < plan.size else ""
    entitle(figure, f"{describe(plan)}; predicted time{shown}")
    _legend(figure, {bar.what for d in DIRECTIONS for bar in bars[d]})
    return figure


def exposed_share(bars: list[Bar], ranks: int) -> float:
    """Share of all ranks' time until the last one ends in which nothing is computed."""
    end = max((bar.stop for bar in bars), default=0.0)
    busy = sum(bar.stop - bar.start for bar in bars if bar.what in ("attention", "copy"))
    return 1 - busy / (end * ranks) if end else 0.0


def _summary(direction: str, bars: list[Bar], ranks: int) -> str:
    waits = sum(bar.stop - bar.start for bar in bars if bar.what == "wait")
    end = max((bar.stop for bar in bars), default=0.0)
    share = waits / (end * ranks) if end else 0.0
    idle = exposed_share(bars, ranks) - share
    return f"{direction}: of the ranks' time {share:.0%} is exposed, {max(idle, 0):.0%} has nothing left to do"


def _draw(
    at: Axes, bars: list[Bar], numbers: list[dict[int, int]], lanes: list[str], ranks: list[int], scale: float
) -> None:
    colours = rank_colours(len(numbers))
    last = max((n for of_rank in numbers for n in of_rank.values()), default=0)
    plain = {"wait": WAITING, "copy": COPYING, "intra": INTRA, "inter": INTER}
    pitch = 1 + 0.6 * (len(lanes) - 1)
    top = {(rank, lane): row * pitch + (0.6 * index + 0.4 if index else 0) for row, rank in enumerate(ranks)
           for index, lane in enumerate(lanes)}  # fmt: skip
    end = max((bar.stop for bar in bars), default=scale) / scale
    for bar in bars:
        if bar.rank not in ranks:
            continue
        y, height = top[bar.rank, bar.lane] + 0.06, 0.84 if bar.lane == "compute" else 0.42
        where = [(bar.start / scale, (bar.stop - bar.start) / scale)]
        if bar.what in plain:
            at.broken_barh(where, (y, height), facecolor=plain[bar.what], edgecolor="white", linewidth=0.4)
            continue
        number = numbers[bar.rank][bar.step]
        face = tuple(_shade(colours[bar.rank], number / max(last, 1)))
        at.broken_barh(where, (y, height), facecolor=face, edgecolor="white", linewidth=0.4)
        if where[0][1] > end * 0.022:
            at.text(where[0][0] + where[0][1] / 2, y + height / 2, str(number), fontsize=6, ha="center", va="center")
    small = len(ranks) > 8
    at.set_yticks(
        [top[rank, lane] + (0.5 if lane == "compute" else 0.27) for rank in ranks for lane in lanes],
        [f"rank {rank}" if lane == "compute" else NAMES[lane] for rank in ranks for lane in lanes],
        fontsize=5 if small else 6.5,
    )
    at.set_ylim(len(ranks) * pitch, -0.1)
    at.set_xlim(0, end)
    at.tick_params(axis="x", labelsize=8)
    at.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        at.spines[side].set_visible(False)


def _shade(colour: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    return shaded(colour[None], np.array([share]))[0]


def _legend(figure: Figure, found: set[str]) -> None:
    patches = [Patch(facecolor="#0072b2", label="computes, in the rank's colour (number: round; paler: later)")]
    if "copy" in found:
        patches.append(Patch(facecolor=COPYING, label="a pass through memory"))
    if "intra" in found:
        patches.append(Patch(facecolor=INTRA, label="transfer inside a node"))
    if "inter" in found:
        patches.append(Patch(facecolor=INTER, label="transfer between nodes"))
    if "wait" in found:
        patches.append(Patch(facecolor=WAITING, label="exposed: waits for a transfer or a sender"))
    figure.legend(handles=patches, loc="outside lower center", fontsize=8, ncols=len(patches), frameon=False)
