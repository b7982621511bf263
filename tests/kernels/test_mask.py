"""Interval masks against pair-by-pair masks, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention.reference import dense_mask
from kernels.mask import IntervalMask, require_disjoint
from tests.kernels.oracle import cumulative, document_pairs

lengths = st.lists(st.one_of(st.sampled_from([0, 1]), st.integers(0, 9)), max_size=6)
windows = st.one_of(st.none(), st.integers(1, 6))


def check(mask: IntervalMask, allowed: Tensor) -> None:
    """Both sides of the mask say `allowed`, and no array decreases."""
    assert (mask.Tq, mask.Tk) == tuple(allowed.shape)
    assert torch.equal(dense_mask([mask], *allowed.shape), allowed)
    rows = torch.arange(mask.Tq)
    assert torch.equal((rows >= mask.q_start[:, None]) & (rows < mask.q_end[:, None]), allowed.T)
    for x in (mask.k_start, mask.k_end, mask.q_start, mask.q_end):
        assert x.dtype == torch.int32
        assert bool((x[1:] >= x[:-1]).all())
    assert mask.pairs() == int(allowed.sum())


@given(lengths, st.booleans(), windows)
def test_square_documents(sizes: list[int], causal: bool, window: int | None) -> None:
    """cu_seqlens of equal queries and keys, zero-length documents anywhere, no documents at all."""
    reach = (None, None) if window is None else (window - 1, window - 1)
    allowed = document_pairs(sizes, None, causal, reach)
    check(IntervalMask.from_cu_seqlens(cumulative(sizes), causal=causal, window=window), allowed)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=5), st.booleans(), windows, st.data())
def test_rectangular_documents_align_bottom_right(
    sizes: list[tuple[int, int]], causal: bool, window: int | None, data: st.DataObject
) -> None:
    """Different numbers of queries and keys, tensors as input, and buffers longer than the documents."""
    nq, nk = [a for a, _ in sizes], [b for _, b in sizes]
    more_q, more_k = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
    reach = (None, None) if window is None else (window - 1, window - 1)
    allowed = torch.nn.functional.pad(document_pairs(nq, nk, causal, reach), (0, more_k, 0, more_q))
    cu_q, cu_k = (torch.tensor(cumulative(x), dtype=torch.int32) for x in (nq, nk))
    totals = {"total_q": sum(nq) + more_q, "total_k": sum(nk) + more_k}
    check(IntervalMask.from_cu_seqlens(cu_q, cu_k, causal=causal, window=window, **totals), allowed)


@given(lengths, st.integers(-1, 4), st.integers(-1, 4))
def test_two_sided_windows(sizes: list[int], left: int, right: int) -> None:
    """(left, right) with -1 for everything on that side."""
    reach = (None if left < 0 else left, None if right < 0 else right)
    mask = IntervalMask.from_cu_seqlens(cumulative(sizes), causal=False, window=(left, right))
    check(mask, document_pairs(sizes, None, False, reach))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=5), st.integers(0, 3), st.booleans(), windows)
def test_documents_with_gaps(parts: list[tuple[int, int]], tail: int, causal: bool, window: int | None) -> None:
    """Padding between documents sees nothing and is seen by nothing, and the arrays stay monotone."""
    starts, stops, at = [], [], 0
    for gap, n in parts:
        starts.append(at + gap)
        stops.append(at + gap + n)
        at += gap + n
    allowed = torch.zeros(at + tail, at + tail, dtype=torch.bool)
    for a, b in zip(starts, stops):
        for i in range(a, b):
            for j in range(a, b):
                near = window is None or abs(i - j) < window
                allowed[i, j] = near and (j <= i or not causal)
    check(IntervalMask.from_documents(starts, stops, at + tail, causal, window), allowed)


@given(lengths, st.booleans(), windows, st.data())
def test_shards_by_global_position(sizes: list[int], causal: bool, window: int | None, data: st.DataObject) -> None:
    """Any sorted choice of queries and of keys of one sequence: zigzag and striped shards are such choices."""
    T = sum(sizes)
    chosen = st.lists(st.booleans(), min_size=T, max_size=T)
    q_at, k_at = ([t for t, keep in enumerate(data.draw(chosen)) if keep] for _ in range(2))
    reach = (None, None) if window is None else (window - 1, window - 1)
    whole = document_pairs(sizes, None, causal, reach)
    cu = cumulative(sizes)
    mask = IntervalMask.from_positions(q_at, k_at, cu[:-1], cu[1:], causal, window)
    check(mask, whole[q_at][:, k_at])


def test_more_queries_than_keys_begin_blind() -> None:
    """A causal document of 4 queries and 2 keys: two queries that see nothing, then the triangle."""
    mask = IntervalMask.from_cu_seqlens([0, 4], [0, 2])
    assert (mask.k_end - mask.k_start).tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "empty"),
        (([1, 3],), "start at 0, not at 1"),
        (([0, 5, 3],), "decreases from 5 .* to 3"),
        (([0, 2**31],), "2147483648 tokens, beyond int32"),
        (([0, 2], [0, 2, 3]), "1 documents and cu_seqlens_k 2"),
        (([0, 2], None, True, 0), "window=0"),
        (([0, 2], None, True, (-2, 0)), "below -1"),
        ((torch.tensor([0.0, 2.0]),), "float32"),
        ((torch.tensor([[0, 2]]),), r"1-D int32 tensor, not \(1, 2\)"),
        (([0, 9], None, True, None, None, 5), "total_q is 5, but cu_seqlens_q ends at 9"),
    ],
)
def test_bad_cu_seqlens(arguments: tuple, message: str) -> None:
    """Each refusal names the numbers."""
    with pytest.raises(ValueError, match=message):
        IntervalMask.from_cu_seqlens(*arguments)


@pytest.mark.parametrize(
    ("starts", "stops", "message"),
    [
        ([0, 3], [4, 6], r"document 1 is \[3, 6\)"),
        ([0, 5], [3, 4], r"document 1 is \[5, 4\)"),
        ([-1], [3], r"document 0 is \[-1, 3\)"),
        ([0], [11], "stops at 11, beyond the 10"),
        ([0], [3, 4], "1 document starts .* 2 stops"),
    ],
)
def test_bad_documents(starts: list[int], stops: list[int], message: str) -> None:
    """Overlapping, reversed, negative and overlong documents."""
    with pytest.raises(ValueError, match=message):
        IntervalMask.from_documents(starts, stops, 10)


def test_positions_must_increase() -> None:
    """A gathered, rank-major buffer is not sorted and is refused rather than masked wrongly."""
    with pytest.raises(ValueError, match="entry 1 is 4 and the next 2"):
        IntervalMask.from_positions([0, 4, 2], [0, 1, 2], [0], [5])


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((i32(0, 1), i32(2, 1), i32(0, 0), i32(2, 2)), "k_end must never decrease"),
        ((i32(0, 0), i32(1, 3), i32(0, 1), i32(2, 2)), "k_end must .* 0..2"),
        ((i32(1, 1), i32(0, 2), i32(0, 1), i32(2, 2)), r"k_end\[0\] = 0 is below k_start\[0\] = 1"),
        ((i32(0, 0), i32(1, 2), i32(0, 0), i32(2, 2)), "3 pairs and the key side 4"),
    ],
)
def test_bad_arrays(arrays: tuple[Tensor, ...], message: str) -> None:
    """Arrays that are no staircase, or two sides that disagree."""
    with pytest.raises(ValueError, match=message):
        IntervalMask(*arrays)


def test_overlapping_bands_name_the_first_query() -> None:
    """A pair in two bands would count twice."""
    near = IntervalMask.from_cu_seqlens([0, 6], window=3)
    far = IntervalMask.from_rows(torch.zeros(6, dtype=torch.int32), i32(0, 0, 0, 1, 3, 3), 6)
    require_disjoint([near, IntervalMask.from_rows(torch.zeros(6, dtype=torch.int32), i32(0, 0, 0, 1, 2, 3), 6)])
    with pytest.raises(ValueError, match="bands 0 and 1 overlap, first at query 4: both contain key 2"):
        require_disjoint([near, far])


def test_to_keeps_the_mask() -> None:
    """Moving to the same device gives the same object, so that cached plans live on."""
    mask = IntervalMask.from_cu_seqlens([0, 6])
    assert mask.to("cpu") is mask


@pytest.mark.deep
@settings(max_examples=3000)
@given(lengths, st.booleans(), windows)
def test_square_documents_deep(sizes: list[int], causal: bool, window: int | None) -> None:
    """The square sweep, longer."""
    reach = (None, None) if window is None else (window - 1, window - 1)
    allowed = document_pairs(sizes, None, causal, reach)
    check(IntervalMask.from_cu_seqlens(cumulative(sizes), causal=causal, window=window), allowed)
