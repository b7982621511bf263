"""Where documents come from. A source gives any document by index, and its length without reading it."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from data.config import DataConfig
from data.files import from_paths, from_stdlib
from data.synthetic import from_mix
from data.tokenizer import Tokenizer


@runtime_checkable
class Source(Protocol):
    """A random-access sequence of documents."""

    @property
    def size(self) -> int | None:
        """Number of documents; None where they never end."""
        ...

    @property
    def counts_bytes(self) -> bool:
        """Whether a token id below the tokenizer's `byte_ids` is one byte of text."""
        ...

    def length(self, index: int) -> int:
        """Tokens of the document, at least 1."""
        ...

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        """int32 [stop - start]: tokens `start` to `stop` of the document, all of them by default."""
        ...

    def name(self, index: int) -> str:
        """The document's name in messages, and what the split into train and eval hashes: unique in a source."""
        ...

    def fingerprint(self) -> str:
        """Hex digits that change with the documents' names or lengths."""
        ...


def open_source(config: DataConfig, tokenizer: Tokenizer, vocab_size: int, seed: int) -> Source:
    """The source that `config` names, checked whole: a broken document is reported here, not in mid-training.

    Args:
        vocab_size: ids the model knows; documents tokenised beforehand may hold no others.
        seed: of the drawn documents; sources of real text ignore it, as their order is the loader's.

    Raises:
        ValueError: no documents, or one that is broken; the sentence names the file and line.
    """
    return SOURCES[config.source](config, tokenizer, vocab_size, seed)


SOURCES: dict[str, Callable[[DataConfig, Tokenizer, int, int], Source]] = {
    "stdlib": from_stdlib,
    "files": from_paths,
    "synthetic": from_mix,
}
