"""Writes a folder of tokens, so that a kill at any moment loses no more than the shard that was being written.

A file is written under another name, flushed to the disk and renamed; `progress.json` lists the shards that are whole,
and the manifest is written last. One process at a time holds the folder.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from data.prepare.units import Coded
from data.sources.documents import name_hash
from data.sources.manifest import MANIFEST_FILE, PROGRESS_FILE, Shard, ShardFile, plain_shard, shard_from
from data.sources.marks import pack_bits, plain_ids, trained

LOCK_FILE = "writing.lock"
_PART = ".part"


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Hold `folder`, made if absent, against other writers. ValueError where one holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another data.prepare is writing in {folder}; wait for it, or give another --out"
            ) from None
        yield  # the lock goes with the process, however it ends


def write_whole(path: Path, data: bytes) -> ShardFile:
    """Write a file so that it is there whole or not at all."""
    part = path.with_name(path.name + _PART)
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    _rename(part, path)
    return ShardFile(path.name, len(data), hashlib.sha256(data).hexdigest())


def _rename(part: Path, path: Path) -> None:
    os.replace(part, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class ShardWriter:
    """Documents in, shards out: a shard ends with the document that brings it to `shard_tokens`.

    So where shards end depends on the documents and `shard_tokens` alone.

    Args:
        request: what is prepared and how, JSON-able; a folder that was begun for another is refused.
        marks: whether to keep which tokens are to be predicted.

    Raises:
        ValueError: a folder that holds other files, or another request's shards.
    """

    def __init__(
        self, folder: Path, request: dict[str, Any], dtype: str, shard_tokens: int, source: str, marks: bool = False
    ) -> None:
        self._marks = marks
        self.folder, self._request, self._shard_tokens, self._source = folder, request, shard_tokens, source
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self.shards: list[Shard] = []
        self.from_text = True
        self._resume()
        self._begin()

    @property
    def documents(self) -> int:
        """Documents in whole shards."""
        return sum(shard.documents for shard in self.shards)

    def _resume(self) -> None:
        path = self.folder / PROGRESS_FILE
        if not path.exists():
            ours = (LOCK_FILE, PROGRESS_FILE + _PART)  # of one that was killed before it began
            others = sorted(p.name for p in self.folder.iterdir() if p.name not in ours)
            if others:
                raise ValueError(
                    f"{self.folder} holds {others[0]}, which data.prepare did not begin ({len(others)} files); give an "
                    "empty folder as --out"
                )
            self._save()
            return
        try:
            saved = json.loads(path.read_bytes())
            before, self.from_text = saved["request"], saved["from_text"]
            self.shards = [shard_from(values) for values in saved["shards"]]
            differing = [key for key in self._request if before.get(key) != self._request[key]]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} is no record of a preparation; give another --out") from None
        if differing:
            key = differing[0]
            was, now = (str(each.get(key))[:80] for each in (before, self._request))
            raise ValueError(
                f"{self.folder} was begun with another {key} ({was}; now {now}); restore it, or give another --out"
            )
        for part in self.folder.glob(f"*{_PART}"):
            part.unlink()
        for file in (file for shard in self.shards for file in shard.files()):
            path = self.folder / file.name
            size = path.stat().st_size if path.is_file() else 0
            if size != file.bytes:
                raise ValueError(
                    f"{path} has {size:,} bytes, and had {file.bytes:,} when it was written; restore it, or give "
                    "another --out"
                )

    def _save(self) -> None:
        shards = [plain_shard(shard) for shard in self.shards]
        values = {"request": self._request, "from_text": self.from_text, "shards": shards}
        write_whole(self.folder / PROGRESS_FILE, json.dumps(values).encode())

    def _begin(self) -> None:
        self._name = f"shard-{len(self.shards):05d}"
        self._part = self.folder / f"{self._name}.tokens{_PART}"
        self._file = self._part.open("wb")
        self._digest = hashlib.sha256()
        self._ends: list[int] = []
        self._hashes: list[int] = []
        self._name_ends: list[int] = []
        self._names = bytearray()
        self._flags: list[np.ndarray] = []  # of the shard's tokens, whether each is to be predicted
        self._tokens = self._max_id = 0

    def add(self, coded: Coded) -> None:
        """Write documents; shards that they complete are on the disk when this returns."""
        self.from_text &= coded.from_text
        start = begun = 0
        for name, length in zip(coded.names, coded.lengths.tolist()):
            self._names += name.encode("utf-8", "surrogateescape")
            self._name_ends.append(len(self._names))
            self._hashes.append(name_hash(name))
            self._tokens += length
            self._ends.append(self._tokens)
            start += length
            if self._tokens >= self._shard_tokens:
                self._write(coded.ids[begun:start])
                begun = start
                self._finish()
                self._begin()
        self._write(coded.ids[begun:start])

    def _write(self, ids: np.ndarray) -> None:
        if ids.size:
            if self._marks:
                self._flags.append(trained(ids))
            ids = plain_ids(ids)
            raw = ids.astype(self._dtype).tobytes()
            self._file.write(raw)
            self._digest.update(raw)
            self._max_id = max(self._max_id, int(ids.max()))

    def _finish(self) -> None:
        """The shard that is being written becomes whole."""
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._file.close()
        path = self.folder / f"{self._name}.tokens"
        _rename(self._part, path)
        columns = ((self._ends, "<i8"), (self._hashes, "<u8"), (self._name_ends, "<i8"))
        index = b"".join(np.array(column, dtype).tobytes() for column, dtype in columns) + bytes(self._names)
        index_file = write_whole(self.folder / f"{self._name}.index", index)
        tokens_file = ShardFile(path.name, size, self._digest.hexdigest())
        flags = pack_bits(np.concatenate(self._flags)) if self._marks else b""
        trained_file = write_whole(self.folder / f"{self._name}.trained", flags) if self._marks else None
        figures = (len(self._ends), self._tokens, self._max_id, self._source)
        self.shards.append(Shard(tokens_file, index_file, *figures, trained_file))
        self._save()

    def close(self) -> None:
        """The last shard, however short."""
        if self._ends:
            self._finish()
        else:
            self._file.close()
            self._part.unlink()

    def abandon(self) -> None:
        """Leave the shard that is being written; the whole ones stay for the next start."""
        self._file.close()

    def seal(self, manifest: str) -> None:
        """Write the manifest, which makes the folder complete."""
        write_whole(self.folder / MANIFEST_FILE, manifest.encode())
        (self.folder / PROGRESS_FILE).unlink()
