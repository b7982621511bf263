"""Several sources as one. A document's number tells its source: number = number in the source * sources + place."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data.sources.documents import Source


class Mixture:
    """The documents of all parts; which comes when is the order's matter (`data.order.MixtureOrder`)."""

    size = None  # of documents one can run through by number; the parts have their own

    def __init__(self, labels: Sequence[str], weights: Sequence[float], sources: Sequence[Source]) -> None:
        self.labels, self.weights, self.sources = list(labels), list(weights), list(sources)

    @property
    def counts_bytes(self) -> bool:
        return all(source.counts_bytes for source in self.sources)

    def _find(self, index: int) -> tuple[Source, int]:
        return self.sources[index % len(self.sources)], index // len(self.sources)

    def label(self, index: int) -> str:
        """The label of the document's source."""
        return self.labels[index % len(self.sources)]

    def length(self, index: int) -> int:
        source, local = self._find(index)
        return source.length(local)

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        source, local = self._find(index)
        return source.tokens(local, start, stop)

    def name(self, index: int) -> str:
        source, local = self._find(index)
        return f"{self.label(index)}: {source.name(local)}"

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for label, weight, source in zip(self.labels, self.weights, self.sources):
            digest.update(f"{label} {weight} {source.fingerprint()}\0".encode())
        return digest.hexdigest()
