"""Ordered sets of tokens as a few ranges, so that a million tokens cost a few numbers.

>>> tokens = TokenSet.of((0, 4, 1), (9, 15, 2))
>>> tokens.count, tokens.expand()
(7, array([ 0,  1,  2,  3,  9, 11, 13]))
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Range = tuple[int, int, int]  # (start, stop, stride), half-open
Spans = NDArray[np.int64]  # [n, 2] intervals (first, stop), ascending and disjoint


class TokenSet:
    """Tokens `start, start + stride, ...` below `stop` of each range, one range after the other.

    Immutable. The order is that of a buffer that holds them: `ascending` says whether it is the sequence's own. Build
    one with `of` or `from_array`, which join what can be joined, so that equal ranges compare equal.

    Attributes:
        ranges: int64 [n, 3] (start, stop, stride); each holds at least one token, and `stop` is the last one plus 1.
    """

    __slots__ = ("__dict__", "ranges")

    def __init__(self, ranges: NDArray[np.int64]) -> None:
        self.ranges = ranges
        ranges.setflags(write=False)

    @classmethod
    def of(cls, *ranges: Sequence[int]) -> "TokenSet":
        """Ranges (start, stop) or (start, stop, stride). ValueError for a stride below 1 or a negative start."""
        rows = [(r[0], r[1], r[2] if len(r) == 3 else 1) for r in ranges]
        for start, _, stride in rows:
            if start < 0 or stride < 1:
                raise ValueError(
                    f"range ({start}, ..., stride {stride}) needs a start of 0 or more and a stride of 1 or more"
                )
        return cls.from_array(np.array(rows, np.int64).reshape(-1, 3))

    @classmethod
    def from_array(cls, ranges: NDArray[np.int64]) -> "TokenSet":
        """int64 [n, 3] in canonical form: empty ranges left out, adjacent ones joined, stops tight."""
        start, stop, stride = ranges[:, 0], ranges[:, 1], ranges[:, 2]
        size = (stop - start + stride - 1) // stride
        keep = size > 0
        if not keep.all():
            start, stride, size = start[keep], stride[keep], size[keep]
        stride = np.where(size == 1, 1, stride)
        last = start + (size - 1) * stride
        if len(start) > 1:
            joined = (stride[1:] == stride[:-1]) & (start[1:] == last[:-1] + stride[1:])
            if joined.any():
                first = np.flatnonzero(np.concatenate([[True], ~joined]))
                start, stride = start[first], stride[first]
                last = last[np.concatenate([first[1:] - 1, [len(last) - 1]])]
        return cls(np.stack([start, last + 1, stride], 1))

    @classmethod
    def concatenate(cls, parts: Iterable["TokenSet"]) -> "TokenSet":
        """One set's tokens after the other's."""
        ranges = [part.ranges for part in parts]
        return cls.from_array(np.concatenate(ranges)) if ranges else EMPTY

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """int64 [n]: tokens of each range."""
        return (self.ranges[:, 1] - self.ranges[:, 0] + self.ranges[:, 2] - 1) // self.ranges[:, 2]

    @cached_property
    def count(self) -> int:
        """Number of tokens."""
        return int(self.sizes.sum())

    @cached_property
    def ascending(self) -> bool:
        """Whether the tokens stand in the sequence's order, which attention needs."""
        return bool((self.ranges[1:, 0] >= self.ranges[:-1, 1]).all())

    @cached_property
    def key(self) -> bytes:
        """Equal for equal sets: the name under which masks and table entries are kept."""
        return self.ranges.tobytes()

    def expand(self) -> NDArray[np.int64]:
        """int64 [count], read-only: every token, in order."""
        return self._expanded

    @cached_property
    def _expanded(self) -> NDArray[np.int64]:
        if len(self.ranges) == 1:
            tokens = np.arange(*self.ranges[0])
        else:
            first = np.cumsum(self.sizes) - self.sizes
            within = np.arange(self.count) - np.repeat(first, self.sizes)
            tokens = np.repeat(self.ranges[:, 0], self.sizes) + within * np.repeat(self.ranges[:, 2], self.sizes)
        tokens.setflags(write=False)
        return tokens

    def clip(self, spans: Spans) -> "TokenSet":
        """The tokens that lie in `spans`, in this set's order. The set must be ascending."""
        if len(spans) == 0 or self.count == 0:
            return EMPTY
        start, stop, stride = self.ranges.T
        low = np.searchsorted(spans[:, 1], start, side="right")  # first span that ends after the range's start
        high = np.searchsorted(spans[:, 0], stop, side="left")
        pieces = np.maximum(high - low, 0)
        row = np.repeat(np.arange(len(start)), pieces)
        span = np.repeat(low, pieces) + np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        behind = np.maximum(spans[span, 0] - start[row], 0)
        begin = start[row] + (behind + stride[row] - 1) // stride[row] * stride[row]
        return TokenSet.from_array(np.stack([begin, np.minimum(stop[row], spans[span, 1]), stride[row]], 1))

    def shift(self, by: int) -> "TokenSet":
        """The tokens `by` places further on."""
        return TokenSet(self.ranges + np.array([by, by, 0])) if by else self

    def cut(self, first: int, stop: int) -> "TokenSet":
        """Tokens number `first` to `stop` (half-open) of the set."""
        before = np.cumsum(self.sizes) - self.sizes
        low = np.clip(first - before, 0, self.sizes)
        high = np.clip(stop - before, 0, self.sizes)
        start, stride = self.ranges[:, 0], self.ranges[:, 2]
        return TokenSet.from_array(np.stack([start + low * stride, start + high * stride, stride], 1))

    def tuples(self) -> tuple[Range, ...]:
        """The ranges as plain tuples (start, stop, stride)."""
        return tuple((a, b, c) for a, b, c in self.ranges.tolist())

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, TokenSet) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        shown = ", ".join(f"{a}:{b}" + (f":{c}" if c > 1 else "") for a, b, c in self.ranges[:6].tolist())
        return f"TokenSet({shown}{', ...' if len(self.ranges) > 6 else ''}; {self.count} tokens)"


EMPTY = TokenSet(np.zeros((0, 3), np.int64))
EMPTY_SPANS: Spans = np.zeros((0, 2), np.int64)


def join_spans(spans: Spans) -> Spans:
    """Intervals in any order, overlapping or not, as ascending disjoint ones; empty ones left out."""
    spans = spans[spans[:, 1] > spans[:, 0]]
    if len(spans) < 2:
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    fresh = np.concatenate([[True], spans[1:, 0] > reach[:-1]])
    first = np.flatnonzero(fresh)
    return np.stack([spans[first, 0], reach[np.concatenate([first[1:] - 1, [len(spans) - 1]])]], 1)


def union(parts: Iterable[TokenSet]) -> TokenSet:
    """The tokens of disjoint sets in the sequence's order."""
    ranges = np.concatenate([EMPTY.ranges, *(part.ranges for part in parts)])
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    if (ranges[1:, 0] >= ranges[:-1, 1]).all():
        return TokenSet.from_array(ranges)
    held = np.zeros(int(ranges[:, 1].max()) + 2, np.int8)  # interleaved strides: one mark per token, then its runs
    for start, stop, stride in ranges.tolist():
        held[start + 1 : stop + 1 : stride] = 1
    edges = np.flatnonzero(np.diff(held))
    starts, stops = edges[::2], edges[1::2]
    return TokenSet.from_array(np.stack([starts, stops, np.ones_like(starts)], 1))
