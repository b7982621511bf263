"""Parquet files as documents: read by row group, refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.config import DataConfig
from data.sources.documents import Source
from data.sources.parquet import ParquetRows
from data.sources.records import Records
from data.sources.table import open_source
from data.tokenizers.tokenizer import ByteTokenizer

TEXTS = [f"row {i} é " * (i % 7) for i in range(60)]


def files(path: Path, vocab_size: int = 258, **settings: Any) -> Source:
    config = DataConfig(source="files", paths=[str(path)], **settings)
    return open_source(config, ByteTokenizer(), vocab_size, 0)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"id": list(range(60)), "text": TEXTS}), path, row_group_size=7)
    return path


def test_rows_are_documents_in_any_order(table: Path) -> None:
    source = files(table)
    assert source.size == 60 and source.counts_bytes and source.name(8) == f"{table}:9"
    for i in np.random.default_rng(0).permutation(60).tolist():
        assert ByteTokenizer().decode(source.tokens(i)) == TEXTS[i].encode()
        assert source.length(i) == len(TEXTS[i].encode()) + 2


def test_parquet_and_json_lines_hold_the_same_documents(table: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    one, two = files(table), files(tmp_path / "t.jsonl")
    assert [one.tokens(i).tolist() for i in range(60)] == [two.tokens(i).tolist() for i in range(60)]


def test_no_row_group_is_read_whole_in_order(tmp_path: Path) -> None:
    path = tmp_path / "big.parquet"
    pq.write_table(pa.table({"text": ["x" * 10] * 5000}), path, row_group_size=1000)
    rows = ParquetRows(str(path), "big", Records(ByteTokenizer(), 258, "text"))
    before = pa.total_allocated_bytes()
    peak = 0
    for _ in rows.records():
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert peak < 5 * 1000 * 14  # less than all groups' text and offsets


def test_columns_of_tokens_pass_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "ids.parquet"
    for kind in (pa.int64(), pa.int32(), pa.uint16()):
        pq.write_table(pa.table({"tokens": pa.array([[1, 2, 300], [5]], pa.list_(kind))}), path)
        source = files(path, 400)
        assert [source.tokens(i).tolist() for i in range(2)] == [[1, 2, 300], [5]] and not source.counts_bytes
        with pytest.raises(ValueError, match=r"ids\.parquet:1: token id 300 is outside the model's 258 ids"):
            files(path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"], "id": [1]}, r"has no column 'text' or 'tokens'; its columns are body, id: set data\.text_key"),
        ({"text": [1]}, r"column 'text' holds int64, expected text"),
        ({"text": ["a", None]}, r"bad\.parquet:2: 'text' holds NoneType, expected text"),
        ({"tokens": [[1], []]}, r"bad\.parquet:2: 'tokens' must be a list of at least one integer"),
        ({"tokens": [[1], None]}, r"bad\.parquet:2: 'tokens' must be"),
        ({"tokens": [[1, None]]}, r"bad\.parquet:1: 'tokens' must be"),
        ({"tokens": [[1.5]]}, r"bad\.parquet:1: 'tokens' must be"),
        ({"tokens": ["a"]}, r"bad\.parquet:1: 'tokens' must be"),
        ({"text": [""]}, r"files found hold no text"),
    ],
)
def test_what_is_broken_is_named(tmp_path: Path, columns: dict[str, list], message: str) -> None:
    path = tmp_path / "bad.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(ValueError, match=message) as caught:
        files(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_parquet_and_one_that_changes_are_named(tmp_path: Path, table: Path) -> None:
    (tmp_path / "no.parquet").write_text("hello")
    with pytest.raises(ValueError, match=r"no\.parquet is no parquet file \("):
        files(tmp_path / "no.parquet")
    source = files(table)
    table.write_bytes(table.read_bytes() + b"x")
    with pytest.raises(ValueError, match=r"t\.parquet has changed since the run began"):
        source.tokens(2)


def test_columns_that_cannot_be_told_apart_and_damaged_pages_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), path)
    with pytest.raises(ValueError, match=r"x\.parquet has 2 columns 'text'; rename all but one"):
        files(path)
    pq.write_table(pa.table({"a.b": ["c"], "a": [{"b": "d"}]}), path)
    with pytest.raises(ValueError, match=r"column 'a\.b' has a dot, which parquet reads as a path"):
        files(path, text_key="a.b")
    pq.write_table(pa.table({"text": [f"words {i} " * 50 for i in range(200)]}), path, compression="gzip")
    raw = bytearray(path.read_bytes())
    raw[200:1200] = bytes(1000)
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"x\.parquet is damaged \(") as caught:
        files(path)
    assert "\n" not in str(caught.value)


def test_another_column(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"content": ["abc"], "text": [3]}), path)
    assert ByteTokenizer().decode(files(path, text_key="content").tokens(0)) == b"abc"
