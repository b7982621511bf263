"""Who sees whom, in closed form on token ranges: the mask of a packed batch without a list of its tokens.

A query at position p of a document sees the document's keys in [p - window + 1, p], and as far after it where the mask
is not causal. Padding sees nothing and nobody sees it.

    >>> sight = Visibility(PackedLayout.from_lengths([4, 6]), MaskSpec())
    >>> sight.pairs(TokenSet.of((2, 7)), TokenSet.of((0, 10)))
    13
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallel.plan.layout import PackedLayout
from parallel.plan.tokens import EMPTY, Spans, TokenSet, join_spans

Ints = NDArray[np.int64]
UNBOUNDED = 2**40  # a reach longer than any sequence


@dataclass(frozen=True)
class MaskSpec:
    """The mask inside a document: causal or not; `window` keeps a query's own position and window - 1 before it (and
    as many after it when not causal). ValueError for a window below 1."""

    causal: bool = True
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window={self.window} hides a query's own position; use at least 1, or None for no window"
            )

    @property
    def before(self) -> int:
        """Positions before its own that a query sees at most."""
        return UNBOUNDED if self.window is None else self.window - 1

    @property
    def after(self) -> int:
        """Positions after its own that a query sees at most."""
        return 0 if self.causal else self.before


class Segments(NamedTuple):
    """Parts of token ranges that lie in one document each: document, first token, stride, number of tokens."""

    document: Ints
    start: Ints
    stride: Ints
    size: Ints

    @property
    def last(self) -> Ints:
        return self.start + (self.size - 1) * self.stride


class Visibility:
    """The allowed (query, key) pairs of `mask` over `layout`. Answers about the same sets are kept."""

    def __init__(self, layout: PackedLayout, mask: MaskSpec) -> None:
        self.layout, self.mask = layout, mask
        self._segments: dict[bytes, Segments] = {}
        self._reach: dict[tuple[bytes, bool], Spans] = {}
        self._edges: dict[bytes, tuple[Ints, Ints, Ints]] = {}

    @cached_property
    def documents(self) -> TokenSet:
        """All tokens that are in a document: the layout without its padding."""
        spans = np.stack([self.layout.starts, self.layout.stops], 1)
        return TokenSet.of((0, self.layout.total_tokens)).clip(join_spans(spans))

    @cached_property
    def padding(self) -> Spans:
        """What no document holds, as ascending spans."""
        held = self.documents.ranges
        ends = np.zeros(1, np.int64), np.array([self.layout.total_tokens])
        gaps = np.stack([np.concatenate([ends[0], held[:, 1]]), np.concatenate([held[:, 0], ends[1]])], 1)
        return gaps[gaps[:, 1] > gaps[:, 0]]

    def segments(self, tokens: TokenSet) -> Segments:
        """`tokens` cut at the documents' ends, padding left out; in the set's order."""
        found = self._segments.get(tokens.key)
        if found is None:
            found = self._segments[tokens.key] = _cut(tokens, self.layout)
        return found

    def reach(self, tokens: TokenSet, as_queries: bool = True) -> Spans:
        """The keys that some query in `tokens` sees, as ascending spans; or the queries that see some key in it."""
        known = self._reach.get((tokens.key, as_queries))
        if known is not None:
            return known
        before, after = (self.mask.before, self.mask.after) if as_queries else (self.mask.after, self.mask.before)
        parts = self.segments(tokens)
        gaps = parts.stride > before + after + 1  # here one span per token is exact, and one per segment is not
        if gaps.any():
            parts = _split(parts, gaps)
        low = np.maximum(parts.start - before, self.layout.starts[parts.document])
        high = np.minimum(parts.last + after + 1, self.layout.stops[parts.document])
        spans = join_spans(np.stack([low, high], 1))
        self._reach[(tokens.key, as_queries)] = spans
        return spans

    def needed_keys(self, queries: TokenSet, keys: TokenSet) -> TokenSet:
        """Those of `keys`, in order, that some query in `queries` sees."""
        return keys.clip(self.reach(queries))

    def needed_queries(self, queries: TokenSet, keys: TokenSet) -> TokenSet:
        """Those of `queries`, in order, that see some key in `keys`."""
        return queries.clip(self.reach(keys, as_queries=False))

    def any(self, queries: TokenSet, keys: TokenSet) -> bool:
        """Whether some query in `queries` sees some key in `keys`."""
        if queries.count == 0 or keys.count == 0:
            return False
        if self.mask.window is None and self.mask.causal:
            (qdoc, _, qlast), (kdoc, kfirst, _) = self._document_edges(queries), self._document_edges(keys)
            at = np.searchsorted(kdoc, qdoc).clip(max=max(len(kdoc) - 1, 0))
            return len(kdoc) > 0 and bool(((kdoc[at] == qdoc) & (kfirst[at] <= qlast)).any())
        return self.needed_keys(queries, keys).count > 0

    def any_of(self, queries: Sequence[TokenSet], keys: Sequence[TokenSet]) -> NDArray[np.bool_]:
        """[queries, keys]: `any` of each pair of ascending sets."""
        if self.mask.window is not None or not self.mask.causal:
            return self._any_in_reach(queries, keys)
        first = np.full((len(keys), self.layout.num_documents), UNBOUNDED)
        last = np.full((len(queries), self.layout.num_documents), -1)
        for row, tokens in enumerate(keys):
            document, start, _ = self._document_edges(tokens)
            first[row, document] = start
        for row, tokens in enumerate(queries):
            document, _, stop = self._document_edges(tokens)
            last[row, document] = stop
        return np.array([(first <= row).any(1) for row in last], bool).reshape(len(queries), len(keys))

    def _any_in_reach(self, queries: Sequence[TokenSet], keys: Sequence[TokenSet]) -> NDArray[np.bool_]:
        """`any_of` under any mask: every range of every set of keys held against a set of queries' reach at once."""
        start, stop, stride = np.concatenate([EMPTY.ranges, *(k.ranges for k in keys)]).T
        owner = np.repeat(np.arange(len(keys)), [len(k.ranges) for k in keys])
        seen = np.zeros((len(queries), len(keys)), bool)
        for row, tokens in enumerate(queries):
            spans = self.reach(tokens)
            if len(spans) == 0:
                continue
            low = np.searchsorted(spans[:, 1], start, side="right")  # the first span that ends after the range's start
            at = low.clip(max=len(spans) - 1)
            meets = (low < len(spans)) & (spans[at, 0] < stop)
            first = start + np.maximum(spans[at, 0] - start + stride - 1, 0) // stride * stride
            sure = meets & (first < np.minimum(stop, spans[at, 1]))
            seen[row, owner[sure]] = True
            for column in np.unique(owner[meets & ~sure]).tolist():  # a stride may step over its first span
                seen[row, column] = seen[row, column] or keys[column].clip(spans).count > 0
        return seen

    def _document_edges(self, tokens: TokenSet) -> tuple[Ints, Ints, Ints]:
        """(documents, first token in each, last token in each) of an ascending set."""
        found = self._edges.get(tokens.key)
        if found is None:
            parts = self.segments(tokens)
            document, first = np.unique(parts.document, return_index=True)
            last = np.append(first, len(parts.document))[1:] - 1
            found = self._edges[tokens.key] = (document, parts.start[first], parts.last[last])
        return found

    def work(self, queries: TokenSet) -> int:
        """Allowed pairs between `queries` and all keys of the batch."""
        return self.pairs(queries, self.documents)

    def pairs(self, queries: TokenSet, keys: TokenSet) -> int:
        """Allowed pairs between two ascending sets, counted segment by segment."""
        q, k = self.segments(queries), self.segments(keys)
        low = np.searchsorted(k.document, q.document, side="left")
        high = np.searchsorted(k.document, q.document, side="right")
        each = high - low
        total = 0
        # blocks of queries bound the memory: a document cut in a thousand parts has a million pairs of segments
        for first, stop in _blocks(each, 1 << 20):
            n = each[first:stop]
            rows = np.repeat(np.arange(first, stop), n)
            cols = np.repeat(low[first:stop], n) + np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
            total += self._segment_pairs(Segments(*(x[rows] for x in q)), Segments(*(x[cols] for x in k)))
        return total

    def _segment_pairs(self, q: Segments, k: Segments) -> int:
        """Pairs summed over rows of segments that share a document."""
        dense = k.stride == 1
        aligned = dense | (q.stride % k.stride == 0)
        if not aligned.all():
            # seen from the keys, the same pairs are a progression where the keys' stride is the multiple
            flipped = ~aligned & (k.stride % q.stride == 0)
            ragged = ~aligned & ~flipped
            total = self._progression_pairs(_rows(q, aligned), _rows(k, aligned), self.mask.before, self.mask.after)
            total += self._progression_pairs(_rows(k, flipped), _rows(q, flipped), self.mask.after, self.mask.before)
            for i in np.flatnonzero(ragged):
                single = _split(_rows(q, np.array([i])), np.array([True]))
                other = Segments(*(np.repeat(x[i], len(single.start)) for x in k))
                total += self._progression_pairs(single, other, self.mask.before, self.mask.after)
            return total
        return self._progression_pairs(q, k, self.mask.before, self.mask.after)

    def _progression_pairs(self, q: Segments, k: Segments, before: int, after: int) -> int:
        """Pairs with q - before <= k <= q + after, where each q's stride is a multiple of its k's."""
        upto = _count_upto(q, k, after)
        if before < UNBOUNDED:
            upto = upto - _count_upto(q, k, -before - 1)
        return int(upto.sum())


def _count_upto(q: Segments, k: Segments, shift: int) -> Ints:
    """For each row, the pairs with k <= q + shift: a sum of clip(base + i * slope, 0, k.size) over i < q.size."""
    base = (q.start + shift - k.start) // k.stride + 1
    slope = np.maximum(q.stride // k.stride, 1)  # 0 only where q is a single token, whose slope does not matter
    begin = np.clip((-base) // slope + 1, 0, q.size)  # the first i with a count above 0
    end = np.clip(-((base - k.size) // slope), begin, q.size)  # the first i that counts all of k
    n = end - begin
    return n * base + slope * ((begin + end - 1) * n // 2) + (q.size - end) * k.size


def _cut(tokens: TokenSet, layout: PackedLayout) -> Segments:
    start, stop, stride = tokens.ranges.T
    low = np.searchsorted(layout.stops, start, side="right")
    high = np.searchsorted(layout.starts, stop, side="left")
    n = np.maximum(high - low, 0)
    row = np.repeat(np.arange(len(start)), n)
    document = np.repeat(low, n) + np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
    behind = np.maximum(layout.starts[document] - start[row], 0)
    first = start[row] + (behind + stride[row] - 1) // stride[row] * stride[row]
    size = (np.minimum(stop[row], layout.stops[document]) - first + stride[row] - 1) // stride[row]
    keep = size > 0
    return Segments(document[keep], first[keep], stride[row][keep], size[keep])


def _split(parts: Segments, which: NDArray[np.bool_]) -> Segments:
    """The segments marked in `which` as one segment per token."""
    n = np.where(which, parts.size, 1)
    row = np.repeat(np.arange(len(n)), n)
    within = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
    alone = which[row]
    start = parts.start[row] + np.where(alone, within * parts.stride[row], 0)
    return Segments(
        parts.document[row], start, np.where(alone, 1, parts.stride[row]), np.where(alone, 1, parts.size[row])
    )


def _rows(parts: Segments, which: NDArray[np.bool_] | Ints) -> Segments:
    return Segments(*(x[which] for x in parts))


def _blocks(each: Ints, limit: int) -> list[tuple[int, int]]:
    """Index ranges whose entries sum to about `limit` at most."""
    ends = np.cumsum(each)
    if len(each) == 0 or ends[-1] <= limit:
        return [(0, len(each))]
    marks = np.searchsorted(ends, np.arange(limit, ends[-1] + limit, limit)).clip(max=len(each))
    cuts = np.unique(np.concatenate([[0], marks, [len(each)]]))
    return list(zip(cuts[:-1].tolist(), cuts[1:].tolist()))
