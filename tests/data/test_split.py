"""Held-out documents are chosen by the hash of their name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.sources.documents import FiniteDocuments
from data.split import DocumentOrder, split_documents


class Named(FiniteDocuments):
    size = 0

    def __init__(self, *names: str, length: int = 5) -> None:
        self.names = names
        self.size = len(names)
        self._length = length

    def length(self, index: int) -> int:
        return self._length

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        return np.zeros(self._length, np.int32)[start:stop]

    def name(self, index: int) -> str:
        return self.names[index]

    def fingerprint(self) -> str:
        return "00"


NAMES = [f"file{i}.py" for i in range(200)]


@given(st.permutations(NAMES), st.integers(50, 199))
def test_a_document_stays_on_its_side_when_others_come_and_go(names: list[str], count: int) -> None:
    everything = {NAMES[i] for i in split_documents(Named(*NAMES), 0.2)[1]}
    some = Named(*names[:count])
    train, held_out = split_documents(some, 0.2)
    assert {some.name(i) for i in held_out} == everything & set(some.names)
    assert sorted([*train, *held_out]) == list(range(count))


def test_the_share_held_out_is_about_the_one_asked_for() -> None:
    names = Named(*[f"n{i}" for i in range(5000)])
    assert abs(len(split_documents(names, 0.05)[1]) / 5000 - 0.05) < 0.01
    assert split_documents(names, 0.0)[0].tolist() == list(range(5000))


def test_a_side_without_documents_is_refused_and_the_sentence_helps() -> None:
    few = Named("a", "b", "c")
    with pytest.raises(ValueError, match=r"eval_fraction=0\.001 holds out none of 3 documents") as error:
        split_documents(few, 0.001)
    least = float(str(error.value).split("above ")[1].split()[0].rstrip("."))
    assert len(split_documents(few, least + 0.001)[1]) == 1
    with pytest.raises(ValueError, match=r"eval_fraction=0\.99999 leaves none of 3 documents") as error:
        split_documents(few, 0.99999)
    most = float(str(error.value).split("trains at ")[1].split()[0])
    assert len(split_documents(few, most - 0.001)[0]) == 1


@given(length=st.integers(1, 20), part=st.none() | st.integers(1, 9), seed=st.integers(0, 9))
def test_each_pass_holds_every_token_once_in_an_order_of_its_own(length: int, part: int | None, seed: int) -> None:
    source = Named(*NAMES[:30], length=length)
    order = DocumentOrder(source, np.arange(3, 30), seed, part)
    passes: dict[int, list] = {0: [], 1: []}
    while (piece := order.pull()) is not None and piece.epoch < 2:
        passes[piece.epoch].append(piece)
    for pieces in passes.values():
        tokens = sorted((p.document, t) for p in pieces for t in range(p.start, p.stop))
        assert tokens == [(d, t) for d in range(3, 30) for t in range(length)]
        assert part is None or max(p.length for p in pieces) <= part
    assert [p[1:] for p in passes[0]] != [p[1:] for p in passes[1]]


def test_a_single_pass_ends_and_a_seek_returns_to_any_place() -> None:
    order = DocumentOrder(Named(*NAMES[:9]), np.arange(9), 0, once=True)
    pieces = [piece for _ in range(9) if (piece := order.pull())]
    assert len(pieces) == 9 and order.pull() is None and order.pull() is None
    order.seek(0, 4)
    assert [order.pull() for _ in range(6)] == [*pieces[4:], None]


def test_documents_without_end_come_once_in_their_order() -> None:
    order = DocumentOrder(Named("x"), None, 0)
    assert [p.document for _ in range(5) if (p := order.pull())] == [0, 1, 2, 3, 4]
    assert order.epoch == order.passes == 0
