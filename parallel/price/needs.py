"""Keys that must travel under a placement, whatever exchange moves them: closed forms on spans of documents.

Under a causal mask without a window, a rank with tokens of a document needs every key of it before the end of its last
part. Those that it does not hold, it receives once.

    >>> layout = PackedLayout.from_lengths([6, 2])
    >>> Needs.of(layout, [TokenSet.of((0, 2), (6, 8)), TokenSet.of((2, 6))]).received
    array([0, 2])
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kernels.mask_spec import MaskSpec
from parallel.plan.layout import PackedLayout
from parallel.plan.tokens import TokenSet
from parallel.plan.visibility import Visibility

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Needs:
    """Parts of documents: [parts] each, sorted by document and first token.

    Attributes:
        rank, document: whose part, and of what.
        start, stride, size: in positions of the document.
    """

    ranks: int
    rank: Ints
    document: Ints
    start: Ints
    stride: Ints
    size: Ints

    @classmethod
    def of(cls, layout: PackedLayout, sets: Sequence[TokenSet]) -> "Needs":
        """The parts that ascending `sets` have of the layout's documents; padding left out."""
        sight = Visibility(layout, MaskSpec())
        parts = [sight.segments(tokens) for tokens in sets]
        rank = np.repeat(np.arange(len(sets)), [len(part.start) for part in parts])
        document, start, stride, size = (np.concatenate(column) for column in zip(*parts))
        start = start - layout.starts[document]
        order = np.lexsort((start, document))
        return cls(len(sets), rank[order], document[order], start[order], stride[order], size[order])

    @property
    def stop(self) -> Ints:
        """[parts]: one past the last token."""
        return self.start + (self.size - 1) * self.stride + 1

    @cached_property
    def work(self) -> Ints:
        """[ranks]: allowed (query, key) pairs of the rank's queries."""
        pairs = self.size * (self.start + 1) + self.stride * (self.size * (self.size - 1) // 2)
        return self._by_rank(pairs)

    @cached_property
    def last_rows(self) -> Ints:
        """[ranks]: keys that the last row of each of the rank's parts sees, summed."""
        return self._by_rank(self.stop)

    @cached_property
    def held(self) -> Ints:
        """[ranks]: tokens of documents that a rank holds."""
        return self._by_rank(self.size)

    @cached_property
    def parts(self) -> Ints:
        """[ranks]: parts of documents that a rank holds."""
        return self._by_rank(np.ones_like(self.rank))

    @cached_property
    def received(self) -> Ints:
        """[ranks]: keys that a rank must receive once: of each document, those before its end that it does not hold."""
        pair, which = np.unique(self.document * self.ranks + self.rank, return_inverse=True)
        end = np.zeros(len(pair), np.int64)
        np.maximum.at(end, which, self.stop)
        total = np.zeros(self.ranks, np.int64)
        np.add.at(total, pair % self.ranks, end)
        return total - self.held

    @cached_property
    def sent_once(self) -> Ints:
        """[ranks]: keys of a rank that some other rank needs: what a gathered buffer must hold."""
        total = np.zeros(self.ranks, np.int64)
        for first, stop, members, end in self._documents():
            others = np.where(np.arange(len(members))[None, :] == np.arange(len(members))[:, None], 0, end)
            furthest = others.max(1, initial=0)  # the last end among the other members
            who = np.searchsorted(members, self.rank[first:stop])
            np.add.at(total, self.rank[first:stop], self._before(first, stop, furthest[who]))
        return total

    @cached_property
    def keys(self) -> Ints:
        """[queries' rank, keys' rank]: keys that travel between the two; the diagonal is 0."""
        total = np.zeros((self.ranks, self.ranks), np.int64)
        for first, stop, members, end in self._documents():
            seen = self._before(first, stop, end[:, None])  # [members, parts]
            who = np.searchsorted(members, self.rank[first:stop])
            table = np.zeros((len(members), len(members)), np.int64)
            np.add.at(table.T, who, seen.T)
            total[np.ix_(members, members)] += table
        np.fill_diagonal(total, 0)
        return total

    def _before(self, first: int, stop: int, end: Ints) -> Ints:
        """Tokens of parts `first` to `stop` that lie before position `end`."""
        start, stride, size = self.start[first:stop], self.stride[first:stop], self.size[first:stop]
        return np.clip((end - start + stride - 1) // stride, 0, size)

    def _documents(self) -> list[tuple[int, int, Ints, Ints]]:
        """(first part, past the last, ranks that hold one, their ends) of each document that is cut."""
        edges = np.flatnonzero(np.diff(self.document, prepend=-1, append=-1))
        found = []
        for first, stop in zip(edges[:-1].tolist(), edges[1:].tolist()):
            if stop - first > 1:
                members, who = np.unique(self.rank[first:stop], return_inverse=True)
                end = np.zeros(len(members), np.int64)
                np.maximum.at(end, who, self.stop[first:stop])
                found.append((first, stop, members, end))
        return found

    def _by_rank(self, values: Ints) -> Ints:
        total = np.zeros(self.ranks, np.int64)
        np.add.at(total, self.rank, values)
        return total
