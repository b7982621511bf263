"""What the figures of a plan share: colours of ranks, shades of rounds, the words of a title, files."""

import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import hsv_to_rgb, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter
from numpy.typing import NDArray

from parallel.plan.mesh import AXES
from parallel.plan.plan import Plan
from parallel.strategy import Strategy

PAPER, FADED, WAITING, COPYING = "#ffffff", "#e4e4e4", "#f3cfca", "#b9b9b9"
INTRA, INTER = "#8a97a6", "#2c3e50"
# told apart with any colour vision (Okabe and Ito), grey and black left to other uses
FEW = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b5a800", "#7a5195")


def rank_colours(ranks: int) -> NDArray[np.float64]:
    """[ranks, 3] RGB: distinct for up to eight, then around the circle of hues in three tones."""
    if ranks <= len(FEW):
        return np.array([to_rgb(colour) for colour in FEW[:ranks]]).reshape(-1, 3)
    hue = np.arange(ranks) / ranks
    tone = np.array([0.62, 0.8, 0.95])[np.arange(ranks) % 3]
    return np.array([hsv_to_rgb((h, 0.75, v)) for h, v in zip(hue, tone)])


def shaded(colours: NDArray[np.float64], share: NDArray[np.float64]) -> NDArray[np.float64]:
    """`colours` [n, 3] mixed with white by up to two thirds, as `share` [n] goes from 0 to 1."""
    mix = 0.66 * np.asarray(share, float)[..., None]
    return colours * (1 - mix) + mix


def describe(plan: Plan) -> str:
    """'usp: zigzag, ring across 2, all_to_all inside 4; 4,096 tokens, 7 documents, causal'."""
    axes, mesh, layout = plan.axes, plan.placement.mesh, plan.placement.layout
    across, inside = axes["exchange"], axes["inner_exchange"]
    if mesh.cp == 1:
        how = "one rank"
    elif across == "all_to_all":
        how = f"all_to_all over {mesh.cp}"
    elif inside and mesh.cp_inner > 1:
        how = f"{across} across {mesh.cp_outer}, {inside} inside {mesh.cp_inner}"
    else:
        how = f"{across} over {mesh.cp}"
    rows = f" in {layout.num_rows} rows" if layout.num_rows > 1 else ""
    documents = f"{layout.num_documents:,} document" + ("" if layout.num_documents == 1 else "s")
    name = Strategy(**axes).labelled((*AXES, "node_size"))
    return f"{name}: {axes['sharding']}, {how}; {layout.total_tokens:,} tokens{rows}, {documents}, {plan.mask}"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure in inches that needs no display and no global state."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def entitle(figure: Figure, text: str) -> None:
    """A title that keeps to the figure's width."""
    figure.suptitle("\n".join(textwrap.wrap(text, int(figure.get_figwidth() * 10))), fontsize=10)


def mark_scale(axis: Axis, total: int) -> None:
    """A few round token counts, whole ones on short sequences."""
    step = max(1, 1 << max(0, (total // 4).bit_length() - 1)) if total else 1
    axis.set_major_locator(FixedLocator(list(range(0, total + 1, step))))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(int(value))))


def short(tokens: int) -> str:
    """'128K' for 131072, '1,000' for 1000."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens >= size and tokens % (size // 4) == 0:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:,}"


def save_figure(figure: Figure, folder: Path, name: str, kinds: tuple[str, ...] = ("png", "svg")) -> list[Path]:
    """Write `<name>.png` and `<name>.svg`: the same bytes for the same plan."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in kinds]
    with matplotlib.rc_context({"svg.hashsalt": name}):
        for kind, path in zip(kinds, paths):
            figure.savefig(path, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return paths
