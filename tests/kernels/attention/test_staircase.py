"""Plans of the torch backend: every allowed pair in exactly one call, and nothing in the padding is ever read."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.attention.reference import dense_mask
from kernels.attention.staircase import TILE, WIDEST_TILE, plan_staircase
from kernels.mask import IntervalMask
from tests.kernels.oracle import cumulative


def coverage(masks: list[IntervalMask]) -> tuple[np.ndarray, np.ndarray]:
    """How often the plan's calls compute each pair, and which pairs are allowed."""
    Tq, Tk = max(m.Tq for m in masks), max(m.Tk for m in masks)
    count = np.zeros((Tq, Tk), int)
    plan = plan_staircase(masks)
    for s in plan.slices:
        assert s.q1 > s.q0
        assert s.k1 > s.k0  # the operator kills the process on an empty side
        n, m = (s.q1 - s.q0) // s.count, (s.k1 - s.k0) // s.count
        assert (n * s.count, m * s.count) == (s.q1 - s.q0, s.k1 - s.k0)
        i, j = np.arange(n)[:, None], np.arange(m)
        part = {"full": j >= 0 * i, "causal": j <= i, "anticausal": j >= i}[s.kind]
        for q0, k0 in zip(range(s.q0, s.q1, n), range(s.k0, s.k1, m), strict=True):
            count[q0 : q0 + n, k0 : k0 + m] += part
    allowed = dense_mask(masks, Tq, Tk).numpy()
    for b in plan.batches:
        assert b.R > 0
        assert b.C > 0
        assert b.bias is None or (b.R <= TILE and b.C <= WIDEST_TILE)
        q_index, k_index = b.q_index.reshape(b.n, b.R).numpy(), b.k_index.reshape(b.n, b.C).numpy()
        assert allowed[q_index.ravel()].any(1).all()  # no blind query, no unseen key, not even as filling
        assert allowed[:, k_index.ravel()].any(0).all()
        q_live, k_live = np.zeros(b.n * b.R, bool), np.zeros(b.n * b.C, bool)
        q_live[b.q_slot], k_live[b.k_slot] = True, True
        assert np.array_equal(b.q_rows, b.q_index[b.q_slot])
        assert len(np.unique(b.q_rows)) == len(b.q_rows)
        for n in range(b.n):
            rows, cols = q_live.reshape(b.n, b.R)[n], k_live.reshape(b.n, b.C)[n]
            part = np.tri(b.R, b.C, dtype=bool) if b.bias is None else (b.bias[n, 0] == 0).numpy()
            assert not part[rows][:, ~cols].any()  # padding keys are hidden from real queries
            assert part[rows][:, cols].any(1).all()  # the operator's lse of a row without keys would be 0
            count[np.ix_(q_index[n][rows], k_index[n][cols])] += part[np.ix_(rows, cols)]
    return count, allowed


def written_once_where_fresh(masks: list[IntervalMask]) -> None:
    """A call marked fresh really is the first to write its rows."""
    plan = plan_staircase(masks)
    q_seen, k_seen = set(), set()
    for s in plan.slices:
        q, k = set(range(s.q0, s.q1)), set(range(s.k0, s.k1))
        assert not (s.fresh_q and q & q_seen)
        assert not (s.fresh_k and k & k_seen)
        q_seen, k_seen = q_seen | q, k_seen | k
    for b in plan.batches:
        q, k = set(b.q_rows.tolist()), set(b.k_rows.tolist())
        assert not (b.fresh_q and q & q_seen)
        assert not (b.fresh_k and (k & k_seen or len(k) < len(b.k_rows)))
        q_seen, k_seen = q_seen | q, k_seen | k


documents = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40), st.integers(60, 260)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(documents, st.booleans(), st.one_of(st.none(), st.integers(1, 150)), st.integers(0, 5))
@example([400], True, 100, 0)
@example([260, 200], False, 80, 0)
@example([1] * 200, True, None, 0)
def test_every_pair_once(sizes: list[int], causal: bool, window: int | None, gap: int) -> None:
    """Documents with gaps, all windows: full, causal and both kinds of edges."""
    starts, stops, at = [], [], 0
    for n in sizes:
        starts.append(at + gap)
        at += gap + n
        stops.append(at)
    mask = IntervalMask.from_documents(starts, stops, at + gap, causal, window)
    count, allowed = coverage([mask])
    assert np.array_equal(count, allowed.astype(int))
    written_once_where_fresh([mask])


@settings(max_examples=40, deadline=None)
@given(documents, st.booleans(), st.one_of(st.none(), st.integers(1, 150)), st.integers(1, 4), st.integers(1, 4))
def test_every_pair_once_in_shards(
    sizes: list[int], causal: bool, window: int | None, q_stride: int, k_stride: int
) -> None:
    """Striped shards against each other: staircases of any step."""
    T, cu = sum(sizes), cumulative(sizes)
    q_at, k_at = list(range(0, T, q_stride)), list(range(k_stride // 2, T, k_stride))
    mask = IntervalMask.from_positions(q_at, k_at, cu[:-1], cu[1:], causal, window)
    count, allowed = coverage([mask])
    assert np.array_equal(count, allowed.astype(int))
    written_once_where_fresh([mask])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=120), st.integers(0, 9))
def test_every_pair_once_in_any_staircase(steps: list[tuple[int, int]], seed: int) -> None:
    """Staircases that come from no documents at all, rows without keys among them."""
    rise = np.random.default_rng(seed).integers(1, 4)
    lo = np.cumsum([a for a, _ in steps], dtype=np.int32)
    hi = np.maximum(lo, np.cumsum([b * rise for _, b in steps], dtype=np.int32))
    k_start, k_end = torch.from_numpy(lo.astype(np.int32)), torch.from_numpy(hi.astype(np.int32))
    mask = IntervalMask.from_rows(k_start, k_end, int(hi[-1]) if len(hi) else 0)
    if mask.Tq:
        count, allowed = coverage([mask])
        assert np.array_equal(count, allowed.astype(int))
        written_once_where_fresh([mask])


def test_one_document_is_one_call() -> None:
    """No merge and no copy where a document fills the buffer."""
    plan = plan_staircase([IntervalMask.from_cu_seqlens([0, 1000])])
    assert len(plan.slices) == 1
    assert not plan.batches


def test_short_documents_share_calls() -> None:
    """4,096 one-token documents make one batch of tiles, not 4,096 calls."""
    plan = plan_staircase([IntervalMask.from_cu_seqlens(list(range(4097)))])
    assert not plan.slices
    assert [b.n for b in plan.batches] == [64]


def test_equal_blocks_share_calls() -> None:
    """A window's edges are two calls whatever the length, after its first rows; equal documents are one call."""
    window = plan_staircase([IntervalMask.from_cu_seqlens([0, 130 + 129 * 7], window=130)])
    assert [(s.kind, s.count) for s in window.slices] == [("causal", 1), ("causal", 7), ("anticausal", 7)]
    equal = plan_staircase([IntervalMask.from_cu_seqlens([0, 200, 400, 600, 601])])
    assert [s.count for s in equal.slices] == [3]


def test_plan_is_made_once() -> None:
    """All layers of a model share it."""
    mask = IntervalMask.from_cu_seqlens([0, 5, 300])
    assert plan_staircase([mask]) is plan_staircase([mask])
