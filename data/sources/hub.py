"""Documents of a Hugging Face data set, by name or from a folder, read by the `datasets` library.

Streaming reads the data set's shards (its files) in an order drawn from (seed, epoch) and shuffles within blocks of
documents, whose bytes are bounded; a few blocks are held, and any place in a shard can be returned to.
"""

import hashlib
import itertools
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.config import SourceConfig
from data.sources.contents import WatchedFiles, refuse_large
from data.sources.documents import FiniteDocuments, stop_of
from data.sources.kept import OVERHEAD, Kept
from data.sources.records import Records
from data.tokenizers.tokenizer import Tokenizer

BLOCK = 256  # documents shuffled among themselves, or as many as BLOCK_BYTES hold
BLOCK_BYTES = 32 << 20  # of text
KEPT_BYTES = 256 << 20  # of blocks kept, text or ids: what a packer holds back is seldom read twice
_SHARD = 1 << 32  # documents of a shard at most: a document's number is shard * _SHARD + row


def load(config: SourceConfig) -> Any:
    """The split as a `datasets` object. ValueError, one sentence, for whatever the library refuses."""
    try:
        import datasets
    except ImportError:
        raise ValueError(
            "data=hub needs the package datasets, which is not installed; pip install -r requirements-extras.txt"
        ) from None
    read: Any = datasets.load_dataset  # its overloads know no flag that is decided later
    try:
        return read(config.path, config.name, split=config.split, streaming=config.streaming)
    except Exception as error:  # a dozen classes of its own
        raise ValueError(f"data.path={config.path}: {_first_line(error)}") from None


def listed(config: SourceConfig) -> list[tuple[str, str]]:
    """(address, where it comes from) of the files of the split; of the hub, the address holds the commit."""
    import datasets

    try:
        found: Any = datasets.load_dataset_builder(str(config.path), config.name).config.data_files or {}
    except Exception as error:
        raise ValueError(f"data.path={config.path}: {_first_line(error)}") from None
    split = re.match(r"\w*", config.split)
    chosen = [found[split[0]]] if split and split[0] in found else list(found.values())
    return [
        (str(address), str(origin))
        for files in chosen
        for address, origin in itertools.zip_longest(files, getattr(files, "origin_metadata", ()))
    ]


def _first_line(error: BaseException) -> str:
    """What went wrong first: the library wraps it in sentences without a reason."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def row_name(title: str, *place: int) -> str:
    """A document's name, which decides whether it is held out: its row, after its shard where it is streamed."""
    return ":".join((title, *map(str, place)))


def title(config: SourceConfig) -> str:
    """What the documents' names begin with."""
    return "/".join([str(config.path).rstrip("/"), *([config.name] if config.name else []), config.split])


class HubTable(FiniteDocuments):
    """A whole split on this disk: any document by its row. Opening codes all documents once, for their lengths."""

    def __init__(self, config: SourceConfig, table: Any, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._title = title(config)
        self._records = Records.of(config, tokenizer, vocab_size)
        columns = self._records.columns(list(table.column_names), self._title)
        self._table = table.select_columns(columns)
        self.counts_bytes = self._records.marks or columns == [config.text_key]
        content = hashlib.blake2b(digest_size=16)
        self._lengths = np.zeros(len(table), np.int64)
        for index in range(len(table)):
            ids = self._ids(index)
            content.update(ids.tobytes())
            self._lengths[index] = ids.size
        self._content = content.digest()
        if not self._lengths.size:
            raise ValueError(f"{self._title} holds no documents; choose another data.split")

    def _ids(self, index: int) -> NDArray[np.int32]:
        return self._records.ids(self._table[index], self.name(index))[0]

    @property
    def size(self) -> int:
        return self._lengths.size

    def length(self, index: int) -> int:
        return int(self._lengths[index])

    def lengths(self) -> NDArray[np.int64]:
        return self._lengths

    def name(self, index: int) -> str:
        return row_name(self._title, index)

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        return self._ids(index)[start : stop_of(self, index, start, stop)]

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(self._title.encode() + self._content, digest_size=16)
        digest.update(self._lengths.tobytes())
        return digest.hexdigest()


class HubStream:
    """Documents numbered by shard and row, read forward; `size` is None, as how many there are is not known.

    A document's name, and so whether it is held out, depends on its shard and row alone. A broken document is found
    when its block is read, which may be in mid-training; the first block is read at start.
    """

    size = None

    def __init__(self, config: SourceConfig, stream: Any, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._title, self._stream = title(config), stream
        self._files = WatchedFiles()
        files = listed(config)
        local = [address for address, _ in files if os.path.isfile(address)]
        refuse_large(local, f"data.path={config.path}", config, tokenizer)
        for address in local:
            self._files.add(address, address)
        # files that are not here are told apart by their address, with its commit, and by what their server says
        self._elsewhere = [file for file in files if file[0] not in local]
        self._records = Records.of(config, tokenizer, vocab_size)
        self.shards: int = stream.num_shards
        self._open: tuple[int, int] = (-1, 0)  # the shard that is being read, and its next row
        self._rows: Iterator[dict[str, Any]] = iter(())
        self._blocks: Kept[tuple[int, int], StreamBlock] = Kept(KEPT_BYTES, self._forget)
        self._places: dict[int, tuple[int, int]] = {}  # of a document that is kept, its block
        small = vocab_size <= 1 << 16 and not self._records.marks  # a marked id is negative
        self._dtype = np.uint16 if small else np.int32  # what ids are kept in
        first = next((block for shard in range(self.shards) if (block := self._block(shard, 0)).documents), None)
        if first is None:
            raise ValueError(f"{self._title} holds no documents; choose another data.split")
        record = first.documents[0]
        assert isinstance(record, dict)
        self._column = self._records.column(list(record), self._title)
        self.counts_bytes = self._records.marks or self._column == config.text_key

    def block_rows(self, shard: int, start: int) -> tuple[int, bool]:
        """Documents of the block that begins at row `start`, and whether it is the shard's last."""
        block = self._block(shard, start)
        return len(block.documents), block.last

    def number(self, shard: int, row: int) -> int:
        """The number by which a document is asked for."""
        return shard * _SHARD + row

    def name(self, index: int) -> str:
        return row_name(self._title, *divmod(index, _SHARD))

    def length(self, index: int) -> int:
        return len(self._ids(index))

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        return self._ids(index)[start : stop_of(self, index, start, stop)]

    def fingerprint(self) -> str:
        splits = getattr(self._stream.info, "splits", None) or {}
        counts = sorted((name, split.num_examples) for name, split in splits.items())
        text = f"{self._title} {self._column} {self.shards} {counts} {self._files.digest()} {self._elsewhere}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _ids(self, index: int) -> NDArray[np.int32]:
        """The document's ids, coded the first time that they are asked for."""
        shard, row = divmod(index, _SHARD)
        key = self._places.get(index, (shard, row))  # one that is no longer kept begins a block of its own
        block = self._block(*key)
        if row - key[1] >= len(block.documents):
            raise IndexError(f"{self.name(index)}: there is no such row")
        document = block.documents[row - key[1]]
        if isinstance(document, dict):
            ids, _ = self._records.ids(document, self.name(index))
            document = ids.astype(self._dtype)
            block.documents[row - key[1]] = document
            self._blocks.grow(key, document.nbytes)  # its text may be held elsewhere for a while
        return document.astype(np.int32)

    def _block(self, shard: int, start: int) -> "StreamBlock":
        return self._blocks.get((shard, start), lambda: self._read(shard, start))

    def _forget(self, key: tuple[int, int], block: "StreamBlock") -> None:
        shard, start = key
        for row in range(start, start + len(block.documents)):
            if self._places.get(self.number(shard, row)) == key:
                del self._places[self.number(shard, row)]

    def _read(self, shard: int, start: int) -> tuple["StreamBlock", int]:
        """The next rows of the shard where it stands; else the shard opened anew, and rows before `start` passed."""
        documents: list[NDArray[Any] | dict[str, Any]] = []
        size = 0
        try:
            if self._open != (shard, start):
                self._rows = iter(self._stream.shard(num_shards=self.shards, index=shard).skip(start))
            for record in itertools.islice(self._rows, BLOCK):
                kept = self._records.kept(record)
                documents.append(kept)
                size += sum(_bytes_of(value) for value in kept.values())
                if size >= BLOCK_BYTES:
                    break
        except Exception as error:
            raise ValueError(f"{self._title}, shard {shard} of {self.shards}: {_first_line(error)}") from None
        self._files.confirm_all()
        self._open = (shard, start + len(documents))
        for row in range(start, start + len(documents)):
            self._places.setdefault(self.number(shard, row), (shard, start))
        last = len(documents) < BLOCK and size < BLOCK_BYTES
        return StreamBlock(documents, last), size + OVERHEAD * len(documents)


class StreamBlock(NamedTuple):
    """Some documents of a shard, each as its record until its ids are asked for."""

    documents: list[NDArray[Any] | dict[str, Any]]
    last: bool


def _bytes_of(value: Any) -> int:
    """What a value of a record takes, about: a text, or a list of ids."""
    if isinstance(value, str):
        return len(value) if value.isascii() else 4 * len(value)
    return getattr(value, "nbytes", 32 * len(value) if hasattr(value, "__len__") else 64)


def from_hub(
    config: SourceConfig, tokenizer: Tokenizer, vocab_size: int, seed: int, context: int
) -> HubTable | HubStream:
    """The split that `config` names, streamed or whole."""
    kind = HubStream if config.streaming else HubTable
    return kind(config, load(config), tokenizer, vocab_size)
