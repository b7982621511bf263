"""The layout of packed rows against a layout that is drawn token by token."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.mask_spec import MaskSpec
from parallel.plan.layout import PackedLayout
from tests.masks import allowed, masks


@st.composite
def packed(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Documents of each row, and the row length."""
    rows = draw(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=0, max_size=5))
    fullest = max((sum(row) for row in rows), default=0)
    return rows, fullest + draw(st.integers(0, 3))


def make(rows: list[list[int]], row_length: int) -> PackedLayout:
    return PackedLayout.from_lengths([n for row in rows for n in row], [len(row) for row in rows], row_length)


def token_by_token(rows: list[list[int]], row_length: int) -> tuple[list[int], list[int]]:
    """Document and position of every token of the buffer; document -1 and position 0 in padding."""
    ids, positions, document = [], [], 0
    for row in rows:
        for length in row:
            ids += [document] * length
            positions += range(length)
            document += 1
        ids += [-1] * (row_length - sum(row))
        positions += [0] * (row_length - sum(row))
    return ids, positions


@given(packed())
def test_tokens_lie_where_a_token_by_token_layout_puts_them(case: tuple[list[list[int]], int]) -> None:
    rows, row_length = case
    layout = make(rows, row_length)
    ids, positions = token_by_token(rows, row_length)
    assert layout.document_ids().tolist() == ids
    assert layout.positions().tolist() == positions
    assert layout.is_padding().tolist() == [i == -1 for i in ids]
    assert layout.total_tokens == len(ids) == layout.valid_tokens + layout.padding_tokens
    held = [d for d in range(layout.num_documents) if layout.lengths[d]]
    assert layout.starts[held].tolist() == [ids.index(d) for d in held]
    assert (layout.stops - layout.starts).tolist() == layout.lengths.tolist() == [n for row in rows for n in row]
    assert layout.rows.tolist() == [r for r, row in enumerate(rows) for _ in row]
    for array in (layout.starts, layout.stops, layout.positions(), layout.document_ids(), layout.rows):
        assert array.dtype == np.int64


@given(packed(), masks())
def test_pairs_count_the_dense_mask(case: tuple[list[list[int]], int], mask: MaskSpec) -> None:
    layout = make(*case)
    assert layout.pairs(mask) == allowed(mask, layout).sum()


def test_pairs_of_very_long_documents_do_not_wrap() -> None:
    length = 2**33
    layout = PackedLayout.from_lengths([length, length])
    assert layout.pairs() == length * (length + 1)
    assert layout.pairs(MaskSpec(causal=False)) == 2 * length**2 > 2**64


@given(packed(), st.data())
def test_selected_rows_are_those_rows(case: tuple[list[list[int]], int], data: st.DataObject) -> None:
    rows, row_length = case
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    assert make(rows, row_length).select_rows(start, stop) == make(rows[start:stop], row_length)


@given(packed(), packed())
def test_json_round_trip_equality_and_hash(a: tuple[list[list[int]], int], b: tuple[list[list[int]], int]) -> None:
    first, second = make(*a), make(*b)
    again = PackedLayout.from_json(first.to_json())
    assert again == first and again.hash == first.hash and hash(again) == hash(first)
    assert (first == second) == (a == b) == (first.hash == second.hash)


def test_hash_is_the_same_in_another_process() -> None:
    code = "from parallel.plan.layout import PackedLayout as P; print(P.from_lengths([3, 2, 4], [2, 1], 6).hash)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == PackedLayout.from_lengths(np.array([3, 2, 4], np.int32), [2, 1], 6).hash
    assert len(found) == 32 and int(found, 16)


def test_rows_that_differ_only_in_their_boundary_are_not_equal() -> None:
    assert PackedLayout.from_lengths([2, 2, 2], [1, 2], 4) != PackedLayout.from_lengths([2, 2, 2], [2, 1], 4)
    assert PackedLayout.from_lengths([2]) != PackedLayout.from_lengths([2], row_length=3)


def test_defaults_are_one_row_as_long_as_its_documents() -> None:
    layout = PackedLayout.from_lengths([1, 5, 1])
    assert (layout.num_rows, layout.row_length, layout.padding_tokens) == (1, 7, 0)
    assert PackedLayout.from_lengths([3, 1, 2], rows=[1, 2]).row_length == 3


def test_empty_layouts() -> None:
    nothing = PackedLayout.from_lengths([])
    assert (nothing.total_tokens, nothing.num_documents, nothing.pairs()) == (0, 0, 0)
    padding = PackedLayout.from_lengths([], rows=[0, 0], row_length=3)
    assert padding.is_padding().tolist() == [True] * 6 and padding.positions().tolist() == [0] * 6


def test_a_layout_cannot_be_changed() -> None:
    lengths = np.array([2, 3])
    layout = PackedLayout.from_lengths(lengths)
    lengths[0] = 9
    assert layout.lengths.tolist() == [2, 3]
    for array in (layout.lengths, layout.starts, layout.stops, layout.row_documents):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(AttributeError):
        layout.row_length = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([2, -1, 1],), r"document 1 holds -1 tokens"),
        (([2, -3],), r"document 1 holds -3 tokens"),
        (([2, 2, 9], [1, 1, 1], 8), r"row 2 holds 9 tokens, row_length=8"),
        (([2, 2], [1]), r"rows hold 1 documents in total, but 2 lengths"),
        (([2, 2], [3, -1]), r"row 1 holds -1 documents"),
        (([2, 2], [3]), r"rows hold 3 documents in total, but 2 lengths"),
        (([], [], -1), r"row_length=-1"),
        ((np.array([1.5]),), r"float64"),
        ((np.array([[1]]),), r"2 dims"),
    ],
)
def test_bad_layouts_are_refused_with_their_numbers(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedLayout.from_lengths(*arguments)


def test_bad_questions_are_refused_with_their_numbers() -> None:
    layout = PackedLayout.from_lengths([2, 3], [1, 1])
    with pytest.raises(ValueError, match="rows 1:3 are outside"):
        layout.select_rows(1, 3)
    with pytest.raises(ValueError, match="format 1"):
        PackedLayout.from_json('{"format": 7}')
    with pytest.raises(ValueError, match="lacks"):
        PackedLayout.from_json('{"format": 1, "lengths": []}')


def test_a_layout_in_words() -> None:
    few, many = PackedLayout.from_lengths([3, 1, 2], [2, 1], 5), PackedLayout.from_lengths(range(1, 10))
    assert repr(few) == "PackedLayout(3 documents [3, 1, 2], 2 rows of 5, 4 padding)"
    assert repr(many) == "PackedLayout(9 documents [1, 2, 3, 4, 5, 6, 7, 8, ...], 1 rows of 45, 0 padding)"
    assert repr(PackedLayout.from_lengths([1] * 8)).startswith("PackedLayout(8 documents [1, 1, 1, 1, 1, 1, 1, 1], ")
    for text, found in (("[]", "'list'"), ('{"format": 7}', "7"), ("{}", "None")):
        with pytest.raises(ValueError, match=rf"not a layout of format 1 \(found {found}\)"):
            PackedLayout.from_json(text)


@pytest.mark.deep
@settings(max_examples=5000)
@given(packed())
def test_many_layouts_round_trip(case: tuple[list[list[int]], int]) -> None:
    test_tokens_lie_where_a_token_by_token_layout_puts_them.hypothesis.inner_test(case)  # type: ignore[attr-defined]
    assert PackedLayout.from_json(make(*case).to_json()) == make(*case)


def test_documents_of_no_tokens_have_a_number_and_lie_nowhere():
    layout = PackedLayout.from_lengths([0, 3, 0, 0, 2, 0], rows=[3, 3, 0], row_length=4)
    assert layout.starts.tolist() == [0, 0, 3, 4, 4, 6] and layout.stops.tolist() == [0, 3, 3, 4, 6, 6]
    assert layout.document_ids().tolist() == [1, 1, 1, -1, 4, 4, -1, -1, -1, -1, -1, -1]
    assert layout.num_documents == 6 and layout.pairs() == 9
    present = layout.without_empty()
    assert present.lengths.tolist() == [3, 2] and present.row_documents.tolist() == [1, 1, 0]
    assert present.positions().tolist() == layout.positions().tolist() and present.without_empty() is present
    assert PackedLayout.from_json(layout.to_json()) == layout and layout.select_rows(0, 1).lengths.tolist() == [0, 3, 0]
    assert PackedLayout.from_lengths([0, 0]).total_tokens == 0
    with pytest.raises(ValueError, match=r"document 1 holds -1 tokens; give 0 or more"):
        PackedLayout.from_lengths([3, -1])
