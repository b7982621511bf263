"""Which documents lie where in a buffer of packed rows.

A micro-batch of B rows of S tokens is one flat buffer of B * S tokens. A row holds whole documents one after the
other from its first token on; what is left of it is padding. The boundaries are data that travels beside the tokens:
nothing ever infers them from token ids or from positions.

    >>> layout = PackedLayout.from_lengths([3, 2, 4], rows=[2, 1], row_length=6)
    >>> layout.starts, layout.stops, layout.total_tokens
    (array([0, 3, 6]), array([ 3,  5, 10]), 12)
    >>> layout.positions()
    array([0, 1, 2, 0, 1, 0, 0, 1, 2, 3, 0, 0])
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.mask_spec import CAUSAL, MaskSpec

_FORMAT = 1


def _int_array(values: Any, what: str) -> NDArray[np.int64]:
    """`values` as a read-only one-dimensional int64 array; ValueError where they are not whole numbers."""
    array = np.asarray(values)
    if array.size == 0:
        array = np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{what} must be a flat list of integers, got {array.ndim} dims of {array.dtype}")
    array = array.astype(np.int64)
    array.setflags(write=False)
    return array


@dataclass(frozen=True, eq=False, repr=False)
class PackedLayout:
    """Documents in a buffer of `num_rows` rows of `row_length` tokens; make one with `from_lengths`.

    Attributes:
        lengths: int64 [documents], tokens of each document, in buffer order; one of none has a number, no place.
        row_documents: int64 [rows], how many documents each row holds; 0 for a row that is all padding.
        row_length: tokens per row, padding included.
    """

    lengths: NDArray[np.int64]
    row_documents: NDArray[np.int64]
    row_length: int

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        bad = np.flatnonzero(self.lengths < 0)
        if bad.size:
            raise ValueError(f"document {bad[0]} holds {self.lengths[bad[0]]} tokens; give 0 or more")
        bad = np.flatnonzero(self.row_documents < 0)
        if bad.size:
            raise ValueError(f"row {bad[0]} holds {self.row_documents[bad[0]]} documents; give 0 or more")
        if self.row_documents.sum() != self.lengths.size:
            raise ValueError(
                f"rows hold {int(self.row_documents.sum())} documents in total, but {self.lengths.size} lengths are "
                "given; rows must count every document once"
            )
        if self.row_length < 0:
            raise ValueError(f"row_length={self.row_length}; give 0 or more tokens")
        over = np.flatnonzero(self.row_tokens > self.row_length)
        if over.size:
            raise ValueError(
                f"row {over[0]} holds {self.row_tokens[over[0]]} tokens, row_length={self.row_length}; "
                "move a document to another row or raise row_length"
            )

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int | np.integer] | NDArray[Any],
        rows: Sequence[int | np.integer] | NDArray[Any] | None = None,
        row_length: int | np.integer | None = None,
    ) -> "PackedLayout":
        """Lay documents out in order.

        Args:
            lengths: [documents], tokens of each document, 0 or more.
            rows: [rows], how many documents each row holds; None puts all in one row.
            row_length: tokens per row; None takes the fullest row. What a row has left is padding at its end.

        Raises:
            ValueError: a negative length, counts that do not add up, or a row that holds more than `row_length` tokens.
        """
        documents = _int_array(lengths, "lengths")
        counts = _int_array([documents.size] if rows is None else rows, "rows")
        if row_length is None:
            bounds = np.concatenate([[0], np.cumsum(np.maximum(counts, 0))]).clip(max=documents.size)
            sums = np.diff(np.concatenate([[0], np.cumsum(documents)])[bounds])
            row_length = int(sums.max(initial=0))
        return cls(documents, counts, int(row_length))

    @cached_property
    def _row_bounds(self) -> NDArray[np.int64]:
        """[rows + 1]: row r holds documents `_row_bounds[r]` to `_row_bounds[r + 1]`."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.row_documents)])

    @cached_property
    def row_tokens(self) -> NDArray[np.int64]:
        """int64 [rows]: tokens of documents in each row, padding not counted."""
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])
        return _int_array(np.diff(sums[self._row_bounds]), "row_tokens")

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """int64 [documents]: the row of each document."""
        return _int_array(np.repeat(np.arange(self.num_rows, dtype=np.int64), self.row_documents), "rows")

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """int64 [documents]: flat offset of each document's first token."""
        packed = np.cumsum(self.lengths) - self.lengths
        row_start = np.cumsum(self.row_tokens) - self.row_tokens
        shift = np.arange(self.num_rows, dtype=np.int64) * self.row_length - row_start
        return _int_array(packed + shift[self.rows], "starts")

    @cached_property
    def stops(self) -> NDArray[np.int64]:
        """int64 [documents]: flat offset one past each document's last token."""
        return _int_array(self.starts + self.lengths, "stops")

    @property
    def num_documents(self) -> int:
        return int(self.lengths.size)

    @property
    def num_rows(self) -> int:
        return int(self.row_documents.size)

    @property
    def total_tokens(self) -> int:
        """Tokens of the flat buffer, padding included: num_rows * row_length."""
        return self.num_rows * self.row_length

    @property
    def valid_tokens(self) -> int:
        """Tokens that belong to a document."""
        return int(self.lengths.sum())

    @property
    def padding_tokens(self) -> int:
        return self.total_tokens - self.valid_tokens

    def _token_index(self) -> NDArray[np.int64]:
        """int64 [valid]: flat offset of every token that belongs to a document, ascending."""
        within = np.arange(self.valid_tokens, dtype=np.int64)
        first = np.cumsum(self.lengths) - self.lengths
        return within + np.repeat(self.starts - first, self.lengths)

    def positions(self) -> NDArray[np.int64]:
        """int64 [total]: a token's place in its document, from 0 in each; 0 in padding."""
        out = np.zeros(self.total_tokens, np.int64)
        index = self._token_index()
        out[index] = index - np.repeat(self.starts, self.lengths)
        return out

    def document_ids(self) -> NDArray[np.int64]:
        """int64 [total]: the document that a token belongs to; -1 in padding."""
        out = np.full(self.total_tokens, -1, np.int64)
        out[self._token_index()] = np.repeat(np.arange(self.num_documents, dtype=np.int64), self.lengths)
        return out

    def is_padding(self) -> NDArray[np.bool_]:
        """bool [total]: True where no document lies."""
        out = np.ones(self.total_tokens, np.bool_)
        out[self._token_index()] = False
        return out

    def pairs(self, mask: MaskSpec = CAUSAL) -> int:
        """Number of (query, key) pairs that attention over these documents may use, in closed form.

        A Python int: a document of L tokens has L (L + 1) / 2 causal pairs, and sums over documents must not wrap.
        """
        sizes, counts = np.unique(self.lengths, return_counts=True)
        return sum(count * mask.pairs(length) for length, count in zip(sizes.tolist(), counts.tolist()))

    def without_empty(self) -> "PackedLayout":
        """The same tokens in the same places, without the documents that hold none: those after one are renumbered."""
        if self.lengths.all():
            return self
        counts = np.bincount(self.rows[self.lengths > 0], minlength=self.num_rows)
        lengths = _int_array(self.lengths[self.lengths > 0], "lengths")
        return PackedLayout(lengths, _int_array(counts, "rows"), self.row_length)

    def select_rows(self, start: int, stop: int) -> "PackedLayout":
        """The layout of rows `start` to `stop` (half-open) as a buffer of their own; the row length stays.

        Raises:
            ValueError: rows that the layout does not have.
        """
        if not 0 <= start <= stop <= self.num_rows:
            raise ValueError(f"rows {start}:{stop} are outside the layout's {self.num_rows} rows")
        first, last = int(self._row_bounds[start]), int(self._row_bounds[stop])
        counts = _int_array(self.row_documents[start:stop], "rows")
        return PackedLayout(_int_array(self.lengths[first:last], "lengths"), counts, self.row_length)

    @cached_property
    def hash(self) -> str:
        """32 hex digits that are the same for equal layouts in every process and on every machine."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"layout {_FORMAT} {self.num_documents} {self.num_rows} {self.row_length};".encode())
        digest.update(self.lengths.astype("<i8").tobytes())
        digest.update(self.row_documents.astype("<i8").tobytes())
        return digest.hexdigest()

    def to_json(self) -> str:
        """The layout as JSON text, which `from_json` reads back to an equal layout."""
        return json.dumps(
            {
                "format": _FORMAT,
                "lengths": self.lengths.tolist(),
                "rows": self.row_documents.tolist(),
                "row_length": self.row_length,
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> "PackedLayout":
        """Read `to_json`'s text. ValueError where it is no layout, or one of another format."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
            found = fields.get("format") if isinstance(fields, dict) else type(fields).__name__
            raise ValueError(f"not a layout of format {_FORMAT} (found {found!r}); write it again with to_json")
        missing = {"lengths", "rows", "row_length"} - fields.keys()
        if missing:
            raise ValueError(f"the layout's JSON lacks {sorted(missing)}")
        return cls.from_lengths(fields["lengths"], fields["rows"], fields["row_length"])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedLayout):
            return NotImplemented
        return (
            self.row_length == other.row_length
            and np.array_equal(self.lengths, other.lengths)
            and np.array_equal(self.row_documents, other.row_documents)
        )

    def __hash__(self) -> int:
        return int(self.hash[:15], 16)

    def __repr__(self) -> str:
        lengths = ", ".join(map(str, self.lengths[:8].tolist())) + (", ..." if self.num_documents > 8 else "")
        return (
            f"PackedLayout({self.num_documents} documents [{lengths}], {self.num_rows} rows of {self.row_length}, "
            f"{self.padding_tokens} padding)"
        )
