"""The text to prepare, as units of work in an order that depends on the input alone."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.config import SourceConfig
from data.sources.files import kind_of, listed_files, stdlib_files
from data.sources.hub import load, row_name, title
from data.sources.parquet import ParquetRows
from data.sources.records import Records

_UNIT_BYTES = 1 << 20  # text of a unit, about
_UNIT_RECORDS = 256  # rows of a unit read from a table


@dataclass(frozen=True)
class Unit:
    """Documents for one worker: references to text on disk, or records that were read already.

    Attributes:
        names: of each document, as the source itself names it: the split into train and eval reads them.
        spans: (path, first byte, bytes) of each document on disk; whole files, or lines of JSON.
        lines: whether the spans are lines of JSON.
        records: the documents' records instead of spans.
        size: bytes of input, for the progress bar.
    """

    names: tuple[str, ...]
    spans: tuple[tuple[str, int, int], ...] = ()
    lines: bool = False
    records: tuple[dict[str, Any], ...] = ()
    size: int = 0


@dataclass(frozen=True)
class Coded:
    """A unit's documents as ids, end to end; `from_text` is False where any was tokenised beforehand."""

    names: tuple[str, ...]
    lengths: NDArray[np.int64]
    ids: NDArray[np.int32]
    from_text: bool

    def after(self, documents: int) -> "Coded":
        """Without the first `documents`."""
        start = int(self.lengths[:documents].sum())
        return Coded(self.names[documents:], self.lengths[documents:], self.ids[start:], self.from_text)


def input_files(config: SourceConfig) -> list[tuple[str, str]]:
    """(path, name) of the files that are read; none for the hub, which has its own."""
    if config.source == "stdlib":
        return stdlib_files()
    return listed_files(config.paths) if config.source == "files" else []


def stamp(config: SourceConfig) -> list[list[Any]]:
    """Name, size and time of change of each input file: what must not change between a kill and its resumption."""
    found = []
    for path, name in _local_files(config.path) if config.source == "hub" else input_files(config):
        status = os.stat(path)
        found.append([name, status.st_size, status.st_mtime_ns])
    return found


def _local_files(path: str | None) -> list[tuple[str, str]]:
    """(path, name inside it) of all files of a folder; none of a data set that is named, whose text is not here."""
    root = Path(path or "").expanduser()
    if path is None or not root.is_dir():
        return []
    return [(str(file), file.relative_to(root).as_posix()) for file in sorted(root.rglob("*")) if file.is_file()]


def listing_hash(stamps: list[list[Any]]) -> str:
    """SHA-256 of the input files' names and sizes: the same on every machine with the same files."""
    return hashlib.sha256(json.dumps([[name, size] for name, size, _ in stamps]).encode()).hexdigest()


def units(config: SourceConfig, records: Records) -> Iterator[Unit]:
    """All documents of `config`, in the order in which the source itself numbers them.

    Raises:
        ValueError: an input that cannot be read.
    """
    if config.source == "hub":
        yield from _hub_units(config, records)
        return
    texts: list[tuple[str, str, int]] = []
    held = 0  # bytes of `texts`
    for path, name in input_files(config):
        kind = kind_of(path)
        if kind == "text":
            texts.append((path, name, os.path.getsize(path)))
            held += texts[-1][2]
        if texts and (kind != "text" or held >= _UNIT_BYTES):
            yield _text_unit(texts)
            texts, held = [], 0
        if kind == "json lines":
            yield from _line_units(path, name)
        elif kind == "parquet":
            table = ParquetRows(path, name, records)
            share = os.path.getsize(path) / max(1, table.rows)
            rows = ((f"{name}:{n}", record) for n, (_, _, record) in enumerate(table.records(), start=1))
            yield from _record_units(rows, share)
            table.close()
    if texts:
        yield _text_unit(texts)


def _text_unit(texts: list[tuple[str, str, int]]) -> Unit:
    spans = tuple((path, 0, size) for path, _, size in texts)
    return Unit(tuple(name for _, name, _ in texts), spans, size=sum(size for *_, size in texts))


def _line_units(path: str, name: str) -> Iterator[Unit]:
    names: list[str] = []
    spans: list[tuple[str, int, int]] = []
    offset = begun = 0
    with open(path, "rb") as file:
        for line, raw in enumerate(file, start=1):
            if raw.strip():
                names.append(f"{name}:{line}")
                spans.append((path, offset, len(raw)))
            offset += len(raw)
            if offset - begun >= _UNIT_BYTES and names:
                yield Unit(tuple(names), tuple(spans), True, size=offset - begun)
                names, spans, begun = [], [], offset
    if names:
        yield Unit(tuple(names), tuple(spans), True, size=offset - begun)


def _record_units(rows: Iterator[tuple[str, dict[str, Any]]], share: float = 0.0) -> Iterator[Unit]:
    """Units of records; `share` is the input's bytes that a record stands for."""
    held: list[tuple[str, dict[str, Any]]] = []
    size = 0
    for name, record in rows:
        held.append((name, record))
        size += sum(len(value) for value in record.values() if hasattr(value, "__len__"))
        if len(held) == _UNIT_RECORDS or size >= _UNIT_BYTES:
            yield Unit(tuple(n for n, _ in held), records=tuple(r for _, r in held), size=round(share * len(held)))
            held, size = [], 0
    if held:
        yield Unit(tuple(n for n, _ in held), records=tuple(r for _, r in held), size=round(share * len(held)))


def _hub_units(config: SourceConfig, records: Records) -> Iterator[Unit]:
    """Shard after shard, named as the stream names them; or row after row of a whole split."""
    data, top = load(config), title(config)
    if not config.streaming:
        yield from _record_units((row_name(top, i), records.kept(record)) for i, record in enumerate(data))
        return
    for shard in range(data.num_shards):
        part = data.shard(num_shards=data.num_shards, index=shard)
        yield from _record_units((row_name(top, shard, row), records.kept(record)) for row, record in enumerate(part))


def encode_unit(unit: Unit, records: Records) -> Coded:
    """The unit's documents as ids. ValueError names the first that is broken."""
    found: list[tuple[NDArray[np.int32], bool]] = []
    if unit.records:
        found = [records.ids(record, name) for record, name in zip(unit.records, unit.names)]
    else:
        for (path, offset, size), name in zip(unit.spans, unit.names):
            with open(path, "rb") as file:
                file.seek(offset)
                raw = file.read(size)
            if len(raw) != size or (not unit.lines and Path(path).stat().st_size != size):
                raise ValueError(f"{name} has changed since it was listed; start again, with a copy if it grows")
            found.append(records.json_ids(raw, name) if unit.lines else (records.encode(raw, name), True))
    lengths = np.array([ids.size for ids, _ in found], np.int64)
    return Coded(unit.names, lengths, np.concatenate([ids for ids, _ in found]), all(text for _, text in found))
