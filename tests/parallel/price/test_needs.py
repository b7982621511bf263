"""Keys that must travel, in closed form, against sets of tokens."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.mask_spec import MaskSpec
from parallel.plan.layout import PackedLayout
from parallel.plan.tokens import TokenSet
from parallel.plan.visibility import Visibility
from parallel.price.needs import Needs
from parallel.sharding import SHARDINGS
from parallel.sharding.planner import DEFAULT


@st.composite
def dealt(draw: Any) -> tuple[PackedLayout, list[TokenSet]]:
    """A small batch and any partition of its tokens."""
    lengths = draw(st.lists(st.integers(1, 12), max_size=6))
    layout = PackedLayout.from_lengths(lengths, row_length=sum(lengths) + draw(st.integers(0, 4)))
    ranks = draw(st.integers(1, 5))
    owner = draw(st.lists(st.integers(0, ranks - 1), min_size=layout.total_tokens, max_size=layout.total_tokens))
    return layout, [TokenSet.of(*((i, i + 1) for i, o in enumerate(owner) if o == rank)) for rank in range(ranks)]


@given(dealt())
def test_needs_are_those_of_the_tokens(case: tuple[PackedLayout, list[TokenSet]]):
    layout, sets = case
    needs, sight = Needs.of(layout, sets), Visibility(layout, MaskSpec())
    keys = np.array([[sight.needed_keys(q, k).count if q is not k else 0 for k in sets] for q in sets])
    assert (needs.keys == keys.reshape(len(sets), len(sets))).all()
    assert needs.received.tolist() == keys.sum(1).tolist()
    assert needs.work.tolist() == [sight.work(tokens) for tokens in sets]
    documents = layout.document_ids()
    for rank, tokens in enumerate(sets):
        mine, others = tokens.expand(), [s.expand() for s in sets if s is not tokens]
        wanted = [t for t in mine if documents[t] >= 0 and any(_sees(documents, o, t) for o in others)]
        assert needs.sent_once[rank] == len(wanted)
        assert needs.held[rank] == sum(documents[t] >= 0 for t in mine)


def _sees(documents: np.ndarray, queries: np.ndarray, key: int) -> bool:
    return bool(((documents[queries] == documents[key]) & (queries > key)).any())


@pytest.mark.parametrize("name", sorted(SHARDINGS))
def test_needs_of_every_sharding(name: str):
    layout = PackedLayout.from_lengths([40, 3, 1, 17, 9], row_length=73)
    sets = SHARDINGS[name](layout, 4, DEFAULT)
    sight = Visibility(layout, MaskSpec())
    expected = [sum(sight.needed_keys(q, k).count for k in sets if k is not q) for q in sets]
    assert Needs.of(layout, sets).received.tolist() == expected


def test_no_documents():
    layout = PackedLayout.from_lengths([], row_length=8)
    needs = Needs.of(layout, [TokenSet.of((0, 4)), TokenSet.of((4, 8))])
    assert needs.received.tolist() == needs.work.tolist() == needs.sent_once.tolist() == [0, 0]
