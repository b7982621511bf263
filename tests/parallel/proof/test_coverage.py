"""The arithmetic of the proof against tokens counted one by one."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.mask_spec import MaskSpec
from parallel.plan.ir import Heads
from parallel.plan.layout import PackedLayout
from parallel.plan.tokens import TokenSet
from parallel.plan.visibility import Visibility
from parallel.proof.coverage import (
    Block,
    common,
    coverage_fault,
    covered,
    in_one_piece,
    inside,
    meets,
    repeats,
    restrict,
)
from tests.masks import allowed, masks

TOTAL = 24


@st.composite
def token_sets(draw: Any, ascending: bool = True, total: int = TOTAL, dense: bool = False) -> TokenSet:
    """A few ranges with gaps and strides; out of order where that may be."""
    ranges, at = [], 0
    for _ in range(draw(st.integers(0, 4))):
        start = at + draw(st.integers(0, 4))
        stride, size = 1 if dense else draw(st.sampled_from([1, 1, 1, 2, 3])), draw(st.integers(1, 5))
        stop = min(start + (size - 1) * stride + 1, total)
        if start < stop:
            ranges.append((start, stop, stride))
            at = stop
    if not ascending:
        ranges = draw(st.permutations(ranges))
    return TokenSet.of(*ranges)


@st.composite
def head_ranges(draw: Any, most: int = 4) -> Heads:
    first = draw(st.integers(0, most - 1))
    return first, draw(st.integers(first + 1, most))


regions = st.tuples(token_sets(), head_ranges())


def cells(tokens: TokenSet, heads: Heads) -> set[tuple[int, int]]:
    return {(t, h) for t in tokens.expand().tolist() for h in range(*heads)}


@given(token_sets(), token_sets())
def test_inside_and_common(a: TokenSet, b: TokenSet):
    left, right = set(a.expand().tolist()), set(b.expand().tolist())
    assert inside(a, b) == (left <= right)
    assert common(a, b).expand().tolist() == sorted(left & right)


@given(token_sets(), token_sets(ascending=False, dense=True))
def test_inside_and_common_of_a_gathered_buffer(a: TokenSet, b: TokenSet):
    """Whose tokens lie rank by rank, in no order of the sequence."""
    left, right = set(a.expand().tolist()), set(b.expand().tolist())
    assert inside(a, b) == (left <= right)
    assert common(a, b).expand().tolist() == sorted(left & right)


@given(regions, st.lists(regions, max_size=4))
def test_covered_meets_and_restrict(region: tuple[TokenSet, Heads], parts: list[tuple[TokenSet, Heads]]):
    wanted = cells(*region)
    held = [cells(*part) for part in parts]
    assert covered(*region, parts) == (wanted <= set().union(*held)) or not wanted
    if wanted:
        assert meets(*region, parts) == any(wanted & part for part in held)
    blocks = [(Block(tokens, tokens, heads, 0, n), tokens, heads) for n, (tokens, heads) in enumerate(parts)]
    kept = restrict(blocks, *region)
    assert [cells(tokens, heads) for _, tokens, heads in kept] == [wanted & part for part in held if wanted & part]
    assert [block.step for block, *_ in kept] == [n for n, part in enumerate(held) if wanted & part]


@given(token_sets(ascending=False, dense=True), st.integers(0, TOTAL), st.integers(0, TOTAL), token_sets())
def test_one_piece(held: TokenSet, first: int, stop: int, other: TokenSet):
    piece = held.cut(first, stop)
    if piece.count:
        assert in_one_piece(piece, held)
    if other.count:
        at, wanted = held.expand().tolist(), other.expand().tolist()
        found = [i for i in range(len(at)) if at[i : i + len(wanted)] == wanted]
        assert in_one_piece(other, held) == bool(found)


def test_one_piece_however_its_ranges_are_written():
    held = TokenSet.of((0, 11, 5), (20, 30))  # 0 5 10 20..29
    assert in_one_piece(TokenSet.of((0, 1), (5, 6)), held) and in_one_piece(TokenSet.of((10, 11), (20, 22)), held)
    assert in_one_piece(TokenSet.of((5, 11, 5), (20, 21)), held)
    assert not in_one_piece(TokenSet.of((0, 1), (10, 11)), held)
    assert not in_one_piece(TokenSet.of((5, 8)), held) and not in_one_piece(TokenSet.of((6, 7)), held)
    assert not in_one_piece(TokenSet.of((29, 31)), held)  # its end is beyond


@given(st.lists(token_sets(), max_size=3))
def test_repeats(parts: list[TokenSet]):
    tokens = TokenSet.concatenate(parts)
    assert repeats(tokens) == (len(set(tokens.expand().tolist())) < tokens.count)


# pairs, counted one by one


def _allowed(sight: Visibility, query: int, key: int) -> bool:
    return bool(allowed(sight.mask, sight.layout)[query, key])


@st.composite
def computed(draw: Any) -> tuple[Visibility, TokenSet, list[tuple[Block, TokenSet, Heads]], bool]:
    """Blocks of attention between some sets of tokens; now and then one is lost, doubled, or kept in part."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    layout = PackedLayout.from_lengths(lengths, row_length=sum(lengths) + draw(st.integers(0, 2)))
    sight = Visibility(layout, draw(masks()))
    stride = draw(st.sampled_from([1, 2]))
    total = layout.total_tokens
    sets = [TokenSet.of((i, total, stride)) for i in range(stride)] if stride > 1 else _cut(draw, total)
    of_queries = draw(st.booleans())
    own = draw(st.sampled_from(sets))
    blocks = []
    for other in sets:
        for heads in draw(st.sampled_from([[(0, 4)], [(0, 2), (2, 4)], [(0, 1), (1, 4)]])):
            q, k = (own, other) if of_queries else (other, own)
            held_heads = heads if of_queries else (heads[0] // 2, (heads[1] - 1) // 2 + 1)
            kept = draw(st.sampled_from([[own], [own], [own], [own, own], [], [own.cut(1, own.count)],
                                         [own.cut(0, 1), own.cut(1, own.count)]]))  # fmt: skip
            blocks += [(Block(q, k, heads, 0, 0), part, held_heads) for part in kept if part.count]
    return sight, own, blocks, of_queries


def _cut(draw: Any, total: int) -> list[TokenSet]:
    at = sorted(draw(st.sets(st.integers(1, max(1, total - 1)), max_size=2)) - {total})
    return [TokenSet.of(pair) for pair in zip([0, *at], [*at, total])]


@given(computed())
def test_coverage_is_what_counting_says(case: tuple[Visibility, TokenSet, list, bool]):
    sight, own, blocks, of_queries = case
    count = np.zeros((4, sight.layout.total_tokens, sight.layout.total_tokens), int)
    for block, held, _ in blocks:
        q, k = (held, block.k_tokens) if of_queries else (block.q_tokens, held)
        for head in range(*block.heads):
            count[head][np.ix_(q.expand(), k.expand())] += 1
    rows = own.expand().tolist()
    every = range(sight.layout.total_tokens)
    pairs = [(q, k) for q in rows for k in every] if of_queries else [(q, k) for q in every for k in rows]
    right = all(count[h, q, k] == 1 for h in range(4) for q, k in pairs if _allowed(sight, q, k))
    fault = coverage_fault(sight, own, (0, 4) if of_queries else (0, 2), blocks, of_queries, 2)
    assert (fault is None) == right, fault


def test_a_fault_names_its_head_and_its_tokens():
    sight = Visibility(PackedLayout.from_lengths([4]), MaskSpec())
    own, half = TokenSet.of((0, 4)), TokenSet.of((2, 4))
    good = [(Block(own, own, (0, 2), 0, 0), own, (0, 2))]
    assert coverage_fault(sight, own, (0, 2), good, True, 1) is None
    lost = [*good, (Block(own, TokenSet.of((0, 2)), (2, 3), 0, 1), own, (2, 3))]
    wanted = "head 2: queries TokenSet(0:4; 4 tokens) meet key 2 0 times"
    assert coverage_fault(sight, own, (0, 3), lost, True, 1) == wanted
    twice = [*good, (Block(half, half, (1, 2), 0, 1), half, (1, 2))]
    wanted = "head 1: queries TokenSet(2:4; 2 tokens) meet key 2 2 times"
    assert coverage_fault(sight, own, (0, 2), twice, True, 1) == wanted
    wanted = "head 1: keys TokenSet(2:4; 2 tokens) meet query 2 2 times"
    assert coverage_fault(sight, own, (0, 2), twice, False, 1) == wanted
    # key head 0 serves query heads 0 and 1; nobody computed 1
    one = [(Block(own, own, (0, 1), 0, 0), own, (0, 1))]
    assert coverage_fault(sight, own, (0, 1), one, False, 1) is None
    fault = coverage_fault(sight, own, (0, 1), one, False, 2)
    assert fault is not None and fault.startswith("head 1: ")


@pytest.mark.parametrize("of_queries", [True, False])
def test_nothing_needs_nothing(of_queries: bool):
    sight = Visibility(PackedLayout.from_lengths([3], row_length=5), MaskSpec())
    assert coverage_fault(sight, TokenSet.of((3, 5)), (0, 1), [], of_queries, 1) is None
    assert coverage_fault(sight, TokenSet.of(), (0, 1), [], of_queries, 1) is None
    assert coverage_fault(sight, TokenSet.of((2, 5)), (0, 1), [], of_queries, 1) is not None
