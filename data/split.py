"""Which documents train and which are held out, and in what order they are read."""

import numpy as np
from numpy.typing import NDArray

from data.packing import Piece
from data.sources.documents import FiniteDocuments, Source, bucket


def split_documents(
    source: FiniteDocuments, eval_fraction: float, label: str | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the documents that train, in source order, and of those held out, in the order of their hash.

    A document is held out where the hash of its name falls below `eval_fraction`: it stays on its side when others
    are added or reordered.

    Args:
        label: the source's in a mixture, for messages.

    Raises:
        ValueError: a side without a document, where `eval_fraction` is above 0.
    """
    buckets = bucket(source.name_hashes())
    order = np.argsort(buckets, kind="stable")
    held_out = order[buckets[order] < eval_fraction]
    train = np.flatnonzero(buckets >= eval_fraction)
    whose = f"{source.size} documents" + (f" of {label}" if label else "")
    if eval_fraction > 0 and not held_out.size:
        raise ValueError(
            f"data.eval_fraction={eval_fraction} holds out none of {whose}; the first is held out "
            f"above {buckets.min():.4f}. Raise it, or set 0 to train without evaluation"
        )
    if not train.size:
        raise ValueError(
            f"data.eval_fraction={eval_fraction} leaves none of {whose} to train on; the last trains "
            f"at {buckets.max():.4f} and below. Lower it, or add documents"
        )
    return train, held_out


class DocumentOrder:
    """The documents one after the other: endless passes, each in its own order drawn from (seed, epoch); or one pass.

    With `part`, a document longer than that comes in parts, which are shuffled like documents: else a file of 500
    rows would fill 60 steps of 8 rows with itself. A pass still holds every token exactly once.

    Args:
        indices: documents of one pass; None for documents without end, read once, whole and in their order.
        seed: of the passes' orders.
        part: tokens, the longest part of a document; None leaves documents whole.
        once: stop after one pass.
    """

    def __init__(
        self, source: Source, indices: NDArray[np.int64] | None, seed: int, part: int | None = None, once: bool = False
    ) -> None:
        self._source, self._indices, self._seed, self._part, self._once = source, indices, seed, part, once
        if indices is not None:
            assert isinstance(source, FiniteDocuments)
            parts = np.ones(indices.size, np.int64) if part is None else -(-source.lengths()[indices] // part)
            self._part_bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(parts)])
        self.seek(0, 0)

    def seek(self, epoch: int, cursor: int) -> None:
        """Go on at place `cursor` of pass `epoch`."""
        self.epoch, self.cursor = epoch, cursor
        if self._indices is not None:
            self._order = np.random.default_rng([self._seed, 2, epoch]).permutation(self._part_bounds[-1])

    @property
    def passes(self) -> int:
        """Passes of which every document was pulled."""
        return self.epoch + int(self._indices is not None and self.cursor == self._order.size)

    def state(self) -> list[int]:
        """The place of the next document, as JSON-able data."""
        return [self.epoch, self.cursor]

    def restore(self, state: list[int]) -> None:
        """Go on where `state` was taken."""
        self.seek(*state)

    def pull(self) -> Piece | None:
        """The next document or part of one; None once a single pass is over."""
        if self._indices is None:
            self.cursor += 1
            return Piece(self.epoch, self.cursor - 1, 0, self._source.length(self.cursor - 1))
        if self.cursor == self._order.size:
            if self._once:
                return None
            self.seek(self.epoch + 1, 0)
        unit = self._order[self.cursor]
        self.cursor += 1
        place = int(np.searchsorted(self._part_bounds, unit, "right")) - 1
        document = int(self._indices[place])
        length = self._source.length(document)
        if self._part is None:
            return Piece(self.epoch, document, 0, length)
        start = int(unit - self._part_bounds[place]) * self._part
        return Piece(self.epoch, document, start, min(start + self._part, length))
