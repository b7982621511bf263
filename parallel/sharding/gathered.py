"""Shares whose keys go to all ranks, as in a gather: what counts is the keys that a rank sends, once each.

A rank sends what some other rank needs: of a document that is cut, all but what lies past the others' ends. With its
end e, and the last of the others' o, that is `held - max(0, e - o)`. The fullest rank's sets the gather's length
(FlashCP, equation 5, whose non-last shards these are).
"""

from typing import Protocol

import numpy as np

from parallel.sharding.shares import END, Floats, Shares, Span


class GivenSpans(Protocol):
    """Of spans given away, [2, ...] each: one past the last token, and the giver's end in the document afterwards."""

    @property
    def hi(self) -> Floats: ...

    @property
    def end(self) -> Floats: ...


class GatheredShares(Shares):
    """Shares whose `received` counts the keys that a rank sends to all others."""

    held_tokens: Floats  # [ranks, documents + 1]; padding counts none

    @classmethod
    def of(cls, shares: Shares) -> "GatheredShares":
        """A copy of `shares`, counted anew."""
        own = cls((), ())
        own.take_from(shares)
        own.held_tokens = np.zeros_like(own.end)
        for rank, documents in enumerate(shares.held):
            for document, spans in documents.items():
                if document != own.padding:
                    own.held_tokens[rank, document] = sum(hi - lo for lo, hi in spans)
        last, furthest, others = _last_two(own.end)
        own.received = own.held_tokens.sum(1)
        np.subtract.at(own.received, last, furthest - others)
        return own

    def copy(self) -> "GatheredShares":
        other = GatheredShares((), ())
        other.take_from(self)
        other.held_tokens = self.held_tokens.copy()
        return other

    def put(self, rank: int, document: int, spans: tuple[Span, ...]) -> None:
        before = self._sent(document)
        super().put(rank, document, spans)
        if document != self.padding:
            self.held_tokens[rank, document] = sum(hi - lo for lo, hi in spans)
            self.received += self._sent(document) - before

    def _count(self, rank: int, document: int, spans: tuple[Span, ...], sign: int) -> None:
        received = self.received[rank]
        super()._count(rank, document, spans, sign)
        self.received[rank] = received

    def _sent(self, document: int) -> Floats:
        """[ranks]: keys of a document that each sends."""
        end = self.end[:, document]
        last = int(end.argmax())
        sent = self.held_tokens[:, document].copy()
        sent[last] -= end[last] - max(end[:last].max(initial=0), end[last + 1 :].max(initial=0))
        return sent

    def sent_after(
        self, a: int, b: np.ndarray, p: Floats, q: Floats, documents: tuple[np.ndarray, np.ndarray],
        gives: GivenSpans, gets: GivenSpans, n: Floats,
    ) -> tuple[Floats, Floats]:  # fmt: skip
        """[2, 2, fractions, p, q]: more keys that rank a, and rank b, send after an exchange.

        What a third rank sends more or less, where its end no longer stands out as far, is left to the next step.
        """
        p_documents, q_documents = documents
        p_others, q_others = self._others(a, b, p_documents, q_documents)
        b_end, a_end = self.end[b[None, :], p_documents[:, None]], self.end[a, q_documents][None, :]
        b_after, a_after = np.maximum(b_end, gives.hi), np.maximum(a_end, gets.hi)
        p_a = _past(p[END], np.maximum(p_others, b_end)) - _past(gives.end, np.maximum(p_others, b_after)) - n
        p_b = _past(b_end, np.maximum(p_others, p[END])) - _past(b_after, np.maximum(p_others, gives.end)) + n
        q_b = _past(q[END], np.maximum(q_others, a_end)) - _past(gets.end, np.maximum(q_others, a_after)) - n
        q_a = _past(a_end, np.maximum(q_others, q[END])) - _past(a_after, np.maximum(q_others, gets.end)) + n
        a_sent, b_sent = p_a[:, None] + q_a[None], p_b[:, None] + q_b[None]
        i, j = np.nonzero((p_documents[:, None] == q_documents) & (p_documents[:, None] != self.padding))
        if len(i):  # one document: each holds as much of it as before
            a_new = np.maximum(gives.end[:, None, :, i, j], gets.hi[None][..., i, j])
            b_new = np.maximum(gives.hi[:, None, :, i, j], gets.end[None][..., i, j])
            others, a_old, b_old = p_others[i, j], p[END, i, 0], q[END, 0, j]
            a_sent[..., i, j] = _past(a_old, np.maximum(others, b_old)) - _past(a_new, np.maximum(others, b_new))
            b_sent[..., i, j] = _past(b_old, np.maximum(others, a_old)) - _past(b_new, np.maximum(others, a_new))
        return a_sent, b_sent

    def _others(self, a: int, b: np.ndarray, p_documents: np.ndarray, q_documents: np.ndarray) -> tuple[Floats, Floats]:
        """[p, q] each: the last end, in p's document and in q's, of ranks other than a and q's owner b."""
        ends = self.end.copy()
        ends[a] = 0
        last, first, second = _last_two(ends)
        p_others = np.where(last[p_documents][:, None] == b[None, :], second[p_documents][:, None],
                            first[p_documents][:, None])  # fmt: skip
        q_others = np.where(last[q_documents] == b, second[q_documents], first[q_documents])
        return p_others, np.broadcast_to(q_others[None, :], p_others.shape)


def _last_two(ends: Floats) -> tuple[np.ndarray, Floats, Floats]:
    """Of ends [ranks, documents]: whose is the furthest, the furthest, and that of the others."""
    last = ends.argmax(0)
    others = ends.copy()
    others[last, np.arange(ends.shape[1])] = 0
    return last, ends.max(0), others.max(0)


def _past(end: Floats, others: Floats) -> Floats:
    """Tokens before `end` that lie past the others' ends."""
    return np.maximum(end - others, 0)
