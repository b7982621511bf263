"""Every n-th token to the same rank, which balances long causal documents (Striped Attention, arXiv 2311.09431)."""

from parallel.plan.layout import PackedLayout
from parallel.plan.tokens import TokenSet
from parallel.sharding.planner import DEFAULT, Setting


def striped(layout: PackedLayout, units: int, setting: Setting = DEFAULT) -> list[TokenSet]:
    """Unit u of n takes tokens u, u + n, u + 2 n, ..."""
    return [TokenSet.of((u, layout.total_tokens, units)) for u in range(units)]
