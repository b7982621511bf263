"""Who sees whom between sets of tokens, in closed form on their ranges: a mask over a packed batch, never its tokens.

`kernels.mask_spec` says who sees whom in one document, piece by piece. In a piece, keys and queries are held against
each other cell by cell: a cell is a document, or a chunk of one, cut to the piece's queries and to its keys. Padding
sees nothing and nobody sees it.

    >>> sight = Visibility(PackedLayout.from_lengths([4, 6]), MaskSpec())
    >>> sight.pairs(TokenSet.of((2, 7)), TokenSet.of((0, 10)))
    13
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.mask_spec import UNBOUNDED, BandPiece, MaskSpec
from parallel.plan.layout import PackedLayout
from parallel.plan.tokens import EMPTY, Spans, TokenSet, join_spans

Ints = NDArray[np.int64]


class Spaces(NamedTuple):
    """Ascending disjoint spaces of the buffer, some of them empty: documents, or a piece's queries or keys in each."""

    starts: Ints
    stops: Ints


class Segments(NamedTuple):
    """Parts of token ranges that lie in one space each: its number, first token, stride, number of tokens."""

    space: Ints
    start: Ints
    stride: Ints
    size: Ints

    @property
    def last(self) -> Ints:
        return self.start + (self.size - 1) * self.stride


class _Cells:
    """A piece of the mask over a layout: `queries` and `keys` are what the piece holds of each cell."""

    def __init__(self, documents: Spaces, piece: BandPiece) -> None:
        self.piece = piece
        cells, begin = documents, documents.starts
        if piece.chunk is not None:
            each = -(-(documents.stops - documents.starts) // piece.chunk)
            begin, end = (np.repeat(side, each) for side in documents)
            starts = begin + (np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)) * piece.chunk
            cells = Spaces(starts, np.minimum(starts + piece.chunk, end))
        self.queries = _cut_spaces(cells, begin, piece.q_start, piece.q_stop)
        self.keys = _cut_spaces(cells, begin, piece.k_start, piece.k_stop)


def _cut_spaces(spaces: Spaces, begin: Ints, first: int, stop: int) -> Spaces:
    """What of each space lies at positions [first, stop), counted from `begin`."""
    if first <= 0 and stop == UNBOUNDED:
        return spaces
    stops = np.minimum(spaces.stops, begin + stop).clip(min=spaces.starts)
    return Spaces(np.maximum(spaces.starts, begin + max(first, 0)).clip(max=stops), stops)


class Visibility:
    """The allowed (query, key) pairs of `mask` over `layout`. Answers about the same sets are kept."""

    def __init__(self, layout: PackedLayout, mask: MaskSpec) -> None:
        self.layout, self.mask = layout, mask
        self._spaces = Spaces(layout.starts, layout.stops)
        self._segments: dict[tuple[bytes, int], Segments] = {}
        self._reach: dict[tuple[bytes, bool], Spans] = {}
        self._edges: dict[bytes, tuple[Ints, Ints, Ints]] = {}

    @cached_property
    def _cells(self) -> list[list[_Cells]]:
        """Of each band, those of its pieces."""
        return [[_Cells(self._spaces, piece) for piece in band.pieces] for band in self.mask.bands]

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
        return self._cut(tokens, self._spaces)

    def _cut(self, tokens: TokenSet, spaces: Spaces) -> Segments:
        key = (tokens.key, id(spaces))
        found = self._segments.get(key)
        if found is None:
            found = self._segments[key] = _cut(tokens, spaces)
        return found

    def reach(self, tokens: TokenSet, as_queries: bool = True) -> Spans:
        """The keys that some query in `tokens` sees, as ascending spans; or the queries that see some key in it."""
        known = self._reach.get((tokens.key, as_queries))
        if known is not None:
            return known
        found = [self._piece_reach(cells, tokens, as_queries) for band in self._cells for cells in band]
        spans = join_spans(found[0] if len(found) == 1 else np.concatenate(found))
        self._reach[(tokens.key, as_queries)] = spans
        return spans

    def _piece_reach(self, cells: _Cells, tokens: TokenSet, as_queries: bool) -> Spans:
        """Spans in any order, perhaps empty ones among them."""
        piece = cells.piece
        before, after = (piece.before, piece.after) if as_queries else (piece.after, piece.before)
        here, there = (cells.queries, cells.keys) if as_queries else (cells.keys, cells.queries)
        parts = self._cut(tokens, here)
        gaps = parts.stride > before + after + 1  # here one span per token is exact, and one per segment is not
        if gaps.any():
            parts = _split(parts, gaps)
        low = np.maximum(parts.start - before, there.starts[parts.space])
        high = np.minimum(parts.last + after + 1, there.stops[parts.space])
        return np.stack([low, high], 1)

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
        if self.mask.plain:
            (qdoc, _, qlast), (kdoc, kfirst, _) = self._document_edges(queries), self._document_edges(keys)
            at = np.searchsorted(kdoc, qdoc).clip(max=max(len(kdoc) - 1, 0))
            return len(kdoc) > 0 and bool(((kdoc[at] == qdoc) & (kfirst[at] <= qlast)).any())
        return self.needed_keys(queries, keys).count > 0

    def any_of(self, queries: Sequence[TokenSet], keys: Sequence[TokenSet]) -> NDArray[np.bool_]:
        """[queries, keys]: `any` of each pair of ascending sets."""
        if not self.mask.plain:
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
            document, first = np.unique(parts.space, return_index=True)
            last = np.append(first, len(parts.space))[1:] - 1
            found = self._edges[tokens.key] = (document, parts.start[first], parts.last[last])
        return found

    def work(self, queries: TokenSet) -> int:
        """Allowed pairs between `queries` and all keys of the batch."""
        return self.pairs(queries, self.documents)

    def pairs(self, queries: TokenSet, keys: TokenSet) -> int:
        """Allowed pairs between two ascending sets."""
        return sum(self.band_pairs(queries, keys))

    def band_pairs(self, queries: TokenSet, keys: TokenSet) -> list[int]:
        """Allowed pairs of each band between two ascending sets, counted segment by segment."""
        return [sum(self._piece_pairs(cells, queries, keys) for cells in band) for band in self._cells]

    def _piece_pairs(self, cells: _Cells, queries: TokenSet, keys: TokenSet) -> int:
        q, k = self._cut(queries, cells.queries), self._cut(keys, cells.keys)
        low = np.searchsorted(k.space, q.space, side="left")
        high = np.searchsorted(k.space, q.space, side="right")
        each = high - low
        total = 0
        # blocks of queries bound the memory: a document cut in a thousand parts has a million pairs of segments
        for first, stop in _blocks(each, 1 << 20):
            n = each[first:stop]
            rows = np.repeat(np.arange(first, stop), n)
            cols = np.repeat(low[first:stop], n) + np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
            total += _segment_pairs(Segments(*(x[rows] for x in q)), Segments(*(x[cols] for x in k)), cells.piece)
        return total


def _segment_pairs(q: Segments, k: Segments, piece: BandPiece) -> int:
    """Pairs summed over rows of segments that share a cell."""
    before, after = piece.before, piece.after
    dense = k.stride == 1
    aligned = dense | (q.stride % k.stride == 0)
    if aligned.all():
        return _progression_pairs(q, k, before, after)
    # seen from the keys, the same pairs are a progression where the keys' stride is the multiple
    flipped = ~aligned & (k.stride % q.stride == 0)
    ragged = ~aligned & ~flipped
    total = _progression_pairs(_rows(q, aligned), _rows(k, aligned), before, after)
    total += _progression_pairs(_rows(k, flipped), _rows(q, flipped), after, before)
    for i in np.flatnonzero(ragged):
        single = _split(_rows(q, np.array([i])), np.array([True]))
        other = Segments(*(np.repeat(x[i], len(single.start)) for x in k))
        total += _progression_pairs(single, other, before, after)
    return total


def _progression_pairs(q: Segments, k: Segments, before: int, after: int) -> int:
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


def _cut(tokens: TokenSet, spaces: Spaces) -> Segments:
    """The parts of a set in each space, in the set's order."""
    start, stop, stride = tokens.ranges.T
    low = np.searchsorted(spaces.stops, start, side="right")
    high = np.searchsorted(spaces.starts, stop, side="left")
    n = np.maximum(high - low, 0)
    row = np.repeat(np.arange(len(start)), n)
    space = np.repeat(low, n) + np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
    behind = np.maximum(spaces.starts[space] - start[row], 0)
    first = start[row] + (behind + stride[row] - 1) // stride[row] * stride[row]
    size = (np.minimum(stop[row], spaces.stops[space]) - first + stride[row] - 1) // stride[row]
    keep = size > 0
    return Segments(space[keep], first[keep], stride[row][keep], size[keep])


def _split(parts: Segments, which: NDArray[np.bool_]) -> Segments:
    """The segments marked in `which` as one segment per token."""
    n = np.where(which, parts.size, 1)
    row = np.repeat(np.arange(len(n)), n)
    within = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
    alone = which[row]
    start = parts.start[row] + np.where(alone, within * parts.stride[row], 0)
    return Segments(parts.space[row], start, np.where(alone, 1, parts.stride[row]), np.where(alone, 1, parts.size[row]))


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
