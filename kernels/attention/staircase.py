"""How the torch backend cuts a mask into calls: slices that are rectangles or triangles, and batches of small tiles.

All planning is numpy on the host and depends on the mask alone, so a plan is made once and kept on the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kernels.mask import IntervalMask

TILE = 64  # below this a region is one masked tile; a rectangle must have this many keys to be worth a call
TINY = 16  # documents with fewer rows share a tile
MAX_BATCHED = 96  # causal documents up to this length are stacked into one call
WIDEST_TILE = 8 * TILE

Kind = Literal["full", "causal", "anticausal"]


@dataclass(frozen=True)
class Slice:
    """Queries [q0, q1) against keys [k0, k1): all of them, or row i against the first i + 1, or against all but i.

    `count` such blocks of equal size follow each other down the diagonal; the ranges span all of them.

    "fresh" says that nothing wrote these rows (of out, dq; of dk, dv) before, so results are stored, not merged.
    """

    kind: Kind
    q0: int
    q1: int
    k0: int
    k1: int
    count: int = 1
    fresh_q: bool = False
    fresh_k: bool = False


@dataclass(frozen=True)
class GatheredTile:
    """Any queries against any keys, few of both: row i sees columns [lo[i], hi[i]) of the gathered keys.

    lo is None for a causal tile, which may be padded at its end without a mask.
    """

    rows: np.ndarray
    cols: np.ndarray
    lo: np.ndarray | None
    hi: np.ndarray | None


@dataclass(frozen=True)
class TileBatch:
    """n tiles padded to one shape (R, C) and run in one call. Padding repeats a tile's own first token.

    q_index [n * R], k_index [n * C]: tokens to gather. q_slot, k_slot: which of the gathered entries are no padding;
    q_rows, k_rows: their tokens. bias [n, 1, R, C] is 0 or -inf (None: causal). Every row but padding sees a key.
    """

    n: int
    R: int
    C: int
    q_index: Tensor
    k_index: Tensor
    q_slot: Tensor
    k_slot: Tensor
    q_rows: Tensor
    k_rows: Tensor
    bias: Tensor | None
    fresh_q: bool
    fresh_k: bool
    distinct_k: bool


@dataclass(frozen=True)
class StaircasePlan:
    """The calls that together cover every allowed pair once."""

    slices: tuple[Slice, ...]
    batches: tuple[TileBatch, ...]


@dataclass
class _Cuts:
    slices: list[Slice] = field(default_factory=list)
    tiles: list[GatheredTile] = field(default_factory=list)

    def full(self, q0: int, q1: int, k0: int, k1: int) -> None:
        if q1 > q0 and k1 > k0:
            self.slices.append(Slice("full", q0, q1, k0, k1))

    def triangle(self, kind: Kind, q0: int, k0: int, n: int) -> None:
        self.slices.append(Slice(kind, q0, q0 + n, k0, k0 + n))


def plan_staircase(masks: Sequence[IntervalMask]) -> StaircasePlan:
    """The plan for a union of disjoint bands, from the cache of the first if it was made before."""
    key = ("staircase", tuple(id(m) for m in masks))
    cache = masks[0].cache
    if key not in cache:
        cuts = _Cuts()
        for mask in masks:
            cut_band(mask.k_start.numpy().astype(np.int64), mask.k_end.numpy().astype(np.int64), cuts)
        totals = max(m.Tq for m in masks), max(m.Tk for m in masks)
        cache[key] = (_order(cuts, *totals), tuple(masks[1:]))  # the masks keep their ids in use
    return cache[key][0]


def cut_band(k_start: np.ndarray, k_end: np.ndarray, cuts: _Cuts) -> None:
    """Cut one staircase k_start, k_end [Tq] into slices and tiles, appended to `cuts`."""
    pool: list[tuple[int, int]] = []
    pooled = [0, 0]
    for a, b in _components(k_start, k_end):
        rows, cols = b - a, int(k_end[b - 1] - k_start[a])
        if rows < TINY and cols <= 2 * TINY:
            if pooled[0] + rows > TILE or pooled[1] + cols > TILE:
                cuts.tiles.append(_pooled_tile(pool, k_start, k_end))
                pool, pooled = [], [0, 0]
            pool.append((a, b))
            pooled = [pooled[0] + rows, pooled[1] + cols]
        else:
            _cut_component(a, k_start[a:b], k_end[a:b], cuts)
    if pool:
        cuts.tiles.append(_pooled_tile(pool, k_start, k_end))


def _components(k_start: np.ndarray, k_end: np.ndarray) -> list[tuple[int, int]]:
    """Row ranges whose rows all see keys and which share no key with other ranges (documents, where there are any)."""
    sees = k_end > k_start
    linked = sees[1:] & sees[:-1] & (k_start[1:] < k_end[:-1])
    first = np.flatnonzero(sees & ~np.concatenate([[False], linked])[: len(sees)])
    last = np.flatnonzero(sees & ~np.concatenate([linked, [False]])[: len(sees)])
    return list(zip(first.tolist(), (last + 1).tolist()))


def _pooled_tile(pool: list[tuple[int, int]], k_start: np.ndarray, k_end: np.ndarray) -> GatheredTile:
    """Several tiny components as one tile: block-diagonal, each row seeing what it saw."""
    rows, cols, lo, hi, base = [], [], [], [], 0
    for a, b in pool:
        first, stop = int(k_start[a]), int(k_end[b - 1])
        rows.append(np.arange(a, b))
        cols.append(np.arange(first, stop))
        lo.append(k_start[a:b] - first + base)
        hi.append(k_end[a:b] - first + base)
        base += stop - first
    return GatheredTile(np.concatenate(rows), np.concatenate(cols), np.concatenate(lo), np.concatenate(hi))


def _cut_component(at: int, lo: np.ndarray, hi: np.ndarray, cuts: _Cuts) -> None:
    """Cut rows [at, at + n) that see [lo[i], hi[i]) and hang together."""
    n = len(lo)
    if lo[-1] == lo[0] and hi[0] == lo[0] + 1 and hi[-1] == lo[0] + n and np.all(np.diff(hi) == 1):
        if n <= MAX_BATCHED:
            cuts.tiles.append(GatheredTile(np.arange(at, at + n), np.arange(lo[0], hi[-1]), None, None))
        else:
            cuts.triangle("causal", at, int(lo[0]), n)
        return
    for first, stop, slope in _regular_runs(lo, hi):
        if slope is None or not _cut_regular(at + first, stop - first, int(lo[first]), int(hi[first]), slope, cuts):
            _cut_irregular(at + first, lo[first:stop], hi[first:stop], cuts)


def _regular_runs(lo: np.ndarray, hi: np.ndarray) -> list[tuple[int, int, tuple[int, int] | None]]:
    """Split rows into runs of at least TILE rows along which each end stands still or moves by one, and the rest.

    Yields (first, stop, (step of lo, step of hi)), with None for a rest.
    """
    steps = np.stack([np.diff(lo), np.diff(hi)], 1)
    change = np.flatnonzero(np.any(steps[1:] != steps[:-1], 1)) + 1
    edges = [0, *change.tolist(), len(steps)]
    runs: list[tuple[int, int, tuple[int, int] | None]] = []
    done = 0
    for a, b in pairwise(edges):  # steps [a, b) are alike: rows a .. b
        if b <= a or b + 1 - max(a, done) < TILE or steps[a].max() > 1:
            continue
        first = max(a, done)
        if first > done:
            runs.append((done, first, None))
        runs.append((first, b + 1, (int(steps[a, 0]), int(steps[a, 1]))))
        done = b + 1
    if done < len(lo):
        runs.append((done, len(lo), None))
    return runs


def _cut_regular(at: int, n: int, lo: int, hi: int, slope: tuple[int, int], cuts: _Cuts) -> bool:
    """Cut n rows that see [lo + slope[0] * i, hi + slope[1] * i) into triangles and rectangles; False if thin."""
    if slope == (0, 0):
        if hi - lo <= TILE and n <= 4 * TILE:
            return False  # better stacked with other tiles
        cuts.full(at, at + n, lo, hi)
    elif slope == (0, 1):
        cuts.triangle("causal", at, hi - 1, n)
        cuts.full(at, at + n, lo, hi - 1)
    elif slope == (1, 0):
        cuts.triangle("anticausal", at, lo, n)
        cuts.full(at, at + n, lo + n, hi)
    else:
        block = hi - lo - 1  # rows that share no key only with the diagonal between both edges
        if block < TILE:
            return False
        for i in range(0, n, block):
            m = min(block, n - i)
            if m < TILE:
                rows = np.arange(i, n)
                _cut_irregular(at + i, lo + rows, hi + rows, cuts)
                continue
            cuts.triangle("causal", at + i, hi - 1 + i, m)
            cuts.triangle("anticausal", at + i, lo + i, m)
            cuts.full(at + i, at + i + m, lo + i + m, hi - 1 + i)
    return True


def _cut_irregular(at: int, lo: np.ndarray, hi: np.ndarray, cuts: _Cuts) -> None:
    """Cut any staircase: the rectangle that all rows see, then what is left and right of it, by halves of the rows."""
    sees = np.flatnonzero(hi > lo)
    if not len(sees):
        return
    at, lo, hi = at + int(sees[0]), lo[sees[0] : sees[-1] + 1], hi[sees[0] : sees[-1] + 1]
    n, shared, stop = len(lo), int(lo[-1]), int(hi[0])
    if stop - shared >= TILE or n == 1:
        cuts.full(at, at + n, shared, stop)
        parts = [(lo, np.minimum(hi, shared)), (np.maximum(lo, stop), hi)]
    elif n <= TILE and hi[-1] - lo[0] <= WIDEST_TILE:
        base = int(lo[0])
        cuts.tiles.append(GatheredTile(np.arange(at, at + n), np.arange(base, hi[-1]), lo - base, hi - base))
        return
    else:
        parts = [(lo, hi)]
    half = (n + 1) // 2 if n > TILE or len(parts) == 1 else n
    for left, right in parts:
        _cut_irregular(at, left[:half], right[:half], cuts)
        _cut_irregular(at + half, left[half:], right[half:], cuts)


def _order(cuts: _Cuts, Tq: int, Tk: int) -> StaircasePlan:
    """Stack the tiles, and mark which calls are the first to write their rows."""
    q_seen, k_seen = np.zeros(Tq, bool), np.zeros(Tk, bool)
    slices = []
    for s in _fused(cuts.slices):
        fresh_q, fresh_k = not q_seen[s.q0 : s.q1].any(), not k_seen[s.k0 : s.k1].any()
        slices.append(replace(s, fresh_q=fresh_q, fresh_k=fresh_k))
        q_seen[s.q0 : s.q1] = k_seen[s.k0 : s.k1] = True
    batches = [_stack(group, R, C, q_seen, k_seen) for R, C, group in _groups(cuts.tiles, Tq)]
    return StaircasePlan(tuple(slices), tuple(batches))


def _fused(slices: list[Slice]) -> list[Slice]:
    """Slices with those that continue each other made one: blocks of a window, documents of equal length."""
    fused: list[Slice] = []
    for s in sorted(slices, key=lambda s: (s.kind != "causal", s.kind, s.q0, s.k0)):
        last = fused[-1] if fused else s
        same = (s.kind, s.q1 - s.q0, s.k1 - s.k0) == (
            last.kind,
            (last.q1 - last.q0) // last.count,
            (last.k1 - last.k0) // last.count,
        )
        if fused and same and (s.q0, s.k0) == (last.q1, last.k1):
            fused[-1] = replace(last, q1=s.q1, k1=s.k1, count=last.count + 1)
        else:
            fused.append(s)
    return fused


def _groups(tiles: list[GatheredTile], Tq: int) -> list[tuple[int, int, list[GatheredTile]]]:
    """Tiles of like size in groups (R, C, tiles), such that no query is twice in a group."""
    groups: list[tuple[int, int, list[GatheredTile]]] = []
    causal: list[GatheredTile] = []
    for tile in sorted((t for t in tiles if t.lo is None), key=lambda t: len(t.rows)):
        if causal and len(tile.rows) > 1.15 * len(causal[0].rows) + 8:
            groups.append((len(causal[-1].rows), len(causal[-1].rows), causal))
            causal = []
        causal.append(tile)
    if causal:
        groups.append((len(causal[-1].rows), len(causal[-1].rows), causal))
    masked: dict[tuple[int, int, int], list[GatheredTile]] = {}
    layer = np.zeros(Tq, np.int64)
    for tile in tiles:
        if tile.lo is not None:
            R, C = (-(-size // 32) * 32 for size in (len(tile.rows), len(tile.cols)))
            masked.setdefault((R, C, int(layer[tile.rows].max())), []).append(tile)
            layer[tile.rows] = layer[tile.rows].max() + 1
    return groups + [(R, C, group) for (R, C, _), group in masked.items()]


def _stack(tiles: list[GatheredTile], R: int, C: int, q_seen: np.ndarray, k_seen: np.ndarray) -> TileBatch:
    q_rows, k_rows = np.concatenate([t.rows for t in tiles]), np.concatenate([t.cols for t in tiles])
    fresh_q, fresh_k = not q_seen[q_rows].any(), not k_seen[k_rows].any()
    distinct = len(np.unique(k_rows)) == len(k_rows)
    q_seen[q_rows] = k_seen[k_rows] = True
    n = len(tiles)
    q_index, k_index = np.empty((n, R), np.int64), np.empty((n, C), np.int64)
    q_live, k_live = np.zeros((n, R), bool), np.zeros((n, C), bool)
    lo, hi = np.zeros((n, R), np.int64), np.zeros((n, R), np.int64)
    for i, t in enumerate(tiles):
        q_index[i], k_index[i] = t.rows[0], t.cols[0]
        q_index[i, : len(t.rows)], k_index[i, : len(t.cols)] = t.rows, t.cols
        q_live[i, : len(t.rows)], k_live[i, : len(t.cols)] = True, True
        if t.lo is not None and t.hi is not None:
            lo[i, : len(t.rows)], hi[i, : len(t.rows)] = t.lo, t.hi
    bias = None
    if tiles[0].lo is not None:
        col = np.arange(C)
        seen = torch.from_numpy((col >= lo[..., None]) & (col < hi[..., None]))
        bias = torch.zeros(n, 1, R, C, dtype=torch.float32, device="cpu").masked_fill_(~seen[:, None], -float("inf"))
    to = torch.from_numpy
    return TileBatch(
        n, R, C,
        to(q_index.ravel()), to(k_index.ravel()),
        to(np.flatnonzero(q_live)), to(np.flatnonzero(k_live)),
        to(q_rows), to(k_rows),
        bias, fresh_q, fresh_k and distinct, distinct,
    )  # fmt: skip
