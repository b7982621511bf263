"""Each rank one run of consecutive tokens (Ring Attention, arXiv 2310.01889)."""

from parallel.plan.layout import PackedLayout
from parallel.plan.tokens import TokenSet
from parallel.sharding.planner import DEFAULT, Setting


def contiguous(layout: PackedLayout, units: int, setting: Setting = DEFAULT) -> list[TokenSet]:
    """Unit u of n takes tokens [u T / n, (u + 1) T / n), rounded down: equal to within a token, any T."""
    T = layout.total_tokens
    return [TokenSet.of((u * T // units, (u + 1) * T // units)) for u in range(units)]
