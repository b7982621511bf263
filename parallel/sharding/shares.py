"""Shares: which spans of which documents each rank holds, with running sums of tokens, work and keys received.

A rank needs every key of a document before the end of its own last span of it, and receives those that it does not
hold: `end - held`. Padding is a document of its own kind, without work or keys, of which only counts are kept.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Span = tuple[int, int]  # half-open, in positions of its document
DOC, LO, HI, END, AFTER, LAST, REAL = range(7)  # columns of `Shares.rows`


class Shares:
    """Mutable; the sums are kept as spans move. Work is in allowed pairs, plus `short` x keys of a span's last row.

    Attributes:
        lengths: tokens of each document; document number len(lengths) is the padding.
        want: tokens that each rank must hold in the end.
        held: for each rank, its ascending spans of each document that it has a part of.
        end: float64 [ranks, documents + 1], one past the last token of a document that a rank holds; 0 for none.
        work, received: float64 [ranks].
        tokens: for each rank.
    """

    def __init__(self, lengths: Sequence[int], want: Sequence[int], short: float = 0.0) -> None:
        self.lengths, self.want, self.short = list(lengths), list(want), short
        self.padding = len(self.lengths)
        ranks = len(self.want)
        self.held: list[dict[int, tuple[Span, ...]]] = [{} for _ in range(ranks)]
        self.end = np.zeros((ranks, self.padding + 1))
        self.work, self.received = np.zeros(ranks), np.zeros(ranks)
        self.tokens = [0] * ranks
        self._rows: list[Floats | None] = [None] * ranks

    def copy(self) -> "Shares":
        other = Shares((), ())
        other.take_from(self)
        return other

    def take_from(self, other: "Shares") -> None:
        """Become a copy of `other`."""
        self.lengths, self.want, self.short, self.padding = other.lengths, other.want, other.short, other.padding
        self.held = [dict(documents) for documents in other.held]
        self.end, self.work, self.received = other.end.copy(), other.work.copy(), other.received.copy()
        self.tokens, self._rows = list(other.tokens), list(other._rows)

    def seated(self, order: Sequence[int]) -> "Shares":
        """The same shares on other ranks: rank r gets those of rank order[r]."""
        other = self.copy()
        other.want, other.tokens = [self.want[i] for i in order], [self.tokens[i] for i in order]
        other.held, other._rows = [other.held[i] for i in order], [self._rows[i] for i in order]
        chosen = np.array(order)
        other.end, other.work, other.received = self.end[chosen], self.work[chosen], self.received[chosen]
        return other

    def put(self, rank: int, document: int, spans: tuple[Span, ...]) -> None:
        """Make `spans`, ascending and apart, what `rank` holds of `document`."""
        before = self.held[rank].pop(document, None)
        if before:
            self._count(rank, document, before, -1)
        self._count(rank, document, spans, 1)
        if spans:
            self.held[rank][document] = spans
        self.end[rank, document] = spans[-1][1] if spans and document != self.padding else 0
        self._rows[rank] = None

    def _count(self, rank: int, document: int, spans: tuple[Span, ...], sign: int) -> None:
        if not spans:
            return
        held = sum(hi - lo for lo, hi in spans)
        self.tokens[rank] += sign * held
        if document != self.padding:
            self.work[rank] += sign * sum((hi - lo) * (lo + hi + 1) / 2 + self.short * hi for lo, hi in spans)
            self.received[rank] += sign * (spans[-1][1] - held)

    def move(self, document: int, lo: int, hi: int, giver: int, taker: int) -> None:
        """Move [lo, hi), which lies in one span of `giver`, to `taker`."""
        given = self.held[giver][document]
        taken = self.held[taker].get(document, ())
        if document == self.padding:
            left, more = given[0][1] - (hi - lo), (taken[0][1] if taken else 0) + hi - lo
            self.put(giver, document, ((0, left),) if left else ())
            self.put(taker, document, ((0, more),))
            return
        rest: list[Span] = []
        for first, stop in given:
            if first <= lo and hi <= stop:
                rest += [span for span in ((first, lo), (hi, stop)) if span[0] < span[1]]
            else:
                rest.append((first, stop))
        self.put(giver, document, tuple(rest))
        self.put(taker, document, join((*taken, (lo, hi))))

    def rows(self, rank: int) -> Floats:
        """float64 [spans, 7]: document, first token, stop, the rank's end in the document, that end once the span is
        given away, whether it is the rank's last span of it, and whether it is no padding."""
        known = self._rows[rank]
        if known is None:
            out = []
            for document, spans in self.held[rank].items():
                end, before, real = spans[-1][1], 0, document != self.padding
                for lo, hi in spans:
                    out.append((document, lo, hi, end, before if hi == end else end, hi == end, real))
                    before = hi
            known = self._rows[rank] = np.array(out, np.float64).reshape(-1, 7)
        return known


def join(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Disjoint spans in order, adjacent ones made one."""
    joined: list[Span] = []
    for first, stop in sorted(spans):
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((first, stop))
    return tuple(joined)
