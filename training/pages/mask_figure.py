"""A picture of each mask of `kernels.mask_spec` on three packed documents, drawn from the masks themselves."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from kernels.mask_spec import MaskSpec
from training.show.plan_style import FEW, entitle, new_figure

LENGTHS = (7, 4, 9)  # tokens of the three documents
SHOWN: tuple[MaskSpec, ...] = (
    MaskSpec(),
    MaskSpec(causal=False),
    MaskSpec(window=3),
    MaskSpec(chunk=4),
    MaskSpec(prefix=3),
    MaskSpec(window=3, first=1),
    MaskSpec(chunk=4, first=1),
    MaskSpec(window=3, prefix=3),
)
FIRST, SECOND = FEW[0], FEW[1]


def seen(mask: MaskSpec, lengths: tuple[int, ...] = LENGTHS) -> np.ndarray:
    """int [tokens, tokens]: 0 where a query (row) does not see a key (column), else the number of the band, from 1."""
    total, start = sum(lengths), 0
    found = np.zeros((total, total), int)
    for length in lengths:
        at, keys = np.arange(length), np.arange(length)
        for number, band in enumerate(mask.bands, 1):
            low, high = band.keys(at, length)
            inside = (low[:, None] <= keys) & (keys < high[:, None])
            found[start : start + length, start : start + length][inside] = number
        start += length
    return found


def draw_masks(masks: tuple[MaskSpec, ...] = SHOWN) -> Figure:
    """A panel for each mask: queries down, keys across, a square for each pair that the mask allows."""
    columns = 4
    rows = -(-len(masks) // columns)
    figure = new_figure(10.6, 2.8 * rows + 0.8)
    entitle(figure, f"documents of {', '.join(map(str, LENGTHS[:-1]))} and {LENGTHS[-1]} tokens, packed into one row")
    axes = figure.subplots(rows, columns, squeeze=False)
    for at, mask in zip(axes.flat, masks):
        _panel(at, mask)
    for row in axes:
        row[0].set_ylabel("queries", fontsize=9)
    for at in axes[-1]:
        at.set_xlabel("keys", fontsize=9)
    handles = [
        Patch(facecolor=FIRST, label="the query sees the key"),
        Patch(facecolor=SECOND, label="the same, in the mask's second interval"),
        Patch(facecolor="none", edgecolor="#333333", label="a document"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def _panel(at: Axes, mask: MaskSpec) -> None:
    pairs, start = seen(mask), 0
    for query, key in zip(*np.nonzero(pairs)):
        colour = FIRST if pairs[query, key] == 1 else SECOND
        at.add_patch(Rectangle((key + 0.06, query + 0.06), 0.88, 0.88, facecolor=colour, linewidth=0))
    for length in LENGTHS:
        at.add_patch(Rectangle((start, start), length, length, fill=False, edgecolor="#333333", linewidth=0.8))
        start += length
    at.set_xlim(-0.3, start + 0.3)
    at.set_ylim(start + 0.3, -0.3)
    at.set_aspect("equal")
    at.set_xticks([])
    at.set_yticks([])
    at.set_title(str(mask), fontsize=9.5)
    for spine in at.spines.values():
        spine.set_visible(False)
