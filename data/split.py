"""Which documents train and which are held out, and in what order they are read."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from data.packing import Piece
from data.sources import Source


def _bucket(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    raw = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(raw, "big") / 2**64


def split_documents(source: Source, eval_fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the documents that train, in source order, and of those held out, in the order of their hash.

    A document is held out where the hash of its name falls below `eval_fraction`: it stays on its side when others
    are added or reordered.

    Raises:
        ValueError: a side without a document, where `eval_fraction` is above 0.
    """
    assert source.size is not None, "documents without end have no split by name"
    buckets = np.array([_bucket(source.name(i)) for i in range(source.size)])
    order = np.argsort(buckets, kind="stable")
    held_out = order[buckets[order] < eval_fraction]
    train = np.flatnonzero(buckets >= eval_fraction)
    if eval_fraction > 0 and not held_out.size:
        raise ValueError(
            f"data.eval_fraction={eval_fraction} holds out none of {source.size} documents; the first is held out "
            f"above {buckets.min():.4f}. Raise it, or set 0 to train without evaluation"
        )
    if not train.size:
        raise ValueError(
            f"data.eval_fraction={eval_fraction} leaves none of {source.size} documents to train on; the last trains "
            f"at {buckets.max():.4f} and below. Lower it, or add documents"
        )
    return train, held_out


class DocumentOrder:
    """The documents one after the other: endless passes, each in its own order drawn from (seed, epoch); or one pass.

    Args:
        indices: documents of one pass; None for documents without end, read once in their order.
        seed: of the passes' orders.
        once: stop after one pass in the order given.
    """

    def __init__(self, source: Source, indices: NDArray[np.int64] | None, seed: int, once: bool = False) -> None:
        self._source, self._indices, self._seed, self._once = source, indices, seed, once
        self.seek(0, 0)

    def seek(self, epoch: int, cursor: int) -> None:
        """Go on at document `cursor` of pass `epoch`."""
        self.epoch, self.cursor = epoch, cursor
        self._order = self._indices
        if self._indices is not None and not self._once:
            self._order = np.random.default_rng([self._seed, 2, epoch]).permutation(self._indices)

    def pull(self) -> Piece | None:
        """The next document, whole; None once a single pass is over."""
        if self._order is None:
            document = self.cursor
        else:
            if self.cursor == self._order.size:
                if self._once:
                    return None
                self.seek(self.epoch + 1, 0)
            document = int(self._order[self.cursor])
        self.cursor += 1
        return Piece(self.epoch, document, 0, self._source.length(document))
