"""Documents tokenised beforehand by `python -m data.prepare`: memory-mapped shards and their boundaries."""

import hashlib
import mmap
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.config import SourceConfig
from data.sources.contents import Stamp, stamp_of
from data.sources.documents import FiniteDocuments, stop_of
from data.sources.manifest import INDEX_BYTES, Manifest, Shard, read_manifest
from data.sources.marks import mark_by_bits
from data.tokenizers.tokenizer import Tokenizer, identity_text

_OPEN = 64  # shards, of two or three file descriptors each: processes have 1,024 by default


class ShardView:
    """One shard, mapped. The pages of a read are given back after it, so that memory stays flat: they stay in the
    kernel's cache, but a fault may map two megabytes for a document of a few kilobytes.
    """

    def __init__(self, manifest: Manifest, shard: Shard) -> None:
        self.shard = shard
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        with manifest.path(shard.tokens_file).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        flags = shard.trained_file
        self._trained = None if flags is None else np.memmap(manifest.path(flags), np.uint8, "r")
        index = np.memmap(manifest.path(shard.index_file), np.uint8, "r")
        n = shard.documents
        self.ends: NDArray[np.int64] = index[: 8 * n].view("<i8")
        self.hashes: NDArray[np.uint64] = index[8 * n : 16 * n].view("<u8")
        self._name_ends: NDArray[np.int64] = index[16 * n : INDEX_BYTES * n].view("<i8")
        self._names = index[INDEX_BYTES * n :]

    def check(self, folder: Path) -> None:
        """Raise ValueError for document boundaries that do not fit the shard."""
        ordered = self.ends[0] > 0 and bool((np.diff(self.ends) > 0).all())
        named = self._name_ends[0] >= 0 and bool((np.diff(self._name_ends) >= 0).all())
        whole = self.ends[-1] == self.shard.tokens and self._name_ends[-1] == self._names.size
        if not (ordered and named and whole):
            raise ValueError(
                f"{folder}: the document boundaries in {self.shard.index_file.name} do not fit its shard of "
                f"{self.shard.tokens} tokens; prepare the tokens again"
            )

    def bounds(self, place: int) -> tuple[int, int]:
        """First and last token (half-open) of the shard's document `place`."""
        return int(self.ends[place - 1]) if place else 0, int(self.ends[place])

    def name(self, place: int) -> str:
        start = int(self._name_ends[place - 1]) if place else 0
        return self._names[start : int(self._name_ends[place])].tobytes().decode("utf-8", "surrogateescape")

    def read(self, start: int, stop: int) -> NDArray[np.int32]:
        """Tokens `start` to `stop` of the shard, copied, those of prompts marked. ValueError for an id above the
        manifest's largest."""
        ids = np.frombuffer(self._map, self._dtype, stop - start, start * self._dtype.itemsize).astype(np.int32)
        self._map.madvise(mmap.MADV_DONTNEED)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= self.shard.max_id:
            raise ValueError(
                f"{self.shard.tokens_file.name} holds an id above its largest, {self.shard.max_id}: it is damaged; "
                "restore it, or prepare the tokens again"
            )
        return ids if self._trained is None else mark_by_bits(ids, self._trained, start)


class TokenShards(FiniteDocuments):
    """The documents of a folder of tokens; of its shards, the last few read are open. Files whose size, times or inode
    change during the run are hashed again, and must still be the manifest's.

    Raises:
        ValueError: document boundaries that do not fit their shard.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.counts_bytes = manifest.counts_bytes
        self._where = {file.name: manifest.path(file) for file in manifest.files()}
        self._stamps: dict[str, Stamp] = {}  # of each file, when it was last known to be the manifest's
        self._view = lru_cache(maxsize=_OPEN)(lambda place: ShardView(manifest, manifest.shards[place]))
        for view in self._views():
            self._confirm(view.shard)
            view.check(manifest.folder)
        self._bounds = np.cumsum([0, *(shard.documents for shard in manifest.shards)])

    @property
    def size(self) -> int:
        return int(self._bounds[-1])

    def _views(self) -> Iterator[ShardView]:
        return (self._view(place) for place in range(len(self.manifest.shards)))

    def _find(self, index: int) -> tuple[ShardView, int]:
        if not 0 <= index < self.size:
            raise IndexError(f"document {index} of {self.size}")
        place = int(np.searchsorted(self._bounds, index, "right")) - 1
        return self._view(place), index - int(self._bounds[place])

    def length(self, index: int) -> int:
        view, place = self._find(index)
        start, stop = view.bounds(place)
        return stop - start

    def lengths(self) -> NDArray[np.int64]:
        return np.concatenate([np.diff(view.ends, prepend=0) for view in self._views()])

    def name(self, index: int) -> str:
        view, place = self._find(index)
        return view.name(place)

    def name_hashes(self) -> NDArray[np.uint64]:
        return np.concatenate([view.hashes.copy() for view in self._views()])  # else all stay open

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        view, place = self._find(index)
        self._confirm(view.shard)  # before: a page past the end of a file that was cut kills the process
        low, _ = view.bounds(place)
        ids = view.read(low + start, low + stop_of(self, index, start, stop))
        self._confirm(view.shard)  # after: what was read is what was hashed
        return ids

    def _confirm(self, shard: Shard) -> None:
        for file in (shard.tokens_file, shard.index_file):
            path = self._where[file.name]
            try:
                stamp = stamp_of(path)
                known = self._stamps.setdefault(file.name, stamp)
                if stamp != known:
                    self.manifest.verify_content(file)
                    self._stamps[file.name] = stamp
            except OSError as error:
                raise ValueError(f"{path} cannot be read ({error.strerror or error}); restore it") from None

    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        files = [(file.name, file.bytes, file.sha256) for file in self.manifest.files()]
        return hashlib.blake2b(repr(files).encode(), digest_size=16).hexdigest()


def from_shards(config: SourceConfig, tokenizer: Tokenizer, vocab_size: int, seed: int, context: int) -> TokenShards:
    """The tokens in `config.path`, every file checked as `config.verify` says.

    Raises:
        ValueError: a damaged folder, another tokenizer, or ids that the model does not know.
    """
    assert config.path is not None
    manifest = read_manifest(config.path)
    if manifest.tokenizer != tokenizer.identity:
        raise ValueError(
            f"data.path={config.path} was prepared with the tokenizer {_shown(manifest.tokenizer)}, and data.tokenizer "
            f"is {identity_text(tokenizer)}; use data.tokenizer=manifest, or prepare the text again"
        )
    largest = max(shard.max_id for shard in manifest.shards)
    if largest >= vocab_size:
        raise ValueError(
            f"data.path={config.path} holds token id {largest}, outside the model's {vocab_size} ids; raise "
            f"model.vocab_size to {manifest.vocab_size} or prepare the text again"
        )
    if manifest.counts_bytes and largest >= tokenizer.vocab_size:
        raise ValueError(
            f"data.path={config.path} holds token id {largest}, and its tokenizer has {tokenizer.vocab_size} ids; "
            "prepare the text again"
        )
    manifest.verify(hashes=config.verify == "full")
    return TokenShards(manifest)


def _shown(identity: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(identity.items()))
