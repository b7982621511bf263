"""The mask language of every kernel: for each query one contiguous interval of keys, with ends that never decrease.

Causal, full, sliding-window and document masks between two position-sorted blocks of one sequence all have this form
(a staircase band); a mask that does not (first keys beside a window, a tree) is a list of disjoint bands.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int32
from torch import Tensor

from kernels.arguments import (
    Indices,
    check_count,
    check_device,
    check_ends,
    check_flag,
    check_window,
    document_ranges,
    index_tensor,
    total_of,
)
from kernels.mask_spec import UNBOUNDED, Band, BandPiece, MaskSpec

_OWNER = "_interval_mask"


class _Owner(weakref.ref["IntervalMask"]):
    """A tensor's way back to its mask. A copy of the tensor belongs to no mask."""

    def __reduce__(self) -> tuple[type, tuple]:
        return type(None), ()

    def __deepcopy__(self, memo: dict) -> None:
        return None


class IntervalMask:
    """Query i sees keys `k_start[i] <= j < k_end[i]`; key j is seen by queries `q_start[j] <= i < q_end[j]`.

    Four int32 tensors describe one mask from both sides, `k_start, k_end` [Tq] and `q_start, q_end` [Tk], half-open,
    each never decreasing. An empty interval has `k_end == k_start` (any position that keeps the order).

    The arrays must not be written to afterwards: plans that depend on the mask alone are kept on the object.

    Raises:
        ValueError: wrong dtype, rank or device; and, on CPU tensors, an end below its start, a decreasing array, an
            interval that leaves [0, Tk] or [0, Tq], or two sides that describe different masks.
    """

    def __init__(
        self,
        k_start: Int32[Tensor, " Tq"],
        k_end: Int32[Tensor, " Tq"],
        q_start: Int32[Tensor, " Tk"],
        q_end: Int32[Tensor, " Tk"],
    ) -> None:
        sides = {"k_start": k_start, "k_end": k_end, "q_start": q_start, "q_end": q_end}
        for name, side in sides.items():
            check_ends(name, side)
        self.k_start, self.k_end, self.q_start, self.q_end = (x.contiguous() for x in sides.values())
        self.cache: dict[Any, Any] = {}
        _validate_form(self)
        if self.device.type == "cpu":
            _validate_values(self)
        setattr(self.k_start, _OWNER, _Owner(self))

    @property
    def sides(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """k_start, k_end, q_start, q_end."""
        return self.k_start, self.k_end, self.q_start, self.q_end

    @classmethod
    def of_sides(cls, k_start: Tensor, k_end: Tensor, q_start: Tensor, q_end: Tensor) -> IntervalMask:
        """The living mask whose `sides` these very tensors are, with its cache; a new one where there is none."""
        owner = getattr(k_start, _OWNER, None)
        mask = None if owner is None else owner()
        if mask is not None and all(a is b for a, b in zip(mask.sides, (k_start, k_end, q_start, q_end))):
            return mask
        return cls(k_start, k_end, q_start, q_end)

    @property
    def Tq(self) -> int:
        """Number of queries that the mask covers."""
        return self.k_start.shape[0]

    @property
    def Tk(self) -> int:
        """Number of keys that the mask covers."""
        return self.q_start.shape[0]

    @property
    def device(self) -> torch.device:
        return self.k_start.device

    def __repr__(self) -> str:
        return f"IntervalMask(Tq={self.Tq}, Tk={self.Tk}, device={self.device})"

    def pairs(self) -> int:
        """Number of allowed (query, key) pairs, as a host integer (waits for the device once)."""
        if "pairs" not in self.cache:
            self.cache["pairs"] = int((self.k_end.long() - self.k_start.long()).sum())
        return self.cache["pairs"]

    def has_gaps(self) -> bool:
        """Whether some query sees no key or some key is seen by no query; such tokens may hold NaN and need care.

        Found on CPU masks and remembered by their copies on a device; known of masks that are built on a device from
        documents on the host. Any other mask on a device counts as having gaps, since looking would wait for it.
        """
        if "gaps" not in self.cache:
            blind = self.device.type != "cpu" or bool((self.k_start == self.k_end).any())
            self.cache["gaps"] = blind or bool((self.q_start == self.q_end).any())
        return self.cache["gaps"]

    def to(self, device: torch.device | str) -> IntervalMask:
        """The same mask on `device` (itself if it is there already)."""
        device = check_device("device", device)
        if device.type == self.device.type and device.index in (None, self.device.index):
            return self
        key = ("to", str(device))
        if key not in self.cache:
            sides = (self.k_start, self.k_end, self.q_start, self.q_end)
            self.cache[key] = IntervalMask(*(x.to(device) for x in sides))
            self.cache[key].cache["gaps"] = self.has_gaps()
        return self.cache[key]

    @classmethod
    def from_rows(cls, k_start: Int32[Tensor, " Tq"], k_end: Int32[Tensor, " Tq"], Tk: int) -> IntervalMask:
        """The mask whose query side is given; the key side is derived on the same device, without a host sync."""
        check_ends("k_start", k_start)
        check_ends("k_end", k_end)
        check_count("Tk", Tk)
        keys = torch.arange(Tk, dtype=torch.int32, device=k_start.device)
        q_start = torch.searchsorted(k_end.contiguous(), keys, right=True, out_int32=True)
        q_stop = torch.searchsorted(k_start.contiguous(), keys, right=True, out_int32=True)
        return cls(k_start, k_end, q_start, torch.maximum(q_start, q_stop))

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens_q: Indices,
        cu_seqlens_k: Indices | None = None,
        causal: bool = True,
        window: int | tuple[int, int] | None = None,
        device: torch.device | str | None = None,
        total_q: int | None = None,
        total_k: int | None = None,
    ) -> IntervalMask:
        """Documents laid end to end, given by cumulative lengths `[0, n0, n0 + n1, ...]` of queries (and of keys).

        A document with different numbers of queries and keys aligns bottom-right: its last query stands at its last
        key, so a causal document with more queries than keys begins with queries that see nothing.

        Args:
            cu_seqlens_q, cu_seqlens_k: lists or int32/int64 tensors of the same length; keys default to the queries'.
            causal: a query sees no key after its own position.
            window: `w` keeps a query's own position and the w - 1 before it, and as many after it when not causal;
                `(left, right)` keeps that many before and after, -1 meaning all (causal makes right 0).
            device: where the mask lives; by default where `cu_seqlens_q` does (CPU for lists).
            total_q, total_k: tokens in the buffers; those after the last document see nothing. They are needed when
                cu_seqlens is a tensor on an accelerator, since reading its last entry would wait for the device.

        Raises:
            ValueError: cu_seqlens that do not start at 0, decrease or pass 2**31 - 1 (checked on lists and CPU
                tensors), lists of different lengths, a window below 1, or totals missing or too small.
        """
        band = _band(causal, window)
        for name, total in (("total_q", total_q), ("total_k", total_k)):
            if total is not None:
                check_count(name, total)
        cu_q = index_tensor("cu_seqlens_q", cu_seqlens_q)
        cu_k = cu_q if cu_seqlens_k is None else index_tensor("cu_seqlens_k", cu_seqlens_k)
        if cu_q.shape != cu_k.shape:
            raise ValueError(
                f"cu_seqlens_q describes {cu_q.shape[0] - 1} documents and cu_seqlens_k {cu_k.shape[0] - 1}; "
                "give both an entry per document, repeating the previous entry where a document is empty"
            )
        Tq = total_of("cu_seqlens_q", "total_q", cu_q, total_q)
        Tk = total_of("cu_seqlens_k", "total_k", cu_k, Tq if cu_seqlens_k is None and total_k is None else total_k)
        gaps = _gaps_of_lengths(cu_q, cu_k, Tq, Tk, band)
        device = cu_q.device if device is None else check_device("device", device)
        cu_q, cu_k = (cu.to(device, non_blocking=True) for cu in (cu_q, cu_k))
        row = torch.arange(Tq, device=device)
        doc = torch.searchsorted(cu_q, row, right=True) - 1
        inside = doc < cu_q.shape[0] - 1
        doc = doc.clamp_(max=max(cu_q.shape[0] - 2, 0))
        after = (doc + 1).clamp_(max=cu_q.shape[0] - 1)
        first, length = cu_k[doc], cu_k[after] - cu_k[doc]
        lo, hi = band.keys(row - cu_q[after] + length, length)  # at its place among its document's keys
        lo, hi = (torch.where(inside, first + x, cu_k[-1]).int() for x in (lo, hi))
        return cls.from_rows(lo, hi, Tk).knowing(gaps)

    @classmethod
    def from_documents(
        cls,
        starts: Indices,
        stops: Indices,
        total: int,
        causal: bool = True,
        window: int | tuple[int, int] | None = None,
        device: torch.device | str | None = None,
    ) -> IntervalMask:
        """Documents `[starts[i], stops[i])` in a buffer of `total` tokens, the same one for queries and keys.

        They must be sorted and disjoint. Tokens between them (padding) see nothing and nobody sees them.
        `causal` and `window` as in `from_cu_seqlens`.

        Raises:
            ValueError: documents that overlap, end before they start or leave the buffer (lists and CPU tensors).
        """
        (mask,) = _document_masks((_band(causal, window),), starts, stops, total, device)
        return mask

    @classmethod
    def from_positions(
        cls,
        q_positions: Indices,
        k_positions: Indices,
        starts: Indices,
        stops: Indices,
        causal: bool = True,
        window: int | tuple[int, int] | None = None,
        device: torch.device | str | None = None,
    ) -> IntervalMask:
        """Any sorted choice of queries against any sorted choice of keys of one global sequence.

        Positions are global token indices, strictly increasing; documents `[starts[i], stops[i])` are global too. A
        window counts global positions, so this is the mask between two shards of a split sequence. `causal` and
        `window` as in `from_cu_seqlens`.

        Raises:
            ValueError: positions that do not increase, or bad documents (lists and CPU tensors).
        """
        (mask,) = _position_masks((_band(causal, window),), q_positions, k_positions, starts, stops, device)
        return mask

    def knowing(self, gaps: bool | None) -> IntervalMask:
        """Itself, told what `has_gaps` would have to look for on a device (None: it is not known)."""
        if gaps is not None:
            self.cache["gaps"] = gaps
        return self


def document_masks(
    spec: MaskSpec, starts: Indices, stops: Indices, total: int, device: torch.device | str | None = None
) -> tuple[IntervalMask, ...]:
    """The bands of `spec` inside documents `[starts[i], stops[i])` of a buffer of `total` tokens; as `from_documents`.

    Raises:
        ValueError: documents that overlap, end before they start or leave the buffer (lists and CPU tensors).
    """
    check_spec(spec)
    return _document_masks(spec.bands, starts, stops, total, device)


def _document_masks(
    bands: Sequence[Band], starts: Indices, stops: Indices, total: int, device: torch.device | str | None
) -> tuple[IntervalMask, ...]:
    check_count("total", total)
    begin, end = document_ranges(starts, stops)
    gaps = None
    if end.device.type == "cpu":
        if end.numel() and int(end[-1]) > total:
            raise ValueError(f"the last document stops at {int(end[-1])}, beyond the {total} tokens of the buffer")
        gaps = int((end - begin).sum()) < total  # in the first band each token of a document sees itself
    device = begin.device if device is None else check_device("device", device)
    tokens = torch.arange(total, device=device)
    first, *others = _between(bands, tokens, tokens, begin.to(device), end.to(device))
    return (first.knowing(gaps), *others)


def position_masks(
    spec: MaskSpec,
    q_positions: Indices,
    k_positions: Indices,
    starts: Indices,
    stops: Indices,
    device: torch.device | str | None = None,
) -> tuple[IntervalMask, ...]:
    """The bands of `spec` between two sorted choices of tokens of one global sequence; as `from_positions`.

    Raises:
        ValueError: positions that do not increase, or bad documents (lists and CPU tensors).
    """
    check_spec(spec)
    return _position_masks(spec.bands, q_positions, k_positions, starts, stops, device)


def _position_masks(
    bands: Sequence[Band],
    q_positions: Indices,
    k_positions: Indices,
    starts: Indices,
    stops: Indices,
    device: torch.device | str | None,
) -> tuple[IntervalMask, ...]:
    begin, end = document_ranges(starts, stops)
    q_at, k_at = index_tensor("q_positions", q_positions), index_tensor("k_positions", k_positions)
    for name, at in (("q_positions", q_at), ("k_positions", k_at)):
        if at.device.type == "cpu" and at.numel() > 1 and not bool((at[1:] > at[:-1]).all()):
            i = int((at[1:] <= at[:-1]).nonzero()[0])
            raise ValueError(f"{name} must increase, but entry {i} is {int(at[i])} and the next {int(at[i + 1])}")
    device = q_at.device if device is None else check_device("device", device)
    if all(x.device.type == "cpu" for x in (q_at, k_at, begin, end)):  # made where gaps can be seen, and moved
        return tuple(mask.to(device) for mask in _between(bands, q_at, k_at, begin, end))
    return _between(bands, *(x.to(device) for x in (q_at, k_at, begin, end)))


def _between(
    bands: Sequence[Band], q_at: Tensor, k_at: Tensor, starts: Tensor, stops: Tensor
) -> tuple[IntervalMask, ...]:
    """The masks of global positions q_at against k_at within documents, one for each band."""
    if starts.numel() == 0:
        nothing = torch.zeros(q_at.shape[0], dtype=torch.int32, device=q_at.device)
        return tuple(IntervalMask.from_rows(nothing, nothing, k_at.shape[0]) for _ in bands)
    doc = torch.searchsorted(stops, q_at, right=True)
    inside = doc < stops.shape[0]
    doc = doc.clamp(max=stops.shape[0] - 1)
    first = starts[doc]
    inside &= first <= q_at
    place, length = q_at - first, stops[doc] - first
    masks = []
    for band in bands:
        sides = (torch.where(inside, first + x, q_at) for x in band.keys(place, length))
        k_start, k_end = (torch.searchsorted(k_at, x, out_int32=True) for x in sides)
        masks.append(IntervalMask.from_rows(k_start, k_end, k_at.shape[0]))
    return tuple(masks)


def require_disjoint(masks: Sequence[IntervalMask]) -> None:
    """Raise ValueError, naming the first query, if two bands of one mask share a (query, key) pair."""
    key = ("disjoint", tuple(id(m) for m in masks))
    if len(masks) < 2 or key in masks[0].cache:
        return
    for b, second in enumerate(masks):
        for a, first in enumerate(masks[:b]):
            n = min(first.Tq, second.Tq)
            lo = torch.maximum(first.k_start[:n], second.k_start[:n])
            both = lo < torch.minimum(first.k_end[:n], second.k_end[:n])
            if bool(both.any()):
                i = int(both.nonzero()[0])
                raise ValueError(
                    f"bands {a} and {b} overlap, first at query {i}: both contain key {int(lo[i])}; "
                    "a pair in two bands would count twice, so cut one of them"
                )
    masks[0].cache[key] = tuple(masks[1:])  # holding the others keeps their ids from being reused


def check_spec(spec: Any) -> None:
    """Raise ValueError unless `spec` is a MaskSpec."""
    if not isinstance(spec, MaskSpec):
        raise ValueError(f"spec must be a MaskSpec, not {type(spec).__name__}; MaskSpec() is causal")


def _band(causal: bool, window: int | tuple[int, int] | None) -> Band:
    """The band of a causal or full mask under a window, which may have two sides (-1: all)."""
    check_flag("causal", causal)
    check_window("window", window)
    if not isinstance(window, tuple):
        return MaskSpec(causal, window).bands[0]
    left, right = (operator.index(side) for side in window)
    if min(left, right) < -1:
        raise ValueError(f"window {window} has a side below -1; use -1 for an unbounded side")
    left, right = (UNBOUNDED if side == -1 else min(side, UNBOUNDED) for side in (left, right))
    return Band((BandPiece(left, 0 if causal else right),))


def _gaps_of_lengths(cu_q: Tensor, cu_k: Tensor, Tq: int, Tk: int, band: Band) -> bool | None:
    """Whether some token of the buffers sees nothing or is not seen, from lengths on the host; None: not known."""
    if cu_q.device.type != "cpu" or cu_k.device.type != "cpu":
        return None
    queries, keys = cu_q.diff(), cu_k.diff()
    (piece,) = band.pieces
    first = keys - queries  # where a document's first query stands among its keys
    blind = (queries > 0) & ((keys == 0) | (first + piece.after < 0))
    unseen = (keys > 0) & ((queries == 0) | (first - piece.before > 0))
    return int(cu_q[-1]) < Tq or int(cu_k[-1]) < Tk or bool((blind | unseen).any())


def _validate_form(mask: IntervalMask) -> None:
    for name in ("k_start", "k_end", "q_start", "q_end"):
        device = getattr(mask, name).device
        if device != mask.device:
            raise ValueError(f"{name} must be on {mask.device} as k_start is, not on {device}; move it there")
    if mask.k_start.shape != mask.k_end.shape or mask.q_start.shape != mask.q_end.shape:
        raise ValueError(
            f"starts and ends differ in length: k_start {mask.k_start.shape[0]}, k_end {mask.k_end.shape[0]}, "
            f"q_start {mask.q_start.shape[0]}, q_end {mask.q_end.shape[0]}"
        )


def _validate_values(mask: IntervalMask) -> None:
    for side, start, end, limit in (
        ("k", mask.k_start, mask.k_end, mask.Tk),
        ("q", mask.q_start, mask.q_end, mask.Tq),
    ):
        for name, x in ((f"{side}_start", start), (f"{side}_end", end)):
            if x.numel() and (int(x[0]) < 0 or int(x[-1]) > limit or bool((x[1:] < x[:-1]).any())):
                raise ValueError(
                    f"{name} must never decrease and stay within 0..{limit}; it runs from {int(x.min())} to "
                    f"{int(x.max())}; sort tokens by position"
                )
        if bool((end < start).any()):
            i = int((end < start).nonzero()[0])
            raise ValueError(f"{side}_end[{i}] = {int(end[i])} is below {side}_start[{i}] = {int(start[i])}")
    seen = int((mask.k_end.long() - mask.k_start.long()).sum()), int((mask.q_end.long() - mask.q_start.long()).sum())
    if seen[0] != seen[1]:
        raise ValueError(
            f"the query side allows {seen[0]} pairs and the key side {seen[1]}; "
            "build the key side with IntervalMask.from_rows"
        )
    mask.cache["pairs"] = seen[0]
