"""Each rank an early and a late chunk, which balances one causal document (Llama 3, arXiv 2407.21783, 3.3.2)."""

from parallel.plan.layout import PackedLayout
from parallel.plan.tokens import TokenSet
from parallel.sharding.planner import DEFAULT, Setting


def zigzag(layout: PackedLayout, units: int, setting: Setting = DEFAULT) -> list[TokenSet]:
    """Of 2 n equal chunks, unit u of n takes chunks u and 2 n - 1 - u; chunks are equal to within a token, any T."""
    T, chunks = layout.total_tokens, 2 * units
    cuts = [c * T // chunks for c in range(chunks + 1)]
    return [TokenSet.of((cuts[u], cuts[u + 1]), (cuts[chunks - 1 - u], cuts[chunks - u])) for u in range(units)]
