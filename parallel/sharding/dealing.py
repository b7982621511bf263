"""Documents dealt to ranks: whole where they fit, else cut for as few ranks as can carry them; tokens made equal."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import fsum, sqrt
from typing import NamedTuple

import numpy as np

from parallel.sharding.search import BytesCost, equalise
from parallel.sharding.shares import Shares, Span, join

CARRIED = 0.95  # of a rank's limit of work, what a part of a long document may take
BUNDLES = 32  # of a rank's tokens: documents shorter than that part are dealt several at a time
FULL = 0.9  # of a rank's tokens


class DocumentPart(NamedTuple):
    """Spans of one document for one rank."""

    work: float
    tokens: int
    document: int
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, document: int, spans: Iterable[Span]) -> "DocumentPart":
        spans = tuple(spans)
        work = sum((hi - lo) * (lo + hi + 1) / 2 for lo, hi in spans)
        return cls(work, sum(hi - lo for lo, hi in spans), document, spans)

    @classmethod
    def whole(cls, document: int, lo: int, hi: int) -> "DocumentPart":
        return cls((hi - lo) * (lo + hi + 1) / 2, hi - lo, document, ((lo, hi),))


def _cut(
    document: int, lo: int, hi: int, ranks: int, tokens: int, limit: float, full: float, carried: float
) -> list[DocumentPart]:
    """A span whole, or for as few ranks as can carry it: of equal work one after the other, or, where the first of
    these holds more than `full` of a rank's tokens, as a zigzag."""
    whole, length = DocumentPart.whole(document, lo, hi), hi - lo
    if whole.work <= limit and length <= tokens:
        return [whole]
    n = min(ranks, length, max(-(-length // max(tokens, 1)), int(-(-whole.work // (limit * carried)))))
    cuts = [round(sqrt(lo * lo + (hi * hi - lo * lo) * (i / n))) for i in range(n + 1)]
    if cuts[1] - lo <= full * tokens:
        return [DocumentPart.of(document, [span]) for span in pairwise(cuts) if span[0] < span[1]]
    edges = [lo + i * length // (2 * n) for i in range(2 * n + 1)]
    pairs = [[(edges[i], edges[i + 1]), (edges[2 * n - 1 - i], edges[2 * n - i])] for i in range(n)]
    pairs[-1] = [(edges[n - 1], edges[n + 1])]
    return [DocumentPart.of(document, [span for span in pair if span[0] < span[1]]) for pair in pairs]


def _bundles(parts: Sequence[DocumentPart], most: int) -> Iterable[Sequence[DocumentPart]]:
    """Parts as they come, short ones that follow one another together up to `most` tokens."""
    bundle: list[DocumentPart] = []
    room = most
    for part in parts:
        if bundle and part.tokens > room:
            yield bundle
            bundle, room = [], most
        bundle.append(part)
        room -= part.tokens
    if bundle:
        yield bundle


def deal(
    shares: Shares,
    ranks: Sequence[int],
    spans: Iterable[tuple[int, int, int]],
    padding: int,
    limit: float,
    full: float = FULL,
    carried: float = CARRIED,
) -> None:
    """Deal spans (document, first, stop) and padding to `ranks`, whose tokens they are: cut where they are too much for
    one, the heaviest first, to the rank with the least work that has room; then tokens are made equal."""
    chosen = slice(ranks[0], ranks[-1] + 1)
    want, tokens = np.array(shares.want[chosen]), np.zeros(len(ranks))
    parts = [part for span in spans for part in _cut(*span, len(want), int(want.min()), limit, full, carried)]
    parts.sort(key=lambda part: (-part.work, part.document, part.spans))
    for bundle in _bundles(parts, int(want.min()) // BUNDLES):
        held, more = shares.work[chosen], fsum(part.work for part in bundle)
        badness = (np.maximum(held + more - limit, 0) + 0.2 * held) / limit
        more = sum(part.tokens for part in bundle)
        badness += np.maximum(tokens + more - want, 0) / (2 * want.max())
        for part in bundle:
            badness[shares.end[chosen, part.document] > 0] += 10  # each part of a document to a rank of its own
        rank = int(badness.argmin())
        tokens[rank] += more
        for part in bundle:
            before = shares.held[ranks[rank]].get(part.document)
            shares.put(ranks[rank], part.document, join((*before, *part.spans)) if before else part.spans)
    for rank, held in zip(ranks, tokens.astype(np.int64).tolist()):
        room = min(padding, max(0, shares.want[rank] - held))
        if room:
            shares.put(rank, shares.padding, ((0, room),))
        padding -= room
    equalise(shares, BytesCost(max(sum(shares.want) / 16, float(shares.received.max())), limit), ranks)


def in_order(shares: Shares) -> Shares:
    """Each rank the next tokens of the documents, as they come; padding where it comes."""
    new = Shares(shares.lengths, shares.want, shares.short)
    rank, room = 0, shares.want[0]
    padding = sum(shares.want) - sum(shares.lengths)
    for document, length in (*enumerate(shares.lengths), (shares.padding, padding)):
        lo = 0
        while lo < length:
            while room == 0:
                rank += 1
                room = shares.want[rank]
            hi = min(length, lo + room)
            new.put(rank, document, ((0, hi - lo) if document == shares.padding else (lo, hi),))
            room -= hi - lo
            lo = hi
    return new
