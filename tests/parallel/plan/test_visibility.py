"""Who sees whom, in closed form, against the same asked pair by pair."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels.mask_spec import MaskSpec
from parallel.plan.layout import PackedLayout
from parallel.plan.tokens import EMPTY, TokenSet
from parallel.plan.visibility import Visibility
from tests.masks import masks


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
