"""Sets of tokens and heads held against each other: is this covered, and does it meet every pair exactly once?"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from parallel.plan.ir import Heads
from parallel.plan.tokens import TokenSet, join_spans
from parallel.plan.visibility import Visibility


@dataclass(frozen=True)
class Block:
    """One computed block of attention; where it is counted, its pairs are allowed ones only."""

    q_tokens: TokenSet
    k_tokens: TokenSet
    heads: Heads  # of queries
    rank: int  # that computes it,
    step: int  # at this place of its program; SINK: no attention, but what a sink would add to a row


SINK = -1


def sink_fault(own: TokenSet, heads: Heads, blocks: list[tuple[Block, TokenSet, Heads]], total: int) -> str | None:
    """Why a sink does not join each row of `own` once, in a batch of `total` tokens, or None."""
    sinks = [(tokens, part) for block, tokens, part in blocks if block.step == SINK]
    for head in range(*heads):
        held = [tokens for tokens, part in sinks if part[0] <= head < part[1]]
        if held == [own]:
            continue
        times = counted(held, total)[own.expand()]
        if (times != 1).any():
            at = int((times != 1).argmax())
            return f"head {head}: a sink would join query {own.expand()[at]} {times[at]} times"
    return None


def covered(tokens: TokenSet, heads: Heads, parts: Iterable[tuple[TokenSet, Heads]]) -> bool:
    """Whether tokens x heads lie within the union of `parts`."""
    parts = list(parts)
    if any(h[0] <= heads[0] and heads[1] <= h[1] and inside(tokens, p) for p, h in parts):
        return True
    cuts = {edge for _, part in parts for edge in part if heads[0] < edge < heads[1]}
    for head in (heads[0], *cuts):
        held = [p for p, h in parts if h[0] <= head < h[1]]
        if not held or not inside(tokens, TokenSet.concatenate(held)):
            return False
    return True


@lru_cache(4096)
def inside(tokens: TokenSet, held: TokenSet) -> bool:
    """Whether all of `tokens` are among `held`."""
    if tokens == held:
        return True
    if _plain(held):
        return tokens.clip(join_spans(held.ranges[:, :2])).count == tokens.count
    return bool(np.isin(tokens.expand(), held.expand()).all())


@lru_cache(4096)
def common(a: TokenSet, b: TokenSet) -> TokenSet:
    """The tokens that lie in both, in the sequence's order."""
    if _plain(b) or _plain(a):
        cut, by = (a, b) if _plain(b) else (b, a)
        ranges = cut.clip(join_spans(by.ranges[:, :2])).ranges
        return TokenSet.from_array(ranges[np.argsort(ranges[:, 0], kind="stable")])
    both = np.intersect1d(a.expand(), b.expand(), assume_unique=True)
    return TokenSet.from_array(np.stack([both, both + 1, np.ones_like(both)], 1))


@lru_cache(4096)
def in_one_piece(tokens: TokenSet, held: TokenSet) -> bool:
    """Whether `tokens` lie one behind the other in a buffer of `held`, as attention reads them."""
    if tokens == held:
        return True
    start, stop, stride = held.ranges.T
    first = tokens.ranges[0, 0]
    rows = np.flatnonzero((start <= first) & (first < stop) & ((first - start) % stride == 0))
    if not rows.size:
        return False
    place = int(held.sizes[: rows[0]].sum() + (first - start[rows[0]]) // stride[rows[0]])
    piece = held.cut(place, place + tokens.count)
    return piece == tokens or bool(np.array_equal(piece.expand(), tokens.expand()))


@lru_cache(4096)
def repeats(tokens: TokenSet) -> bool:
    """Whether a token stands in the set twice."""
    ranges = tokens.ranges[np.argsort(tokens.ranges[:, 0], kind="stable")]
    if (ranges[1:, 0] >= ranges[:-1, 1]).all():
        return False
    return len(np.unique(tokens.expand())) < tokens.count


def _plain(tokens: TokenSet) -> bool:
    """Runs of consecutive tokens alone: its ranges are spans."""
    return bool((tokens.ranges[:, 2] == 1).all())


def meets(tokens: TokenSet, heads: Heads, parts: list[tuple[TokenSet, Heads]]) -> bool:
    """Whether tokens x heads share anything with one of `parts`."""
    return any(
        max(heads[0], h[0]) < min(heads[1], h[1]) and (p == tokens or common(p, tokens).count > 0) for p, h in parts
    )


def restrict(
    blocks: list[tuple[Block, TokenSet, Heads]], tokens: TokenSet, heads: Heads
) -> list[tuple[Block, TokenSet, Heads]]:
    """What of the blocks lies in tokens x heads."""
    kept = []
    for block, held, held_heads in blocks:
        both = (max(heads[0], held_heads[0]), min(heads[1], held_heads[1]))
        if both[0] < both[1]:
            shared = held if held == tokens else common(held, tokens)
            if shared.count:
                kept.append((block, shared, both))
    return kept


def coverage_fault(
    sight: Visibility,
    own: TokenSet,
    heads: Heads,
    blocks: list[tuple[Block, TokenSet, Heads]],
    of_queries: bool,
    group: int,
) -> str | None:
    """Why the blocks do not cover each allowed pair of `own` once, or None."""
    total = sight.layout.total_tokens
    # each query head on its own, unless the same blocks touch it; tokens that the same blocks touch together
    checked: set[tuple[int, ...]] = set()
    for query_head in range(heads[0], heads[1]) if of_queries else range(heads[0] * group, heads[1] * group):
        held_head = query_head if of_queries else query_head // group
        chosen = [
            (block, held)
            for block, held, part in blocks
            if part[0] <= held_head < part[1] and block.heads[0] <= query_head < block.heads[1]
        ]
        same = tuple(id(part) for pair in chosen for part in pair)
        if same in checked:
            continue
        checked.add(same)
        for tokens, family in _families(own, [held for _, held in chosen], total):
            blocks_here = [chosen[index][0] for index in family]
            count = counted([b.k_tokens if of_queries else b.q_tokens for b in blocks_here], total)
            fault = _count_fault(sight, tokens, count, of_queries)
            if fault:
                return f"head {query_head}: {fault}"
    return None


def counted(sets: list[TokenSet], total: int) -> NDArray[np.int64]:
    """[total]: how many of the sets hold each token."""
    ranges = np.concatenate([np.zeros((0, 3), np.int64), *(tokens.ranges for tokens in sets)])
    runs = ranges[ranges[:, 2] == 1]
    edges = np.bincount(runs[:, 0], minlength=total + 1) - np.bincount(runs[:, 1], minlength=total + 1)
    count = np.cumsum(edges)[:total]
    for start, stop, stride in ranges[ranges[:, 2] > 1].tolist():
        count[start:stop:stride] += 1
    return count


def _families(own: TokenSet, held: list[TokenSet], total: int) -> list[tuple[TokenSet, list[int]]]:
    """`own` in parts whose tokens lie in the same sets of `held`, each with the indices of those sets."""
    if all(tokens == own for tokens in held):
        return [(own, list(range(len(held))))] if own.count else []
    at = own.expand()
    member: NDArray[np.bool_] = np.zeros((len(held), len(at)), bool)
    for row, tokens in enumerate(held):
        member[row] = np.isin(at, tokens.expand(), assume_unique=True)
    patterns, which = np.unique(member, axis=1, return_inverse=True)
    parts = []
    for column in range(patterns.shape[1]):
        chosen = at[which.reshape(-1) == column]
        tokens = TokenSet.from_array(np.stack([chosen, chosen + 1, np.ones_like(chosen)], 1))
        parts.append((tokens, np.flatnonzero(patterns[:, column]).tolist()))
    return parts


def _count_fault(sight: Visibility, tokens: TokenSet, count: NDArray[np.int64], of_queries: bool) -> str | None:
    wrong = TokenSet.of((0, len(count))).clip(sight.reach(tokens, as_queries=of_queries)).expand()
    wrong = wrong[count[wrong] != 1]
    if wrong.size == 0:
        return None
    sides = ("queries", "key") if of_queries else ("keys", "query")
    return f"{sides[0]} {tokens} meet {sides[1]} {wrong[0]} {count[wrong[0]]} times"
