"""What the README and docs/ show and code makes: `python -m training.generated` writes it again, a test compares.

A block lies between `<!-- NAME: ... -->` and `<!-- end -->`; figures lie in docs/figures.
"""

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from kernels.mask_spec import MaskSpec
from parallel.plan.ir import AttentionShape
from parallel.plan.layout import PackedLayout
from parallel.plan.plan import DIRECTIONS, Plan
from parallel.price.cluster import load_cluster
from parallel.strategy import load_strategy
from training.pages.comparison import comparison_table, draw_comparison, exchange_table, planner_table
from training.pages.mask_figure import draw_masks
from training.pages.packing import draw_packings, packing_table
from training.pages.tables import codec_table, draw_tiles, model_table
from training.show.coverage_figure import draw_coverage
from training.show.explain import preset_table, support_table
from training.show.keys import key_tables
from training.show.plan_listing import list_steps, ranges
from training.show.plan_style import save_figure
from training.show.plan_view import rank_lines
from training.show.timeline_figure import draw_timeline

ROOT = Path(__file__).resolve().parents[1]


def small_plan() -> Plan:
    """The plan that docs/plan.md works through: three documents on two ranks, with the `tiny` model's heads."""
    strategy = load_strategy("zigzag_ring")
    shape = AttentionShape(2, 1, 64, 64, "fp32")
    layout = PackedLayout.from_lengths([5, 3, 4])
    return strategy.plan(strategy.shard(layout, strategy.mesh(2, shape.H, shape.Hkv)), shape, MaskSpec())


def large_plan() -> Plan:
    """The plan of docs/strategies.md: five documents, heads exchanged inside pairs of ranks, keys across four pairs."""
    strategy = load_strategy("hsap", cp_inner=2)
    shape = AttentionShape(16, 4, 64, 64, "bf16")
    layout = PackedLayout.from_lengths([40_000, 8_000, 8_000, 8_000, 1_536])
    return strategy.plan(strategy.shard(layout, strategy.mesh(8, shape.H, shape.Hkv)), shape, MaskSpec())


def small_table() -> str:
    """Markdown: what each rank of `small_plan` holds, computes and sends."""
    plan = small_plan()
    lines = [
        "| rank | tokens | pairs | sent forward | sent backward | peak buffer |",
        "|---|---|---|---|---|---|",
    ]
    sent = [sum(plan.bytes_of(direction).values()) for direction in DIRECTIONS]
    for line in rank_lines(plan, (0, 1)):
        held, (forward, backward) = ranges(plan.placement.sets[line.rank]), (int(s[line.rank].sum()) for s in sent)  # pyright: ignore[reportIndexIssue]
        lines.append(f"| {line.rank} | {held} | {line.work:.0f} | {forward:,} B | {backward:,} B | {line.peak:,} B |")
    return "\n".join([*lines, "", f"Hash `{plan.hash}`."])


def small_steps() -> str:
    """The steps of rank 0 of `small_plan` in both directions."""
    plan = small_plan()
    parts = [f"{direction}\n" + "\n".join(f"  {s}" for s in list_steps(plan, 0, direction)) for direction in DIRECTIONS]
    return "\n".join(["```", *parts, "```"])


BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"comparison": comparison_table},
    "docs/codec.md": {"codecs": codec_table},
    "docs/configuration.md": {"keys": key_tables},
    "docs/data.md": {"packings": packing_table},
    "docs/exchanges.md": {"exchanges": exchange_table},
    "docs/models.md": {"models": model_table},
    "docs/plan.md": {"ranks": small_table, "steps": small_steps},
    "docs/planner.md": {"options": planner_table},
    "docs/strategies.md": {"presets": preset_table, "support": support_table},
}


def rewrite(text: str, blocks: dict[str, Callable[[], str]]) -> str:
    """`text` with every block made anew.

    Raises:
        ValueError: a block's markers are missing.
    """
    for name, make in blocks.items():
        head, mark, rest = text.partition(f"<!-- {name}: ")
        note, end, rest = rest.partition("-->\n")
        _, close, tail = rest.partition("<!-- end -->")
        if not (mark and end and close):
            raise ValueError(f"'<!-- {name}: ... -->' and '<!-- end -->' around its block are missing; restore them")
        text = f"{head}{mark}{note}{end}{make()}\n{close}{tail}"
    return text


def figures() -> dict[str, Figure]:
    """Every figure of docs/figures, by name."""
    small, large = small_plan(), large_plan()
    return {
        "comparison": draw_comparison(),
        "hsap-coverage": draw_coverage(large),
        "hsap-timeline": draw_timeline(large, tuple(range(large.size)), load_cluster("h100_8")),
        "masks": draw_masks(),
        "packings": draw_packings(),
        "small-coverage": draw_coverage(small),
        "small-timeline": draw_timeline(small, (0, 1), load_cluster("cpu2")),
        "tiles": draw_tiles(),
    }


def main() -> None:
    """Write every block and figure."""
    for name, blocks in BLOCKS.items():
        path = ROOT / name
        path.write_text(rewrite(path.read_text(), blocks))
    for name, figure in figures().items():
        save_figure(figure, ROOT / "docs" / "figures", name, ("svg",))


if __name__ == "__main__":
    main()
