"""How documents are put into rows. A packer decides from lengths alone; tokens are read once the rows are known.

A packer fills one row at a time and holds back a bounded number of pieces, so its whole state is that short list. A
document longer than a row is cut into parts that are documents of their own in the rows where they lie.
"""

import itertools
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple, Protocol


class Piece(NamedTuple):
    """Tokens `start` to `stop` of document `document`, in pass `epoch` over the documents."""

    epoch: int
    document: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def cut(self, tokens: int) -> tuple["Piece", "Piece"]:
        """The first `tokens` tokens, and the rest."""
        return self._replace(stop=self.start + tokens), self._replace(start=self.start + tokens)


Pull = Callable[[], Piece | None]  # the next document or part of one; None once there are no more


class Packer(Protocol):
    """Fills rows of `row_length` tokens, holding back at most `lookahead` pieces.

    `shuffles_parts`: whether the parts of an over-long document may be shuffled like documents before they come here,
    as no row needs its neighbour. A packer takes over-long pieces too, and puts their parts into consecutive rows.
    """

    shuffles_parts: bool

    def __init__(self, row_length: int, lookahead: int) -> None: ...

    def row(self, pull: Pull) -> list[Piece]:
        """The next row's pieces, which hold 1 to row_length tokens; an empty list once nothing is left."""
        ...

    def pending(self) -> list[Piece]:
        """The pieces pulled and not yet given out, oldest first: the packer's whole state."""
        ...

    def restore(self, pieces: list[Piece]) -> None: ...


class BestFit:
    """Whole documents: the oldest one waiting opens a row, then the longest that still fits joins until none does.

    Never cuts a document that fits in a row. Since every row takes the oldest waiting piece, none starves: a document
    waits for at most one row for each piece ahead of it, and one more for every row that an over-long piece fills.
    Source: best-fit bin packing over a bounded pool, after "Fewer Truncations Improve Language Modeling",
    arXiv 2404.10830.
    """

    shuffles_parts = True

    def __init__(self, row_length: int, lookahead: int) -> None:
        self.row_length = row_length
        self.lookahead = lookahead
        self._serial = itertools.count()
        self._pool: OrderedDict[int, Piece] = OrderedDict()  # oldest first
        self._by_length: list[tuple[int, int]] = []  # (length, -serial): of two equals, the older is the last

    def _add(self, piece: Piece) -> None:
        serial = next(self._serial)
        self._pool[serial] = piece
        insort(self._by_length, (piece.length, -serial))

    def _take(self, place: int) -> Piece:
        _, negative = self._by_length.pop(place)
        return self._pool.pop(-negative)

    def row(self, pull: Pull) -> list[Piece]:
        while len(self._pool) < self.lookahead and (piece := pull()) is not None:
            self._add(piece)
        if not self._pool:
            return []
        serial, oldest = next(iter(self._pool.items()))
        place = bisect_right(self._by_length, (oldest.length, -serial)) - 1
        if oldest.length > self.row_length:
            head, rest = oldest.cut(self.row_length)
            self._by_length.pop(place)
            insort(self._by_length, (rest.length, -serial))
            self._pool[serial] = rest  # keeps its place as the oldest
            return [head]
        row, room = [self._take(place)], self.row_length - oldest.length
        while (place := bisect_right(self._by_length, (room, 1)) - 1) >= 0:
            row.append(self._take(place))
            room -= row[-1].length
        return row

    def pending(self) -> list[Piece]:
        return list(self._pool.values())

    def restore(self, pieces: list[Piece]) -> None:
        self._pool.clear()
        self._by_length.clear()
        for piece in pieces:
            self._add(piece)


class _Queue:
    """A packer that takes documents in order and holds back only the rest of one that it cut."""

    def __init__(self, row_length: int, lookahead: int) -> None:
        self.row_length = row_length
        self._rest: deque[Piece] = deque()

    def _next(self, pull: Pull) -> Piece | None:
        return self._rest.popleft() if self._rest else pull()

    def pending(self) -> list[Piece]:
        return list(self._rest)

    def restore(self, pieces: list[Piece]) -> None:
        self._rest = deque(pieces)


class Stream(_Queue):
    """Documents end to end, cut where a row ends: no padding, and one cut for nearly every row."""

    shuffles_parts = False

    def row(self, pull: Pull) -> list[Piece]:
        row: list[Piece] = []
        room = self.row_length
        while room and (piece := self._next(pull)) is not None:
            if piece.length > room:
                piece, rest = piece.cut(room)
                self._rest.appendleft(rest)
            row.append(piece)
            room -= piece.length
        return row


class Padded(_Queue):
    """One document a row, the rest padding: the baseline that packing is measured against."""

    shuffles_parts = True

    def row(self, pull: Pull) -> list[Piece]:
        piece = self._next(pull)
        if piece is None:
            return []
        if piece.length > self.row_length:
            piece, rest = piece.cut(self.row_length)
            self._rest.appendleft(rest)
        return [piece]


PACKINGS: dict[str, type[Packer]] = {"best_fit": BestFit, "stream": Stream, "padded": Padded}
