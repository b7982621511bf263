"""A data set of the hub, from a folder and without a network: order, split, resumption and refusals."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from data.config import DataConfig
from data.loader import PackedLoader
from data.packing import PACKINGS
from data.sources import hub

ROWS = [170, 5, 16, 130]  # documents of each shard; one fills a block


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(hub, "BLOCK", 16)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hub")
    for shard, rows in enumerate(ROWS):
        texts = [f"<{shard}:{row}>" + "ab" * (row % 23) for row in range(rows)]
        pq.write_table(
            pa.table({"text": pa.array(texts, pa.string()), "id": list(range(rows))}), path / f"{shard}.parquet"
        )
    return path


def load(folder: Path, seed: int = 0, side: str = "train", **settings: Any) -> PackedLoader:
    keys: dict[str, Any] = {"seq_len": 64, "rows": 3, "lookahead": 8, "eval_fraction": 0.2, "eval_rows": 9, **settings}
    return PackedLoader(DataConfig(source="hub", path=str(folder), **keys), 258, seed, side)


def texts(loader: PackedLoader) -> list[str]:
    return [loader.tokenizer.decode(loader.source.tokens(i)).decode() for i in loader.documents()]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_pass_holds_every_document_once_and_the_splits_share_none(folder: Path, streaming: bool) -> None:
    train = texts(load(folder, streaming=streaming))
    held = texts(load(folder, 0, "eval", streaming=streaming))
    assert len(train) + len(held) == len({*train, *held}) == sum(ROWS)
    assert 30 < len(held) < 100
    assert held == texts(load(folder, 9, "eval", streaming=streaming))


def test_the_order_is_the_seeds_and_shuffles_shards_and_blocks(folder: Path) -> None:
    first, again, other = (list(load(folder, seed).documents()) for seed in (1, 1, 2))
    assert first == again != other and sorted(first) == sorted(other)
    assert first != sorted(first)
    loader = load(folder, 1)
    seen = Counter(d.name for step in range(220) for d in loader.batch(step).documents)
    assert loader.epoch >= 1 and set(seen) == {loader.source.name(i) for i in first}


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_resumed_stream_is_the_uninterrupted_one(folder: Path, packing: str, streaming: bool) -> None:
    for stop in (0, 1, 37, 130):
        first = load(folder, 3, packing=packing, streaming=streaming)
        for step in range(stop):
            first.batch(step)
        state = json.loads(json.dumps(first.state_dict()))
        resumed = load(folder, 3, packing=packing, streaming=streaming)
        resumed.load_state_dict(state)
        for step in range(stop, stop + 9):
            one, two = first.batch(step), resumed.batch(step)
            assert torch.equal(one.tokens, two.tokens) and torch.equal(one.labels, two.labels)
            assert one.documents == two.documents
        assert first.state_dict() == resumed.state_dict()


def test_parts_of_a_long_document_are_shuffled_in_its_block(tmp_path: Path) -> None:
    rows = [json.dumps({"text": chr(65 + i) * (600 if i == 3 else 40)}) for i in range(12)]
    (tmp_path / "x.jsonl").write_text("\n".join(rows))
    for packing, apart in (("best_fit", True), ("stream", False)):
        loader = load(tmp_path, 1, packing=packing, eval_fraction=0.0, lookahead=1)
        drawn = [piece for _ in range(12 + 9 * apart) if (piece := loader._order.pull()) is not None]
        assert sum(piece.length for piece in drawn) == 602 + 11 * 42  # one pass, every token once
        places = [n for n, piece in enumerate(drawn) if piece.document == 3]
        assert (len(places) > 1 and places != list(range(places[0], places[-1] + 1))) == apart


def test_a_stream_reads_on_and_holds_few_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[int, int]] = []
    real = hub.HubStream._read

    def counted(self: hub.HubStream, shard: int, block: int) -> list[Any]:
        opened.append((shard, block))
        return real(self, shard, block)

    monkeypatch.setattr(hub.HubStream, "_read", counted)
    loader = load(folder, eval_fraction=0.0)
    opened.clear()
    while loader.epoch == 0:
        loader.batch(loader.step)
    first_pass = opened[: opened.index(opened[0], 1)] if opened[0] in opened[1:] else opened
    assert len(first_pass) == len(set(first_pass))  # nothing is read twice


def test_json_lines_and_tokens(tmp_path: Path) -> None:
    rows = [json.dumps({"tokens": [1, 2, 3 + i]}) for i in range(40)]
    (tmp_path / "x.jsonl").write_text("\n".join(rows))
    loader = load(tmp_path, eval_fraction=0.0)
    batch = loader.batch(0)
    assert batch.label_tokens and batch.predicted_bytes == 0 and not loader.source.counts_bytes


def test_what_cannot_be_read_is_one_sentence(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for settings, message in [
        ({"text_key": "body"}, r"hub0/train has no column 'body'|has neither 'body' nor 'tokens'|no column 'body'"),
        ({"text_key": "id"}, r"'id' holds int, expected text"),
        ({"split": "nope"}, r"data\.path=.*nope"),
    ]:
        for streaming in (True, False):
            with pytest.raises(ValueError, match=message) as caught:
                load(folder, streaming=streaming, **settings).batch(0)
            assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"data\.path=.*: "):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"eval_fraction=0\.999999 leaves no document of the stream to train on"):
        load(folder, eval_fraction=0.999999).batch(0)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the package datasets, .*requirements-extras\.txt"):
        load(folder)
