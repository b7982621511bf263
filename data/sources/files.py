"""Documents in files: Python's standard library, text files (one document each), JSON lines and parquet (one a row).

Opening a source reads every file once, to check it, to note where documents lie and to hash it (`contents.py`: a file
that changes afterwards is noticed when it is next read); the text itself stays on disk.
"""

import glob
import hashlib
import os
import sysconfig
from array import array
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.config import SourceConfig
from data.sources.contents import WatchedFiles, refuse_large
from data.sources.documents import FiniteDocuments, stop_of
from data.sources.kept import Kept
from data.sources.parquet import ParquetRows
from data.sources.records import Records
from data.tokenizers.tokenizer import ByteTokenizer, Tokenizer

# Holding records or packed text, which as one text document would train without a word.
_NOT_TEXT = (
    ".json", ".csv", ".tsv", ".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".arrow", ".feather", ".orc",
    ".avro", ".npy", ".npz", ".bin", ".pkl", ".pt", ".safetensors",
)  # fmt: skip
# Tests of the library and its editor: present in some installs of Python and left out by others.
_STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__"}

_OPEN = 8  # parquet files held open
CODED_BYTES = 64 << 20  # documents kept as ids: one that fills many rows is coded once
GROUP_BYTES = 256 << 20  # row groups kept decoded


class FileDocuments(FiniteDocuments):
    """Documents that lie in files, indexed by file and place; read when asked for.

    Bytes are coded span by span; another tokenizer codes a document whole, so opening codes all of them once for their
    lengths: `python -m data.prepare` does that once for all runs.
    """

    def __init__(self, tokenizer: Tokenizer, records: Records) -> None:
        self._tokenizer, self._records = tokenizer, records
        self._paths: list[str] = []
        self._names: list[str] = []
        self._files = WatchedFiles()
        self._parquet: set[int] = set()  # the files that are
        self._table = lru_cache(maxsize=_OPEN)(self._open_table)
        self._groups: Kept[tuple[int, int], Any] = Kept(GROUP_BYTES)
        # Of each document: its file, first byte (row group), bytes on disk (row in the group), tokens, and line or row
        # of the file (0: the whole file is the document).
        self._file, self._offset, self._bytes = array("q"), array("q"), array("q")
        self._length, self._line = array("q"), array("q")
        self._coded: Kept[int, NDArray[np.int32]] = Kept(CODED_BYTES)
        self.counts_bytes = True

    @property
    def size(self) -> int:
        return len(self._length)

    def length(self, index: int) -> int:
        return self._length[index]

    def lengths(self) -> NDArray[np.int64]:
        return np.array(self._length, np.int64)

    def name(self, index: int) -> str:
        name = self._names[self._file[index]]
        return f"{name}:{self._line[index]}" if self._line[index] else name

    def fingerprint(self) -> str:
        digest = hashlib.blake2b("\0".join(self._names).encode("utf-8", "surrogateescape"), digest_size=16)
        digest.update(self._files.digest().encode())
        for column in (self._file, self._line, self._length):
            digest.update(column.tobytes())
        return digest.hexdigest()

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        stop = stop_of(self, index, start, stop)
        if self._line[index] or not isinstance(self._tokenizer, ByteTokenizer):
            return self._coded.get(index, lambda: self._code(index))[start:stop]
        return self._tokenizer.encode_span(
            lambda low, high: self._read(index, low, high), self._bytes[index], start, stop
        )

    def _code(self, index: int) -> tuple[NDArray[np.int32], int]:
        """The whole document, read and coded again, and its bytes."""
        file = self._file[index]
        if file in self._parquet:
            group, table = self._offset[index], self._table(file)
            rows = self._groups.get((file, group), lambda: table.group(group))
            record = table.record(rows, self._bytes[index])
            self._files.confirm(file)
            ids, _ = self._records.ids(record, self.name(index))
        elif self._line[index]:
            ids, _ = self._records.json_ids(self._read(index, 0, self._bytes[index]), self.name(index))
        else:
            ids = self._records.encode(self._read(index, 0, self._bytes[index]), self.name(index))
        if len(ids) != self._length[index]:
            raise self._files.changed(file)
        ids.setflags(write=False)
        return ids, ids.nbytes

    def _read(self, index: int, low: int, high: int) -> bytes:
        """Bytes `low` to `high` of the document on disk."""
        offset = self._offset[index]
        return self._files.read(self._file[index], offset + low, offset + high)

    def add(self, path: str, name: str) -> None:
        """Index a file by its kind. ValueError names the line or row that is broken."""
        kind = kind_of(path)
        number = self._files.add(path, name)
        self._paths.append(os.path.abspath(path))
        self._names.append(name)
        {"json lines": self._add_json_lines, "parquet": self._add_parquet, "text": self._add_text}[kind](path, name)
        self._files.confirm(number)  # what was indexed is what was hashed

    def _add_text(self, path: str, name: str) -> None:
        """A file as one document."""
        size = self._files.size(len(self._paths) - 1)
        if isinstance(self._tokenizer, ByteTokenizer):
            length = self._tokenizer.length(size)
        else:
            length = len(self._records.encode(Path(path).read_bytes(), name))
        self._add(0, size, length, 0)

    def _add_json_lines(self, path: str, name: str) -> None:
        """A file of JSON objects, one a line; blank lines are no documents."""
        offset = 0
        with open(path, "rb") as file:
            for line, raw in enumerate(file, start=1):
                if raw.strip():
                    ids, from_text = self._records.json_ids(raw, f"{name}:{line}")
                    self.counts_bytes &= from_text  # someone else's ids: their bytes are not known
                    self._add(offset, len(raw), len(ids), line)
                offset += len(raw)

    def _add_parquet(self, path: str, name: str) -> None:
        """A parquet file, a document a row."""
        file = len(self._paths) - 1
        self._parquet.add(file)
        for number, (group, row, record) in enumerate(self._table(file).records(), start=1):
            ids, from_text = self._records.ids(record, f"{name}:{number}")
            self.counts_bytes &= from_text
            self._add(group, row, len(ids), number)

    def _open_table(self, file: int) -> ParquetRows:
        return ParquetRows(self._paths[file], self._names[file], self._records)

    def _add(self, offset: int, num_bytes: int, length: int, line: int) -> None:
        columns = (self._file, self._offset, self._bytes, self._length, self._line)
        for column, value in zip(columns, (len(self._paths) - 1, offset, num_bytes, length, line)):
            column.append(value)


def kind_of(path: str) -> str:
    """How a file's documents lie in it: json lines or parquet by its name, else text, whatever its bytes.

    Raises:
        ValueError: a name of another format.
    """
    lower = path.lower()
    if lower.endswith((".jsonl", ".ndjson")):
        return "json lines"
    if lower.endswith(".parquet"):
        return "parquet"
    if lower.endswith(_NOT_TEXT):
        raise ValueError(
            f"{path}: files are read as JSON lines (.jsonl, .ndjson), parquet or text, and {Path(path).suffix} is none "
            "of them; unpack or convert it, or give it the name of a text file to train on it as it is"
        )
    return "text"


def stdlib_files() -> list[tuple[str, str]]:
    """(path, name) of the .py files of the running Python's standard library, in sorted order.

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
    files = [p for p in sorted(found) if p.is_file() and p.stat().st_size]
    if not files:
        raise ValueError(
            f"no .py files under {root}: this Python comes without its library's sources; "
            "use data.source=files data.paths=['YOUR/**/*.txt'] or data.source=synthetic"
        )
    return [(str(path), path.relative_to(root).as_posix()) for path in files]


def listed_files(patterns: list[str]) -> list[tuple[str, str]]:
    """(path, name) of the files that `patterns` name, in the order given, each glob's sorted and each file once.

    A name is the path as seen from the working folder, or the whole path outside it, however the pattern was spelled:
    which documents are held out depends on their names.

    Raises:
        ValueError: a pattern without a file.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        for path in _expand(pattern):
            found.setdefault(os.path.realpath(path), path)
    return [(path, _name_of(path)) for path in found.values()]


def _name_of(path: str) -> str:
    whole, here = os.path.abspath(path), os.path.join(os.getcwd(), "")
    return whole.removeprefix(here)


def from_stdlib(config: SourceConfig, tokenizer: Tokenizer, vocab_size: int, seed: int, context: int) -> FileDocuments:
    """The standard library, a document a file (see `stdlib_files`)."""
    source = FileDocuments(tokenizer, Records.of(config, tokenizer, vocab_size))
    for path, name in stdlib_files():
        source.add(path, name)
    return source


def from_paths(config: SourceConfig, tokenizer: Tokenizer, vocab_size: int, seed: int, context: int) -> FileDocuments:
    """The files that `config.paths` name (see `listed_files`).

    Raises:
        ValueError: a path without a file, files that hold no text, or a broken line (named by file and line).
    """
    source = FileDocuments(tokenizer, Records.of(config, tokenizer, vocab_size))
    files = listed_files(config.paths)
    refuse_large([path for path, _ in files], "data.paths", config, tokenizer)
    for path, name in files:
        source.add(path, name)
    empty = len(tokenizer.encode(b""))
    if source.counts_bytes and not any(source.length(i) > empty for i in range(source.size)):
        raise ValueError(f"data.paths={list(config.paths)}: the {len(files)} files found hold no text")
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
