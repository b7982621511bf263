"""Placements of other systems, for the planner leaderboard: who owns which tokens, as lists of token sets.

Each is a plain reading of the public description, with tokens equal; keys are then sent only where they are needed,
whatever the system itself sends.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from parallel.plan.layout import PackedLayout
from parallel.plan.tokens import TokenSet
from parallel.sharding.contiguous import contiguous
from parallel.sharding.per_document import per_document
from parallel.sharding.zigzag import zigzag

CHUNK = 2048  # MagiAttention's chunks, tokens
BLOCK = 128  # rows of a block of torch's block masks


def _blocks(layout: PackedLayout, units: int, most: int) -> tuple[int, NDArray[np.int64]]:
    """The largest block of at most `most` tokens that deals evenly to `units`, and each block's allowed pairs.

    Raises:
        ValueError: tokens that do not divide by the units.
    """
    T = layout.total_tokens
    if T % units:
        raise ValueError(f"{T} tokens do not divide by {units} ranks, and dealing equal blocks needs that")
    size = max(n for n in range(1, min(most, T // units) + 1) if (T // units) % n == 0)
    rows = np.where(layout.is_padding(), 0, layout.positions() + 1)
    return size, rows.reshape(-1, size).sum(1)


def _sets(owner: NDArray[np.int64], units: int, size: int) -> list[TokenSet]:
    at = [np.flatnonzero(owner == unit) for unit in range(units)]
    return [TokenSet.from_array(np.stack([b * size, (b + 1) * size, np.ones_like(b)], 1)) for b in at]


def min_heap(layout: PackedLayout, units: int) -> list[TokenSet]:
    """Chunks of 2,048 tokens, the heaviest first, to the rank with the least work that has room (MagiAttention)."""
    size, work = _blocks(layout, units, CHUNK)
    room = len(work) // units
    heap = [(0, unit, 0) for unit in range(units)]
    heapify(heap)
    owner = np.zeros(len(work), np.int64)
    for chunk in np.argsort(-work, kind="stable").tolist():
        load, unit, held = heappop(heap)
        owner[chunk] = unit
        if held + 1 < room:
            heappush(heap, (load + int(work[chunk]), unit, held + 1))
    return _sets(owner, units, size)


def block_round_robin(layout: PackedLayout, units: int) -> list[TokenSet]:
    """Blocks of 128 rows by falling work, dealt in turn, there and back (torch's PTRR load balancer)."""
    size, work = _blocks(layout, units, BLOCK)
    order = np.argsort(-work, kind="stable").reshape(-1, units)
    order[1::2] = order[1::2, ::-1]
    owner = np.zeros(len(work), np.int64)
    owner[order] = np.arange(units)
    return _sets(owner, units, size)


PEERS: dict[str, Callable[[PackedLayout, int], list[TokenSet]]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "per_document": per_document,
    "min_heap": min_heap,
    "block_round_robin": block_round_robin,
}
