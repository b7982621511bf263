"""Every packer: no token lost or repeated, rows that fit, resumable, and what each one promises beyond that."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.packing import PACKINGS, BestFit, Packer, Piece
from data.sources.mixes import MIXES, sample_length

LENGTHS = st.lists(st.integers(1, 40), max_size=30)


def puller(lengths: list[int], start: int = 0) -> Iterator[Piece | None]:
    for document in range(start, len(lengths)):
        yield Piece(0, document, 0, lengths[document])
    while True:
        yield None


def pack(name: str, lengths: list[int], row_length: int, lookahead: int = 8) -> list[list[Piece]]:
    packer, source, rows = PACKINGS[name](row_length, lookahead), puller(lengths), []
    while row := packer.row(lambda: next(source)):
        rows.append(row)
    assert packer.pending() == []
    return rows


@pytest.mark.parametrize("name", PACKINGS)
@given(lengths=LENGTHS, row_length=st.integers(1, 17), lookahead=st.integers(1, 9))
def test_rows_hold_every_token_exactly_once(name: str, lengths: list[int], row_length: int, lookahead: int) -> None:
    rows = pack(name, lengths, row_length, lookahead)
    assert all(1 <= sum(p.length for p in row) <= row_length for row in rows)
    tokens = sorted((p.document, t) for row in rows for p in row for t in range(p.start, p.stop))
    assert tokens == [(d, t) for d, n in enumerate(lengths) for t in range(n)]
    assert all(p.length >= 1 for row in rows for p in row)


@pytest.mark.parametrize("name", PACKINGS)
def test_an_over_long_document_continues_in_the_next_rows(name: str) -> None:
    rows = pack(name, [23, 3], 8)
    parts = [(r, p.start, p.stop) for r, row in enumerate(rows) for p in row if p.document == 0]
    assert parts == [(0, 0, 8), (1, 8, 16), (2, 16, 23)]


@pytest.mark.parametrize("name", ["best_fit", "padded"])
@given(lengths=LENGTHS, row_length=st.integers(1, 17))
def test_a_document_that_fits_is_never_cut(name: str, lengths: list[int], row_length: int) -> None:
    pieces = [p for row in pack(name, lengths, row_length) for p in row]
    for document, length in enumerate(lengths):
        parts = [p for p in pieces if p.document == document]
        assert len(parts) == -(-length // row_length)


@given(lengths=LENGTHS, row_length=st.integers(1, 17))
def test_stream_pads_only_the_last_row_and_keeps_the_order(lengths: list[int], row_length: int) -> None:
    rows = pack("stream", lengths, row_length)
    assert all(sum(p.length for p in row) == row_length for row in rows[:-1])
    order = [(p.document, p.start) for row in rows for p in row]
    assert order == sorted(order)


@given(lengths=LENGTHS)
def test_padded_holds_one_document_a_row(lengths: list[int]) -> None:
    assert all(len(row) == 1 for row in pack("padded", lengths, 9))


@pytest.mark.parametrize("name", PACKINGS)
@given(lengths=LENGTHS, row_length=st.integers(1, 17), stop=st.integers(0, 20))
def test_a_restored_packer_goes_on_alike(name: str, lengths: list[int], row_length: int, stop: int) -> None:
    whole = pack(name, lengths, row_length, 4)
    source, first = puller(lengths), PACKINGS[name](row_length, 4)
    pulled = 0

    def pull() -> Piece | None:
        nonlocal pulled
        piece = next(source)
        pulled += piece is not None
        return piece

    rows = [row for _ in range(stop) if (row := first.row(pull))]
    second: Packer = PACKINGS[name](row_length, 4)
    second.restore([Piece(*p) for p in first.pending()])
    source = puller(lengths, pulled)
    while row := second.row(lambda: next(source)):
        rows.append(row)
    assert rows == whole


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=60), lookahead=st.integers(1, 9))
def test_best_fit_starves_no_document(lengths: list[int], lookahead: int) -> None:
    rows = pack("best_fit", lengths, 9, lookahead)
    packer, source, pulled_at = BestFit(9, lookahead), puller(lengths), {}
    for number in range(len(rows)):

        def pull(number: int = number) -> Piece | None:
            piece = next(source)
            if piece is not None:
                pulled_at[piece.document] = number
            return piece

        for piece in packer.row(pull):
            assert number - pulled_at[piece.document] < lookahead


def test_best_fit_emits_a_long_document_although_short_ones_keep_coming() -> None:
    short = iter(range(1, 10**9))
    packer = BestFit(100, 16)
    packer.restore([Piece(0, 0, 0, 99)])
    row = packer.row(lambda: Piece(0, next(short), 0, 1))
    assert row[0].document == 0 and sum(p.length for p in row) == 100


def test_best_fit_takes_the_longest_that_fits_and_of_equals_the_oldest() -> None:
    rows = pack("best_fit", [5, 2, 3, 4, 3], 10)
    assert [[p.document for p in row] for row in rows] == [[0, 3], [1, 2, 4]]


@pytest.mark.parametrize(
    ("mix", "row_length", "least"),
    [(mix, 16384, 0.99) for mix in MIXES] + [("web", 2048, 0.99), ("wlb", 2048, 0.95), ("prolong", 2048, 0.96)],
)
def test_best_fit_fills_rows(mix: str, row_length: int, least: float) -> None:
    document = -1

    def pull() -> Piece:
        nonlocal document
        document += 1
        return Piece(0, document, 0, sample_length(mix, 0, document, row_length))

    packer = BestFit(row_length, 256)
    filled = [sum(p.length for p in packer.row(pull)) for _ in range(400)]
    assert np.mean(filled) / row_length > least


@pytest.mark.parametrize("name", PACKINGS)
def test_what_a_packer_holds_back_is_bounded(name: str) -> None:
    packer, document = PACKINGS[name](64, 32), iter(range(10**9))

    def pull() -> Piece:
        d = next(document)
        return Piece(0, d, 0, sample_length("web", 1, d))

    for _ in range(300):
        packer.row(pull)
        assert len(packer.pending()) <= 32


@pytest.mark.deep
@pytest.mark.parametrize("name", PACKINGS)
@settings(max_examples=2000)
@given(lengths=st.lists(st.integers(1, 300), max_size=120), row_length=st.integers(1, 200))
def test_many_corpora_keep_every_token(name: str, lengths: list[int], row_length: int) -> None:
    pieces = sorted(p for row in pack(name, lengths, row_length, 16) for p in row)
    joined = [(d, sum(p.length for p in pieces if p.document == d)) for d in range(len(lengths))]
    assert joined == list(enumerate(lengths))
    for left, right in pairwise(pieces):
        assert left.document != right.document or left.stop == right.start
