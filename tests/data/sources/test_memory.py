"""What is kept is bounded by bytes, however large documents are: of every source, and of the cache itself."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from data.config import DataConfig
from data.loader import PackedLoader
from data.prepare.command import parse, prepare
from data.sources import files, hub, synthetic
from data.sources.kept import OVERHEAD, Kept
from data.sources.table import OPENERS

LETTERS = 200_000  # of a document: 800 kB as ids
DOCUMENTS = 60
LIMIT = 2 << 20


def test_the_least_lately_used_goes_first_and_the_newest_stays() -> None:
    dropped: list[str] = []
    kept: Kept[str, str] = Kept(10 + 3 * OVERHEAD, lambda key, value: dropped.append(key + value))
    assert [kept.get(key, lambda key=key: (key.upper(), 5)) for key in "abac"] == ["A", "B", "A", "C"]
    assert dropped == ["bB"] and "a" in kept and "b" not in kept and kept.bytes == 2 * (5 + OVERHEAD)
    kept.grow("a", 1000)
    assert dropped == ["bB", "cC"] and list(kept) == ["a"] and kept.bytes == 1005 + OVERHEAD
    assert kept.get("a", lambda: ("other", 0)) == "A"
    kept.get("d", lambda: ("D", 1 << 40))
    assert list(kept) == ["d"] and len(kept) == 1


def texts() -> list[str]:
    return [chr(97 + n % 26) * LETTERS for n in range(DOCUMENTS)]


def json_lines(folder: Path) -> DataConfig:
    (folder / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    return DataConfig(source="files", paths=[f"{folder}/*"])


def text_files(folder: Path) -> DataConfig:
    for n, text in enumerate(texts()):
        (folder / f"{n}.txt").write_text(text)
    return DataConfig(source="files", paths=[f"{folder}/*"])


def parquet(folder: Path) -> DataConfig:
    pq.write_table(pa.table({"text": texts()}), folder / "x.parquet", row_group_size=2)
    return DataConfig(source="files", paths=[f"{folder}/*"])


def streamed(folder: Path) -> DataConfig:
    pq.write_table(pa.table({"text": texts()}), folder / "x.parquet", row_group_size=2)
    return DataConfig(source="hub", path=str(folder))


def whole(folder: Path) -> DataConfig:
    streamed(folder)
    return DataConfig(source="hub", path=str(folder), streaming=False)


def tokens(folder: Path) -> DataConfig:
    source = json_lines(folder).paths[0]
    command = f"--source files --paths {source} --tokenizer byte --workers 1 --out {folder.parent / 'out'}"
    prepare(parse(command.split()), Console(quiet=True))
    return DataConfig(source="tokens", path=str(folder.parent / "out"))


def drawn(folder: Path) -> DataConfig:
    return DataConfig(source="synthetic", mix="one_giant")


CASES: list[Callable[[Path], DataConfig]] = [json_lines, text_files, parquet, streamed, whole, tokens, drawn]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_large_documents_do_not_add_up(case: Callable[[Path], DataConfig], tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    for module, name in (
        (files, "CODED_BYTES"), (files, "GROUP_BYTES"), (hub, "KEPT_BYTES"), (hub, "BLOCK_BYTES"),
        (synthetic, "DRAWN_BYTES"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, LIMIT)
    (tmp_path / "corpus").mkdir()
    config = case(tmp_path / "corpus")
    config.seq_len, config.rows, config.lookahead, config.eval_fraction = 65_536, 1, 2, 0.0
    loader = PackedLoader(config, 258, 0)
    loader.batch(0)
    pool = pa.default_memory_pool()
    tracemalloc.start()
    before, arrow = tracemalloc.get_traced_memory()[0], pool.bytes_allocated()
    held = []
    for step in range(1, 120):
        loader.batch(step)
        held.append(tracemalloc.get_traced_memory()[0] - before + pool.bytes_allocated() - arrow)
    tracemalloc.stop()
    whole_corpus = DOCUMENTS * LETTERS
    # two caches at their limit, and what was being read beside them: a few documents, whatever their number
    assert max(held) < 2 * LIMIT + 5 * 4 * LETTERS < 0.7 * whole_corpus
    assert np.mean(held[60:]) < np.mean(held[20:60]) + LIMIT


def test_every_source_has_a_case() -> None:
    sources = {"json_lines": "files", "streamed": "hub", "tokens": "tokens", "drawn": "synthetic"}
    assert set(sources.values()) == OPENERS.keys() - {"stdlib"} and {c.__name__ for c in CASES} >= sources.keys()
