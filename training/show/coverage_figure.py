"""The coverage map of a plan: which rank computes which (query, key) pair, and in which of its rounds.

A sequence of any length is drawn in a few hundred cells a side: a cell shows one query and one key of its own, taken
where strides show, and asks the plan's steps who computes that pair.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray

from parallel.plan.ir import Attend, Heads
from parallel.plan.plan import Plan
from parallel.plan.tokens import TokenSet
from training.show.plan_style import FADED, PAPER, describe, entitle, mark_scale, new_figure, rank_colours, shaded
from training.show.round_numbers import round_numbers

Ints = NDArray[np.int64]
MOST_CELLS, MOST_PANELS, MOST_OUTLINES, MOST_NUMBERED = 256, 8, 300, 40
MASKED, PADDING, NOBODY = -1, -2, -1


@dataclass(frozen=True)
class Coverage:
    """Who computes what, for the query heads `heads`.

    Attributes:
        sample: [cells], the token that each row and column of cells shows.
        owner: [cells], the rank that holds that token.
        rank: [cells, cells], queries down and keys across: the computing rank, or MASKED, or PADDING.
        round: [cells, cells]: the round of that rank, from 0 (`round_numbers`); NOBODY where no rank computes.
    """

    heads: Heads
    sample: Ints
    owner: Ints
    rank: Ints
    round: Ints


def sample_tokens(total: int, cells: int = MOST_CELLS) -> Ints:
    """One token of each cell, a little further into the cell each time: a fixed step would meet one stripe only."""
    n = min(total, cells)
    cuts = np.arange(n + 1) * total // max(n, 1)
    return cuts[:-1] + np.arange(n) % np.maximum(np.diff(cuts), 1)


def members(tokens: TokenSet, sample: Ints) -> Ints:
    """Which of `sample` (by index) an ascending set holds."""
    if tokens.count == 0:
        return np.zeros(0, np.int64)
    start, stop, stride = tokens.ranges.T
    at = (np.searchsorted(start, sample, side="right") - 1).clip(min=0)
    inside = (start[at] <= sample) & (sample < stop[at]) & ((sample - start[at]) % stride[at] == 0)
    return np.flatnonzero(inside)


def coverage_of(plan: Plan, cells: int = MOST_CELLS) -> list[Coverage]:
    """A map for each group of query heads that the same ranks compute.

    Raises:
        ValueError: a plan of some ranks only, or of no tokens.
    """
    if len(plan.ranks) != plan.size:
        raise ValueError(f"the plan holds {len(plan.ranks)} of {plan.size} ranks; plan all of them to draw it")
    sample = sample_tokens(plan.placement.layout.total_tokens, cells)
    if plan.placement.layout.total_tokens == 0:
        raise ValueError("the batch holds 0 tokens, and there is nothing to draw; give it a document")
    steps: list[tuple[int, int, Attend]] = []
    for program in plan.programs("forward"):
        numbers = round_numbers(program)
        steps += [(program.rank, numbers[at], s) for at, s in enumerate(program.steps) if isinstance(s, Attend)]
    owner = np.full(len(sample), NOBODY)
    for rank, tokens in enumerate(plan.placement.sets):
        owner[members(tokens, sample)] = rank
    blank = _unseen(plan, sample)
    edges = sorted({0, plan.shape.H, *(edge for _, _, step in steps for edge in step.heads)})
    maps: list[Coverage] = []
    for first, stop in pairwise(edges):
        rank, number = np.where(blank == PADDING, PADDING, MASKED), np.full(blank.shape, NOBODY)
        for who, when, step in steps:
            if step.heads[0] <= first < step.heads[1]:
                at = np.ix_(members(step.q_tokens, sample), members(step.k_tokens, sample))
                seen = blank[at] == 0
                rank[at] = np.where(seen, who, rank[at])
                number[at] = np.where(seen, when, number[at])
        if maps and maps[-1].heads[1] == first and np.array_equal(maps[-1].rank, rank):
            last = maps.pop()  # the same ranks, some rounds later
            maps.append(Coverage((last.heads[0], stop), sample, owner, rank, last.round))
        else:
            maps.append(Coverage((first, stop), sample, owner, rank, number))
    return maps


def _unseen(plan: Plan, sample: Ints) -> Ints:
    """[cells, cells]: 0 where the pair is allowed, else MASKED or PADDING."""
    layout, mask = plan.placement.layout, plan.mask
    document = np.searchsorted(layout.stops, sample, side="right")
    known = document < layout.num_documents
    known[known] = layout.starts[document[known]] <= sample[known]
    same = document[:, None] == document[None, :]
    inside = np.minimum(document, max(layout.num_documents - 1, 0))
    start, length = (x[inside] if layout.num_documents else 0 * sample for x in (layout.starts, layout.lengths))
    allowed = np.zeros_like(same)
    for band in mask.bands:
        low, high = (side + start for side in band.keys(sample - start, length))
        allowed |= same & (low[:, None] <= sample) & (sample < high[:, None])
    both = known[:, None] & known[None, :]
    return np.where(both, np.where(allowed, 0, MASKED), PADDING)


def draw_coverage(plan: Plan, cells: int = MOST_CELLS) -> Figure:
    """Queries down, keys across, the colour is the rank that computes the pair and fades with its rounds."""
    maps = coverage_of(plan, cells)
    shown = maps[:MOST_PANELS]
    columns = min(len(shown), 4)
    rows = -(-len(shown) // columns)
    side = 6.4 if len(shown) == 1 else 4.0
    figure = new_figure(side * columns + 1.9, side * rows + 0.7)
    axes = figure.subplots(rows, columns, squeeze=False)
    colours = rank_colours(plan.size)
    last = max(int(each.round.max(initial=0)) for each in shown)
    for index, at in enumerate(axes.flat):
        if index < len(shown):
            draw_panel(at, plan, shown[index], colours, last, alone=len(maps) == 1)
        else:
            at.set_axis_off()
    left_out = f" ({len(shown)} of {len(maps)} groups of heads)" if len(shown) < len(maps) else ""
    entitle(figure, f"{describe(plan)}; who computes which pair{left_out}")
    _legend(figure, plan, colours, last)
    return figure


def draw_panel(at: Axes, plan: Plan, cover: Coverage, colours: NDArray[np.float64], last: int, alone: bool) -> None:
    """One map with its strips of owners and its documents' outlines; `last` is the round that is palest."""
    total, n = plan.placement.layout.total_tokens, len(cover.sample)
    picture = np.ones((n, n, 3)) * np.array(to_rgb(PAPER))
    picture[cover.rank == PADDING] = to_rgb(FADED)
    busy = cover.rank >= 0
    picture[busy] = shaded(colours[cover.rank[busy]], cover.round[busy] / max(last, 1))
    at.imshow(picture, extent=(0, total, total, 0), interpolation="nearest")
    strip = total * 0.02
    owner = colours[cover.owner][None]
    at.imshow(owner, extent=(0, total, -0.5 * strip, -1.5 * strip), interpolation="nearest", aspect="auto")
    at.imshow(
        owner.transpose(1, 0, 2), extent=(-1.5 * strip, -0.5 * strip, total, 0), interpolation="nearest", aspect="auto"
    )
    at.set_xlim(-2 * strip, total)
    at.set_ylim(total, -2 * strip)
    at.set_aspect("equal")
    if n == total and n <= MOST_NUMBERED:
        for row, column in zip(*np.nonzero(busy)):
            at.text(column + 0.5, row + 0.5, str(cover.round[row, column]), ha="center", va="center", fontsize=6)
    _outline(at, plan)
    for name, axis in (("keys", at.xaxis), ("queries", at.yaxis)):
        mark_scale(axis, total)
        axis.set_label_text(f"{name} (strip: who holds them)" if alone else name, fontsize=9)
    at.tick_params(labelsize=8)
    for spine in at.spines.values():
        spine.set_visible(False)
    if not alone:
        first, stop = cover.heads
        at.set_title(f"query heads {first} to {stop - 1}" if stop - first > 1 else f"query head {first}", fontsize=9)


def _outline(at: Axes, plan: Plan) -> None:
    """Documents as squares, and the whole."""
    layout = plan.placement.layout
    longest = np.argsort(layout.lengths)[::-1][:MOST_OUTLINES]
    line = 0.8 if layout.num_documents <= 60 else 0.4
    for document in longest.tolist():
        start, size = int(layout.starts[document]), int(layout.lengths[document])
        at.add_patch(Rectangle((start, start), size, size, fill=False, edgecolor="#333333", linewidth=line))
    total = layout.total_tokens
    at.add_patch(Rectangle((0, 0), total, total, fill=False, edgecolor="#888888", linewidth=0.6))


def _legend(figure: Figure, plan: Plan, colours: NDArray[np.float64], last: int) -> None:
    names = range(plan.size) if plan.size <= 16 else [round(i * (plan.size - 1) / 15) for i in range(16)]
    patches = [Patch(facecolor=tuple(colours[rank]), label=f"rank {rank}") for rank in names]
    if last:
        for share, text in ((0.0, "first round"), (1.0, "last round")):
            grey = tuple(shaded(np.full((1, 3), 0.35), np.array([share]))[0])
            patches.append(Patch(facecolor=grey, label=text))
    patches.append(Patch(facecolor=PAPER, edgecolor="#888888", label="masked"))
    if plan.placement.layout.padding_tokens:
        patches.append(Patch(facecolor=FADED, label="padding"))
    patches.append(Patch(facecolor="none", edgecolor="#333333", label="a document"))
    figure.legend(handles=patches, loc="outside right upper", fontsize=8, frameon=False)
