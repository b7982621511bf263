"""What files hold: a hash of their content, and whether they still hold it.

A file is hashed once in a process for as long as its size, times and inode stay: those are compared after every read,
and where they differ the file is hashed again. A file that was written within the last SETTLING seconds may be written
again without another time, so until then it is hashed at every read.
"""

import hashlib
import os
import shlex
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import BinaryIO, NamedTuple, TypeVar

from data.config import SourceConfig
from data.sources.kinds import SOURCES
from data.tokenizers.tokenizer import Tokenizer

LARGEST = 8 << 30  # bytes of files that one source hashes at every start, some seconds of each rank; beyond: prepare
SETTLING = 2.0
_CHUNK = 1 << 20
T = TypeVar("T")


class Stamp(NamedTuple):
    """What a changed file changes."""

    size: int
    modified_ns: int
    changed_ns: int  # of content or inode: no program sets it
    inode: int
    device: int


class _Known(NamedTuple):
    stamp: Stamp
    digest: bytes
    settled: bool


class WatchedFiles:
    """Files by number, each with the hash of what it held when it was added."""

    def __init__(self) -> None:
        self._files: list[tuple[str, str]] = []  # path, name in messages
        self._known: list[_Known] = []
        self._first_seen: dict[int, tuple[Stamp, float]] = {}

    def add(self, path: str, name: str) -> int:
        """Hash a file; gives its number. ValueError for one that is not there, or that changes meanwhile."""
        number = len(self._files)
        self._files.append((os.path.abspath(path), name))
        self._known.append(self._with_file(number, lambda file: self._hashed(number, file)))
        return number

    def size(self, number: int) -> int:
        """Bytes of the file when it was hashed."""
        return self._known[number].stamp.size

    def read(self, number: int, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of a file. ValueError if it no longer holds what it did."""

        def read(file: BinaryIO) -> bytes:
            file.seek(start)
            raw = file.read(stop - start)
            self._confirm(number, file)  # after the read: what was read is what was hashed
            return raw

        return self._with_file(number, read)

    def confirm(self, number: int) -> None:
        """Raise ValueError if a file no longer holds what it did."""
        self._with_file(number, lambda file: self._confirm(number, file))

    def confirm_all(self) -> None:
        """`confirm` of every file."""
        for number in range(len(self._files)):
            self.confirm(number)

    def changed(self, number: int) -> ValueError:
        """The sentence for a file that does not hold what it did."""
        return ValueError(
            f"{self._files[number][1]} has changed since the run began; restore it, or start again with a copy that "
            "nobody writes to"
        )

    def digest(self) -> str:
        """Hex digits that change with the content of any file, and with their order."""
        whole = hashlib.blake2b(digest_size=16)
        for known in self._known:
            whole.update(known.digest)
        return whole.hexdigest()

    def _with_file(self, number: int, do: Callable[[BinaryIO], T]) -> T:
        path, name = self._files[number]
        try:
            with open(path, "rb") as file:
                return do(file)
        except OSError as error:
            raise ValueError(f"{name} cannot be read ({error.strerror or error}); restore it") from None

    def _confirm(self, number: int, file: BinaryIO) -> None:
        known = self._known[number]
        if known.settled and stamp_of(file) == known.stamp:
            return
        now = self._hashed(number, file)
        if now.digest != known.digest:
            raise self.changed(number)
        self._known[number] = now

    def _hashed(self, number: int, file: BinaryIO) -> _Known:
        stamp = stamp_of(file)
        first, since = self._first_seen.get(number, (None, 0.0))
        if first != stamp:
            since = time.monotonic()
            self._first_seen[number] = (stamp, since)
        old = time.time() - stamp.changed_ns / 1e9 > SETTLING or time.monotonic() - since > SETTLING
        digest = _settled_digest(file.name, stamp) if old else _digest(file)
        if stamp_of(file) != stamp:
            raise self.changed(number)
        if old:
            self._first_seen.pop(number, None)
        return _Known(stamp, digest, old)


def stamp_of(file: BinaryIO | os.PathLike[str]) -> Stamp:
    """The stamp of an open file, or of the one at a path."""
    found = os.stat(file) if isinstance(file, os.PathLike) else os.fstat(file.fileno())
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)


def refuse_large(paths: Sequence[str], key: str, config: SourceConfig, tokenizer: Tokenizer) -> None:
    """Raise ValueError where the files of `config` are more than a start should hash; it says how to prepare them."""
    total = sum(os.path.getsize(path) for path in paths)
    if total <= LARGEST:
        return
    options = {"paths": config.paths, "path": [config.path], "name": [config.name], "split": [config.split]}
    keys = [key for key in SOURCES[config.source].keys if key in options]
    words = ["--source", config.source, "--tokenizer", str(getattr(tokenizer, "path", "byte"))]
    for name in keys:
        given = [value for value in options[name] if value is not None]
        words += [f"--{name}", *given] if given else []
    if config.text_key != "text":
        words += ["--text-key", config.text_key]
    raise ValueError(
        f"{key}: {len(paths):,} files of {total / 1e9:,.1f} GB in all, and every start reads the whole of what it "
        f"trains on, up to {LARGEST / 1e9:,.1f} GB; prepare it once, python -m data.prepare --out DIR "
        f"{shlex.join(words)}, and use data=tokens data.path=DIR"
    )


@lru_cache(maxsize=1 << 16)
def _settled_digest(path: str, stamp: Stamp) -> bytes:
    with open(path, "rb") as file:
        if stamp_of(file) != stamp:
            raise OSError(0, "it was replaced while it was read")
        return _digest(file)


def _digest(file: BinaryIO) -> bytes:
    whole = hashlib.blake2b(digest_size=16)
    file.seek(0)
    while chunk := file.read(_CHUNK):
        whole.update(chunk)
    return whole.digest()
