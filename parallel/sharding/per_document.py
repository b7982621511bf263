"""A zigzag inside each document, which balances any mix of documents (WLB-LLM, arXiv 2503.17924)."""

import numpy as np

from parallel.plan.layout import PackedLayout
from parallel.plan.tokens import TokenSet
from parallel.sharding.planner import DEFAULT, Setting


def per_document(layout: PackedLayout, units: int, setting: Setting = DEFAULT) -> list[TokenSet]:
    """Each document in 2 n chunks, of which unit u of n takes chunks u and 2 n - 1 - u.

    Any length works: the tokens that are left when a document does not divide go one each to the units in turn, and the
    turn goes on from document to document. So a unit's count depends on T and n alone: floor(T / n), and one more for
    the first T mod n units. Padding is dealt like a document.
    """
    starts, sizes = _parts(layout)
    chunks = 2 * units
    base, rest = sizes // chunks, sizes % chunks
    turn = (np.cumsum(rest) - rest) % units
    unit = np.arange(units)
    extra = (rest // units)[:, None] + ((unit - turn[:, None]) % units < (rest % units)[:, None])  # 0, 1 or 2
    size = np.concatenate([base[:, None] + (extra >= 1), (base[:, None] + (extra == 2))[:, ::-1]], 1)
    start = starts[:, None] + np.cumsum(size, 1) - size
    ranges = np.stack([start, start + size, np.ones_like(start)], -1)
    return [TokenSet.from_array(ranges[:, [u, chunks - 1 - u]].reshape(-1, 3)) for u in range(units)]


def _parts(layout: PackedLayout) -> tuple[np.ndarray, np.ndarray]:
    """Starts and sizes of all documents and of each row's padding, in buffer order."""
    ends = np.arange(1, layout.num_rows + 1) * layout.row_length
    padding = ends - layout.row_length + layout.row_tokens
    starts = np.concatenate([layout.starts, padding])
    sizes = np.concatenate([layout.lengths, ends - padding])
    order = np.lexsort((sizes, starts))
    keep = sizes[order] > 0
    return starts[order][keep], sizes[order][keep]
