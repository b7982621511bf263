"""What a source of documents is: any document by number, its length, its name; and what sources with an end share."""

import hashlib
from abc import ABC, abstractmethod
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@runtime_checkable
class Source(Protocol):
    """A random-access sequence of documents."""

    @property
    def size(self) -> int | None:
        """Number of documents; None where they never end, or are numbered otherwise."""
        ...

    @property
    def counts_bytes(self) -> bool:
        """Whether the ids are the tokenizer's own of a text, so that its `token_bytes` holds."""
        ...

    def length(self, index: int) -> int:
        """Tokens of the document, at least 1."""
        ...

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        """int32 [stop - start]: tokens `start` to `stop` of the document, all of them by default.

        A token that is not to be predicted, as a prompt's, is given as ~id (`data.sources.marks`).
        """
        ...

    def name(self, index: int) -> str:
        """The document's name in messages, and what the split into train and eval hashes: unique in a source."""
        ...

    def fingerprint(self) -> str:
        """Hex digits that change with the documents: their names and what they hold."""
        ...


def name_hash(name: str) -> int:
    """64 bits that depend on the name alone: what holds a document out, whatever lies around it."""
    raw = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(raw, "big")


def bucket(hashes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Where `name_hash`es fall in [0, 1): below `eval_fraction` a document is held out."""
    return hashes / 2**64


def stop_of(source: Source, index: int, start: int, stop: int | None) -> int:
    """Where a span of a document's tokens ends: `stop`, or its last token. ValueError for a span outside it."""
    length = source.length(index)
    stop = length if stop is None else stop
    if not 0 <= start <= stop <= length:
        raise ValueError(f"tokens {start}:{stop} are outside {source.name(index)} of {length} tokens")
    return stop


class FiniteDocuments(ABC):
    """A source of `size` documents; subclasses that hold whole columns answer for all documents at once."""

    counts_bytes: bool = True

    @property
    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def length(self, index: int) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str: ...

    @abstractmethod
    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.int32]: ...

    @abstractmethod
    def fingerprint(self) -> str: ...

    def lengths(self) -> NDArray[np.int64]:
        """int64 [size]: tokens of every document."""
        return np.fromiter((self.length(i) for i in range(self.size)), np.int64, self.size)

    def name_hashes(self) -> NDArray[np.uint64]:
        """uint64 [size]: `name_hash` of every document's name."""
        return np.fromiter((name_hash(self.name(i)) for i in range(self.size)), np.uint64, self.size)
