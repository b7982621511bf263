"""Token ranges against the tokens themselves."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.mask_spec import MaskSpec
from parallel.plan.layout import PackedLayout
from parallel.plan.mesh import MeshSpec
from parallel.plan.tokens import EMPTY, EMPTY_SPANS, TokenSet, join_spans, union
from parallel.plan.visibility import Visibility
from parallel.sharding import SHARDINGS
from parallel.strategy import load_strategy
from tests.masks import allowed, masks


@st.composite
def token_sets(draw: st.DrawFn, total: int) -> TokenSet:
    """An ascending set of tokens below `total`, strides among its ranges."""
    ranges, at = [], 0
    while at < total and draw(st.booleans()):
        start = at + draw(st.integers(0, 3))
        stop = min(total, start + draw(st.integers(1, 12)))
        if start < stop:
            ranges.append((start, stop, draw(st.sampled_from([1, 1, 1, 2, 3, 4, 6]))))
        at = max(stop, start + 1)
    return TokenSet.of(*ranges)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[PackedLayout, MaskSpec, TokenSet, TokenSet]:
    rows = draw(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=3))
    fullest = max(sum(row) for row in rows) + draw(st.integers(0, 3))
    layout = PackedLayout.from_lengths([n for row in rows for n in row], [len(row) for row in rows], fullest)
    mask = draw(masks())
    total = layout.total_tokens
    return layout, mask, draw(token_sets(total)), draw(token_sets(total))


@given(scenes())
def test_visibility_in_closed_form(scene: tuple[PackedLayout, MaskSpec, TokenSet, TokenSet]):
    layout, mask, queries, keys = scene
    sight = Visibility(layout, mask)
    seen = allowed(mask, layout)[queries.expand()[:, None], keys.expand()[None]]
    assert sight.pairs(queries, keys) == seen.sum()
    assert sight.any(queries, keys) == seen.any()
    assert sight.any_of([queries, keys], [keys]).tolist() == [[seen.any()], [sight.any(keys, keys)]]
    assert sight.needed_keys(queries, keys).expand().tolist() == keys.expand()[seen.any(0)].tolist()
    assert sight.needed_queries(queries, keys).expand().tolist() == queries.expand()[seen.any(1)].tolist()
    everything = TokenSet.of((0, layout.total_tokens))
    assert sight.work(everything) == layout.pairs(mask) == allowed(mask, layout).sum()


def test_pairs_of_long_documents_are_counted_in_blocks():
    layout = PackedLayout.from_lengths([40_000])
    units = [TokenSet.of(*((start, start + 8) for start in range(r * 8, 40_000, 32))) for r in range(4)]
    sight = Visibility(layout, MaskSpec())
    total = sum(sight.pairs(q, k) for q in units for k in units)
    assert total == 40_000 * 40_001 // 2


@given(st.data())
def test_sets_of_tokens(data: st.DataObject):
    tokens = data.draw(token_sets(60))
    held = tokens.expand()
    assert tokens.count == len(held) and tokens.ascending
    first = data.draw(st.integers(0, tokens.count))
    stop = data.draw(st.integers(first, tokens.count))
    assert tokens.cut(first, stop).expand().tolist() == held[first:stop].tolist()
    assert TokenSet.of(*tokens.tuples()) == tokens and hash(TokenSet.of(*tokens.tuples())) == hash(tokens)
    odd, even = TokenSet.of((1, 60, 2)), TokenSet.of((0, 60, 2))
    assert union([odd, even]) == TokenSet.of((0, 60))
    assert union([tokens.cut(first, tokens.count), tokens.cut(0, first)]).expand().tolist() == held.tolist()
    assert TokenSet.concatenate([odd, even]).expand().tolist() == [*range(1, 60, 2), *range(0, 60, 2)]
    assert not TokenSet.concatenate([odd, even]).ascending


def test_ranges_are_refused_or_joined():
    assert TokenSet.of((0, 4), (4, 9)) == TokenSet.of((0, 9))
    assert TokenSet.of((3, 3), (5, 2)) == EMPTY and TokenSet.of().count == 0
    for bad in ((-1, 3), (0, 3, 0)):
        with pytest.raises(ValueError, match="needs a start of 0 or more"):
            TokenSet.of(bad)
    assert join_spans(np.array([[5, 9], [0, 3], [2, 4], [9, 9]])).tolist() == [[0, 4], [5, 9]]


def is_canonical(tokens: TokenSet) -> bool:
    """Each range holds a token, ends right behind its last one, and does not go on in the next."""
    ranges = tokens.ranges.tolist()
    tight = all(stop > start and (stop - 1 - start) % stride == 0 for start, stop, stride in ranges)
    single = all(stride == 1 for start, stop, stride in ranges if stop == start + 1)
    joined = all(a[2] != b[2] or b[0] != a[1] - 1 + a[2] for a, b in itertools.pairwise(ranges))
    return tight and single and joined and not tokens.ranges.flags.writeable and tokens.ranges.dtype == np.int64


wild_ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 4)), max_size=5)


@given(wild_ranges)
def test_any_ranges_are_held_in_their_order_and_one_form(ranges: list[tuple[int, int, int]]):
    tokens = TokenSet.of(*ranges)
    listed = [t for start, stop, stride in ranges for t in range(start, stop, stride)]
    assert tokens.expand().tolist() == listed and tokens.count == len(listed) and is_canonical(tokens)
    assert tokens.sizes.tolist() == [len(range(*r)) for r in tokens.tuples()] and tokens.sizes.sum() == tokens.count
    assert tokens.ascending == all(a < b for a, b in itertools.pairwise(listed))
    assert tokens.shift(7).expand().tolist() == [t + 7 for t in listed] and tokens.shift(0) is tokens
    assert TokenSet.from_array(tokens.ranges) == tokens and tokens.key == TokenSet.of(*ranges).key
    assert TokenSet.concatenate([tokens, tokens]).expand().tolist() == listed * 2
    assert not tokens.expand().flags.writeable
    for first, stop in ((0, tokens.count), (1, tokens.count - 1), (2, 5), (3, 3), (-4, 2), (1, 99)):
        cut = tokens.cut(first, stop)
        assert cut.expand().tolist() == listed[max(first, 0) : max(stop, 0)] and is_canonical(cut)


@given(token_sets(40), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=5))
def test_spans_are_joined_and_clip(tokens: TokenSet, pairs: list[tuple[int, int]]):
    spans = join_spans(np.array(pairs, np.int64).reshape(-1, 2))
    held = {t for first, stop in pairs for t in range(first, stop)}
    assert {t for first, stop in spans.tolist() for t in range(first, stop)} == held
    assert all(first < stop for first, stop in spans.tolist())
    assert all(a[1] < b[0] for a, b in itertools.pairwise(spans.tolist()))  # what touches is one
    clipped = tokens.clip(spans)
    assert clipped.expand().tolist() == [t for t in tokens.expand().tolist() if t in held] and is_canonical(clipped)
    assert tokens.clip(EMPTY_SPANS) == EMPTY.clip(spans) == EMPTY


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_union_of_any_disjoint_sets(owner: list[int]):
    """Sets whose tokens interleave as they like."""
    sets = [TokenSet.of(*((t, t + 1) for t, o in enumerate(owner) if o == part)) for part in range(4)]
    found = union(sets)
    assert found.expand().tolist() == [t for t, o in enumerate(owner) if o < 4] and is_canonical(found)
    assert union([]) == EMPTY
    runs_between = [TokenSet.of((0, 21, 10)), TokenSet.of((1, 3), (11, 13)), TokenSet.of((5, 9, 2))]
    assert union(runs_between).expand().tolist() == [0, 1, 2, 5, 7, 10, 11, 12, 20]
    assert union([TokenSet.of((0, 1), (2, 11, 4)), TokenSet.of((3, 5))]).expand().tolist() == [0, 2, 3, 4, 6, 10]
    strided = [TokenSet.of((part, len(owner), 3)) for part in range(3)]
    assert union(strided) == TokenSet.of((0, len(owner))) and union(strided[::-1]) == TokenSet.of((0, len(owner)))


def test_a_set_in_words():
    assert repr(TokenSet.of((0, 2), (9, 16, 3))) == "TokenSet(0:2, 9:16:3; 5 tokens)"
    assert repr(TokenSet.of((4, 9, 2))) == "TokenSet(4:9:2; 3 tokens)"
    assert repr(TokenSet.of(*((4 * i, 4 * i + 2) for i in range(6)))).endswith("20:22; 12 tokens)")
    assert repr(TokenSet.of(*((4 * i, 4 * i + 2) for i in range(7)))).endswith("20:22, ...; 14 tokens)")
    assert TokenSet.of((0, 2)) != ((0, 2, 1),)


@pytest.mark.parametrize("name", SHARDINGS)
@given(st.lists(st.lists(st.integers(0, 40), max_size=5), min_size=1, max_size=3), st.integers(0, 9), st.integers(1, 9))
def test_shardings_deal_every_token_once(name: str, rows: list[list[int]], padding: int, units: int):
    fullest = max(sum(row) for row in rows) + padding
    layout = PackedLayout.from_lengths([n for row in rows for n in row], [len(row) for row in rows], fullest)
    dealt, T = SHARDINGS[name](layout, units), layout.total_tokens
    assert sorted(t for unit in dealt for t in unit.expand().tolist()) == list(range(T))
    assert all(unit.ascending for unit in dealt)
    other = PackedLayout.from_lengths([1] * layout.num_rows, [1] * layout.num_rows, fullest) if fullest else layout
    assert [u.count for u in SHARDINGS[name](other, units)] == [u.count for u in dealt]  # documents do not matter
    assert max(u.count for u in dealt) - min(u.count for u in dealt) <= (2 if name == "zigzag" else 1)


def test_imbalance_of_four_documents_on_four_ranks():
    """Global zigzag can be worse than contiguous; per document is even."""
    layout = PackedLayout.from_lengths([40, 8, 8, 8])
    sight, found = Visibility(layout, MaskSpec()), {}
    for name in ("contiguous", "zigzag", "striped", "per_document"):
        sharding = SHARDINGS[name]
        work = [sight.work(unit) for unit in sharding(layout, 4)]
        found[name] = round(max(work) / (sum(work) / 4), 2)
    assert found == {"contiguous": 1.69, "zigzag": 2.24, "striped": 1.1, "per_document": 1.0}


def test_inner_ranks_hold_contiguous_parts_of_their_unit():
    layout = PackedLayout.from_lengths([50, 51])
    placement = load_strategy("usp", cp_inner=4, cp_outer=3).shard(layout, MeshSpec(cp_outer=3, cp_inner=4))
    for number, unit in enumerate(placement.units):
        parts = placement.sets[4 * number : 4 * number + 4]
        assert TokenSet.concatenate(parts) == unit and max(p.count for p in parts) - min(p.count for p in parts) <= 1
    assert placement.tokens(0) == placement.sets[0].tuples()
    with pytest.raises(ValueError, match="outside the 12 ranks"):
        placement.tokens(12)
