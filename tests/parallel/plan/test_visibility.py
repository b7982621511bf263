"""Who sees whom, in closed form, against the same asked pair by pair."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels.mask_spec import MaskSpec
from parallel.plan.layout import PackedLayout
from parallel.plan.tokens import EMPTY, TokenSet
from parallel.plan.visibility import Visibility, _blocks
from tests.masks import allowed, masks


@st.composite
def scenes(draw: st.DrawFn) -> tuple[PackedLayout, MaskSpec, list[TokenSet]]:
    """A layout with padding, a mask, and ascending sets of its tokens, strided ones among them."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    layout = PackedLayout.from_lengths(lengths, row_length=sum(lengths) + draw(st.integers(0, 3)))
    sets = []
    for _ in range(4):
        cuts = sorted(draw(st.lists(st.integers(0, layout.total_tokens), min_size=2, max_size=6)))
        strides = draw(st.lists(st.integers(1, 5), min_size=3, max_size=3))
        sets.append(TokenSet.of(*zip(cuts[::2], cuts[1::2], strides)) if len(cuts) > 1 else EMPTY)
    return layout, draw(masks()), sets


@given(scenes())
def test_any_of_is_any_of_each_pair(scene: tuple[PackedLayout, MaskSpec, list[TokenSet]]):
    layout, mask, sets = scene
    sight = Visibility(layout, mask)
    wanted = [[sight.pairs(q, k) > 0 for k in sets] for q in sets]
    assert sight.any_of(sets, sets).tolist() == wanted
    assert [[sight.any(q, k) for k in sets] for q in sets] == wanted


@given(scenes())
def test_padding_is_what_no_document_holds(scene: tuple[PackedLayout, MaskSpec, list[TokenSet]]):
    layout, mask, _ = scene
    spans = Visibility(layout, mask).padding
    found = np.zeros(layout.total_tokens, bool)
    for start, stop in spans.tolist():
        found[start:stop] = True
    assert (found == layout.is_padding()).all()


@given(scenes())
def test_segments_are_the_sets_parts_in_documents(scene: tuple[PackedLayout, MaskSpec, list[TokenSet]]):
    layout, mask, sets = scene
    documents = layout.document_ids()
    for tokens in sets:
        parts = Visibility(layout, mask).segments(tokens)
        found = [
            (document, start + i * stride)
            for document, start, stride, size in zip(*(x.tolist() for x in parts))
            for i in range(size)
        ]
        assert found == [(documents[t], t) for t in tokens.expand().tolist() if documents[t] >= 0]
        assert (parts.size > 0).all() and parts.last.tolist() == [
            start + (size - 1) * stride for _, start, stride, size in zip(*(x.tolist() for x in parts))
        ]


@given(scenes())
def test_reach_is_what_is_seen_and_no_token_more(scene: tuple[PackedLayout, MaskSpec, list[TokenSet]]):
    layout, mask, sets = scene
    sight, pairs = Visibility(layout, mask), allowed(mask, layout)  # [query, key]
    for tokens in sets:
        held = tokens.expand()
        for as_queries, seen in ((True, pairs[held].any(0)), (False, pairs[:, held].any(1))):
            spans = sight.reach(tokens, as_queries)
            found = np.zeros(layout.total_tokens, bool)
            for first, stop in spans.tolist():
                assert first < stop and not found[first:stop].any()
                found[first:stop] = True
            assert (found == seen).all()
            assert (np.diff(spans.reshape(-1)) > 0).all()


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 20))
def test_blocks_bound_what_is_held_at_once(each: list[int], limit: int):
    """Whatever the pieces, all of them, in order, and about as many in each block as the limit says."""
    found = _blocks(np.array(each, np.int64), limit)
    assert [i for first, stop in found for i in range(first, stop)] == list(range(len(each)))
    assert all(sum(each[first:stop]) <= 2 * limit + max(each) for first, stop in found if each)
    assert len(found) <= sum(each) // limit + 2


def test_documents_are_all_but_padding():
    sight = Visibility(PackedLayout.from_lengths([3, 2, 4], [2, 1], 6), MaskSpec())
    assert sight.documents == TokenSet.of((0, 5), (6, 10)) and sight.padding.tolist() == [[5, 6], [10, 12]]
    whole = Visibility(PackedLayout.from_lengths([3, 2]), MaskSpec())
    assert whole.documents == TokenSet.of((0, 5)) and whole.padding.tolist() == []
    nothing = Visibility(PackedLayout.from_lengths([], [0], 4), MaskSpec())
    assert nothing.documents == EMPTY and nothing.padding.tolist() == [[0, 4]]
    assert nothing.work(TokenSet.of((0, 4))) == 0 and not nothing.any(TokenSet.of((0, 4)), TokenSet.of((0, 4)))
