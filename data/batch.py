"""One optimiser step's packed rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from data.packing import Piece
from data.sources.documents import Source
from data.sources.marks import plain_ids, trained
from parallel.plan.layout import PackedLayout

IGNORE = -100  # label of a token that predicts nothing; cross_entropy's default ignore_index


class PackedDocument(NamedTuple):
    """Where a document of a batch comes from: tokens `start` to `stop` of the source's document `document`."""

    row: int
    name: str
    epoch: int
    document: int
    start: int
    stop: int
    whole: bool  # False for a part of a document that was cut at a row's end
    goes_on: bool  # True for a part that another part follows
    source: str = ""  # the label of its source


@dataclass(frozen=True)
class PackedBatch:
    """Packed rows with everything that a step needs to know of them.

    Attributes:
        tokens: [rows, seq_len]; 0 in padding.
        labels: [rows, seq_len], the token that each one predicts: the next of the same document of the layout,
            whatever rank will hold it; -100 at the document's end, before a token of a prompt, inside its prefix and in
            padding.
        positions: [rows, seq_len], from 0 in each document of the layout; 0 in padding.
        layout: the boundaries, of the rows laid end to end.
        documents: the layout's documents, in order.
        token_bytes: int64 [vocabulary], the bytes of text that an id stands for; None where that is not known.
        prefix: tokens at each document's start that see each other, and so are no labels.
    """

    tokens: Int64[Tensor, "rows seq_len"]
    labels: Int64[Tensor, "rows seq_len"]
    positions: Int64[Tensor, "rows seq_len"]
    layout: PackedLayout
    documents: tuple[PackedDocument, ...]
    token_bytes: Int64[Tensor, " ids"] | None
    prefix: int = 0

    @property
    def rows(self) -> int:
        return self.layout.num_rows

    @property
    def seq_len(self) -> int:
        return self.layout.row_length

    @cached_property
    def label_tokens(self) -> int:
        """Labels that count towards the loss."""
        return int((self.labels >= 0).sum())

    @cached_property
    def predicted_bytes(self) -> int:
        """Bytes of text that the labels stand for (the end of a document is none): the unit of bits per byte.

        0 where the ids' text is not known.
        """
        return 0 if self.token_bytes is None else int(self.token_bytes[self.labels[self.labels >= 0]].sum())

    def source_tokens(self) -> dict[str, int]:
        """Labels that count towards the loss, by the label of the documents' source: they add up to `label_tokens`."""
        found: dict[str, int] = {}
        ends = np.concatenate([[0], np.cumsum((self.labels.flatten() >= 0).numpy())])
        for document, start, stop in zip(self.documents, self.layout.starts.tolist(), self.layout.stops.tolist()):
            labels = int(ends[stop] - ends[start])
            found[document.source] = found.get(document.source, 0) + labels
        return found

    @property
    def padding_tokens(self) -> int:
        return self.layout.padding_tokens

    @property
    def num_documents(self) -> int:
        return self.layout.num_documents

    @property
    def cut_documents(self) -> int:
        """Cuts: documents of the layout that go on in another row, as a new document."""
        return sum(document.goes_on for document in self.documents)

    def select_rows(self, start: int, stop: int) -> "PackedBatch":
        """Rows `start` to `stop` (half-open) as a batch of their own. ValueError for rows that are not there."""
        layout = self.layout.select_rows(start, stop)
        documents = tuple(d._replace(row=d.row - start) for d in self.documents if start <= d.row < stop)
        return PackedBatch(
            self.tokens[start:stop],
            self.labels[start:stop],
            self.positions[start:stop],
            layout,
            documents,
            self.token_bytes,
            self.prefix,
        )

    def micro_batches(self, n: int) -> list["PackedBatch"]:
        """`n` batches of rows / n rows each, in order.

        Raises:
            ValueError: n does not divide the rows.
        """
        if n < 1 or self.rows % n:
            divisors = ", ".join(str(d) for d in range(1, self.rows + 1) if self.rows % d == 0)
            raise ValueError(f"{self.rows} rows do not split into {n} micro-batches; use one of {divisors}")
        step = self.rows // n
        return [self.select_rows(start, start + step) for start in range(0, self.rows, step)]


def build_batch(
    source: Source,
    rows: Sequence[Sequence[Piece]],
    seq_len: int,
    token_bytes: Int64[Tensor, " ids"] | None,
    label: Callable[[int], str] = lambda document: "",
    prefix: int = 0,
) -> PackedBatch:
    """Read the pieces that each row holds; an empty row is all padding. `label` names a document's source."""
    pieces = [piece for row in rows for piece in row]
    layout = PackedLayout.from_lengths([p.length for p in pieces], [len(row) for row in rows], seq_len)
    tokens = np.zeros(layout.total_tokens, np.int64)
    labels = np.full(layout.total_tokens, IGNORE, np.int64)
    documents = []
    for row, piece, start, stop in zip(layout.rows.tolist(), pieces, layout.starts.tolist(), layout.stops.tolist()):
        ids = source.tokens(piece.document, piece.start, piece.stop)
        tokens[start:stop] = plain_ids(ids)
        unseen = max(1, prefix)  # the first token that the one before it does not see
        labels[start + unseen - 1 : stop - 1] = np.where(trained(ids[unseen:]), ids[unseen:], IGNORE)
        length = source.length(piece.document)
        where = (piece.epoch, piece.document, piece.start, piece.stop)
        name = source.name(piece.document)
        documents.append(
            PackedDocument(row, name, *where, piece.length == length, piece.stop < length, label(piece.document))
        )
    shape = (len(rows), seq_len)
    return PackedBatch(
        torch.from_numpy(tokens).view(shape),
        torch.from_numpy(labels).view(shape),
        torch.from_numpy(layout.positions()).view(shape),
        layout,
        tuple(documents),
        token_bytes if source.counts_bytes else None,
        prefix,
    )
