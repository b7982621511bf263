"""How documents become rows: a picture of each packing on the same documents, and what each pads and cuts."""

from collections.abc import Iterator

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from data.packing import PACKINGS, Piece
from data.sources.mixes import draw_lengths
from training.pages.style import SMALL
from training.show.plan_style import FADED, FEW, entitle, new_figure

DRAWN = (9, 5, 12, 3, 7, 20, 4, 6, 2, 8)  # tokens of the documents that are drawn
ROW = 16
MIXED = ("web", "code", "wlb")
MIXED_ROW, MIXED_TOKENS = 8_192, 1_000_000


def rows_of(packing: str, lengths: list[int], row_length: int) -> Iterator[list[Piece]]:
    """The rows that a packer makes of documents in order."""
    packer, documents = PACKINGS[packing](row_length, 256), iter(enumerate(lengths))

    def pull() -> Piece | None:
        found = next(documents, None)
        return None if found is None else Piece(0, found[0], 0, found[1])

    while row := packer.row(pull):
        yield row


def draw_packings() -> Figure:
    """A panel for each packing: a row of tokens is a row, a document has a colour and a number."""
    packed = {name: list(rows_of(name, list(DRAWN), ROW)) for name in PACKINGS}
    most = max(map(len, packed.values()))
    figure = new_figure(11.0, 0.24 * most + 1.5)
    entitle(figure, f"{len(DRAWN)} documents of {', '.join(map(str, DRAWN))} tokens in rows of {ROW}")
    for at, (name, rows) in zip(figure.subplots(1, len(packed), squeeze=False)[0], packed.items()):
        for place, row in enumerate(rows):
            at.add_patch(Rectangle((0, place), ROW, 0.86, facecolor=FADED, linewidth=0))
            start = 0
            for piece in row:
                colour = FEW[piece.document % len(FEW)]
                at.add_patch(Rectangle((start, place), piece.length, 0.86, facecolor=colour, edgecolor="white"))
                ink = "white" if sum(to_rgb(colour)) < 1.4 else "black"
                label = at.text(start + piece.length / 2, place + 0.45, str(piece.document), fontsize=8, color=ink)
                label.set_horizontalalignment("center")
                label.set_verticalalignment("center")
                start += piece.length
        at.set_xlim(0, ROW)
        at.set_ylim(most, 0)
        at.set_title(f"{name}: {len(rows)} rows", fontsize=SMALL + 1)
        at.set_axis_off()
    handles = [
        Patch(facecolor=FEW[0], label="a document or a part of one, with its number"),
        Patch(facecolor=FADED, label="padding"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=SMALL, frameon=False)
    return figure


def packing_table() -> str:
    """Markdown: padding, cuts and documents a row of each packing, on three mixes of lengths."""
    lines = ["| mix | packing | rows | padding | documents cut | documents a row |", "|---|---|---|---|---|---|"]
    for mix in MIXED:
        lengths = draw_lengths(mix, MIXED_TOKENS, 0)
        for name in PACKINGS:
            rows = list(rows_of(name, lengths, MIXED_ROW))
            pieces = [piece for row in rows for piece in row]
            held = sum(piece.length for piece in pieces)
            cut = sum(piece.stop < lengths[piece.document] for piece in pieces)
            padding = 1 - held / (len(rows) * MIXED_ROW)
            lines.append(
                f"| {mix} | {name} | {len(rows):,} | {padding:.1%} | {cut:,} | {len(pieces) / len(rows):.1f} |"
            )
    return "\n".join(lines)
