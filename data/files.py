"""Documents in files: Python's standard library, text files (one document each) and JSON lines (one a line).

Opening a source reads every line once, to check it and to note where it lies; the text itself stays on disk.
"""

import glob
import hashlib
import json
import os
import sysconfig
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.config import DataConfig
from data.tokenizer import Tokenizer

TOKENS_KEY = "tokens"
# Tests of the library and its editor: present in some installs of Python and left out by others.
_STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__"}


class FileDocuments:
    """Documents that lie in files, indexed by file, offset and size; read when asked for."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, text_key: str) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._text_key = text_key
        self._paths: list[str] = []
        self._names: list[str] = []
        self._sizes: list[int] = []  # bytes of each file when it was indexed
        # Of each document: its file, first byte, bytes on disk, tokens, and line (0: the whole file is the document).
        self._file, self._offset, self._bytes = array("q"), array("q"), array("q")
        self._length, self._line = array("q"), array("q")
        self.counts_bytes = True

    @property
    def size(self) -> int:
        return len(self._length)

    def length(self, index: int) -> int:
        return self._length[index]

    def name(self, index: int) -> str:
        name = self._names[self._file[index]]
        return f"{name}:{self._line[index]}" if self._line[index] else name

    def fingerprint(self) -> str:
        digest = hashlib.blake2b("\0".join(self._names).encode("utf-8", "surrogateescape"), digest_size=16)
        for column in (self._file, self._line, self._length):
            digest.update(column.tobytes())
        return digest.hexdigest()

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        stop = self._length[index] if stop is None else stop
        if not 0 <= start <= stop <= self._length[index]:
            raise ValueError(f"tokens {start}:{stop} are outside {self.name(index)} of {self._length[index]} tokens")
        path, offset, size = self._paths[self._file[index]], self._offset[index], self._bytes[index]
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != self._sizes[self._file[index]]:
                raise self._changed(index)

            def read(low: int, high: int) -> bytes:
                file.seek(offset + low)
                return file.read(high - low)

            if not self._line[index]:
                return self._tokenizer.encode_span(read, size, start, stop)
            ids = self._parse(read(0, size), self.name(index))
        if len(ids) != self._length[index]:
            raise self._changed(index)
        return ids[start:stop]

    def _changed(self, index: int) -> ValueError:
        return ValueError(f"{self.name(index)} has changed since the run began; start again, with a copy if it grows")

    def add_text(self, path: str, name: str) -> None:
        """Index a file as one document, its bytes as they are."""
        size = os.path.getsize(path)
        self._add_file(path, name, size)
        self._add(0, size, self._tokenizer.length(size), 0)

    def add_json_lines(self, path: str, name: str) -> None:
        """Index a file of JSON objects, one a line; blank lines are no documents. ValueError names the line."""
        self._add_file(path, name, os.path.getsize(path))
        offset = 0
        with open(path, "rb") as file:
            for line, raw in enumerate(file, start=1):
                if raw.strip():
                    self._add(offset, len(raw), len(self._parse(raw, f"{name}:{line}")), line)
                offset += len(raw)

    def _add_file(self, path: str, name: str, size: int) -> None:
        self._paths.append(os.path.abspath(path))
        self._names.append(name)
        self._sizes.append(size)

    def _add(self, offset: int, num_bytes: int, length: int, line: int) -> None:
        columns = (self._file, self._offset, self._bytes, self._length, self._line)
        for column, value in zip(columns, (len(self._paths) - 1, offset, num_bytes, length, line)):
            column.append(value)

    def _parse(self, raw: bytes, where: str) -> NDArray[np.int32]:
        """The tokens of one JSON line."""
        try:
            record = json.loads(raw)
        except ValueError as error:  # bad JSON and bad UTF-8 alike
            raise ValueError(f"{where}: not a JSON object ({error})") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where}: expected a JSON object, found {type(record).__name__}")
        if self._text_key in record:
            text = record[self._text_key]
            if not isinstance(text, str):
                raise ValueError(f"{where}: {self._text_key!r} holds {type(text).__name__}, expected text")
            return self._tokenizer.encode(text)
        if TOKENS_KEY in record:
            self.counts_bytes = False  # someone else's ids: one is not a byte
            return self._check_ids(record[TOKENS_KEY], where)
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        raise ValueError(
            f"{where}: has neither {self._text_key!r} nor {TOKENS_KEY!r} (its keys: {keys}); set data.text_key"
        )

    def _check_ids(self, ids: Any, where: str) -> NDArray[np.int32]:
        if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
            raise ValueError(f"{where}: {TOKENS_KEY!r} must be a list of at least one integer")
        for bad in (min(ids), max(ids)):
            if not 0 <= bad < self._vocab_size:
                raise ValueError(
                    f"{where}: token id {bad} is outside the model's {self._vocab_size} ids; "
                    "raise model.vocab_size or tokenise the text again"
                )
        return np.array(ids, np.int32)


def from_stdlib(config: DataConfig, tokenizer: Tokenizer, vocab_size: int, seed: int) -> FileDocuments:
    """The .py files of the running Python's standard library, in sorted order; a file is a document.

    Tests, the bundled editor, installed packages and empty files are left out, so that installs of the same version
    agree on nearly all documents.

    Raises:
        ValueError: an installation without sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _STDLIB_LEFT_OUT]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    source = FileDocuments(tokenizer, vocab_size, config.text_key)
    for path in sorted(found):
        if path.is_file() and path.stat().st_size:
            source.add_text(str(path), path.relative_to(root).as_posix())
    if not source.size:
        raise ValueError(
            f"no .py files under {root}: this Python comes without its library's sources; "
            "use data.source=files data.paths=['YOUR/**/*.txt'] or data.source=synthetic"
        )
    return source


def from_paths(config: DataConfig, tokenizer: Tokenizer, vocab_size: int, seed: int) -> FileDocuments:
    """The files that `config.paths` name, in the order given, each glob's in sorted order and each file once.

    Raises:
        ValueError: a path without a file, files that hold no text, or a broken line (named by file and line).
    """
    source = FileDocuments(tokenizer, vocab_size, config.text_key)
    seen: set[str] = set()
    for pattern in config.paths:
        for path in _expand(pattern):
            if (real := os.path.realpath(path)) in seen:
                continue
            seen.add(real)
            if path.lower().endswith(".jsonl"):
                source.add_json_lines(path, path)
            else:
                source.add_text(path, path)
    empty = tokenizer.length(0)
    if source.counts_bytes and not any(source.length(i) > empty for i in range(source.size)):
        raise ValueError(f"data.paths={list(config.paths)}: the {len(seen)} files found hold no text")
    return source


def _expand(pattern: str) -> list[str]:
    expanded = os.path.expanduser(pattern)
    files = sorted(path for path in glob.glob(expanded, recursive=True) if os.path.isfile(path))
    if files:
        return files
    if os.path.isfile(expanded):  # a name with brackets in it
        return [expanded]
    if os.path.isdir(expanded):
        raise ValueError(f"data.paths: {pattern!r} is a folder; name its files, as in '{pattern.rstrip('/')}/**/*.txt'")
    raise ValueError(f"data.paths: {pattern!r} matches no file (looked from {os.getcwd()})")
