"""Packed batches against their documents; the stream's order, its resumption and what it refuses."""

import inspect
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data.loader
from data.batch import IGNORE, PackedBatch, build_batch
from data.config import DataConfig
from data.loader import PackedLoader
from data.packing import PACKINGS, Piece
from data.sources.mixes import MIXES
from data.sources.table import OPENERS, open_tokenizer

BYTES = torch.tensor([1] * 256 + [0] * 2)  # bytes of text that each id stands for
SIZES = [0, 1, 2, 3, 7, 13, 30, 31, 64, 100, 5, 6, 11, 40, 17, 9, 23, 1, 2, 19]  # bytes; rows hold 32 tokens


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 documents of odd sizes, three of them longer than a row, as JSON lines."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("corpus") / "odd.jsonl"
    lines = [json.dumps({"text": "".join(map(chr, rng.integers(32, 127, size)))}) for size in SIZES]
    path.write_text("\n".join(lines))
    return path


def config_of(path: Path, **settings: Any) -> DataConfig:
    return replace(
        DataConfig(source="files", paths=[str(path)], seq_len=32, rows=4, lookahead=6, eval_rows=6, eval_fraction=0.3),
        **settings,
    )


def equal(a: PackedBatch, b: PackedBatch) -> bool:
    return (
        torch.equal(a.tokens, b.tokens)
        and torch.equal(a.labels, b.labels)
        and torch.equal(a.positions, b.positions)
        and a.layout == b.layout
        and a.documents == b.documents
    )


class Listed:
    """A source of given token lists."""

    counts_bytes = True

    def __init__(self, *documents: list[int]) -> None:
        self.documents = documents
        self.size = len(documents)

    def length(self, index: int) -> int:
        return len(self.documents[index])

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        return np.array(self.documents[index][start:stop], np.int32)

    def name(self, index: int) -> str:
        return f"list[{index}]"

    def fingerprint(self) -> str:
        return "00"


def test_labels_are_shifted_before_any_split_so_shards_lose_none() -> None:
    """Shifting after the split would give [2 3 4 -100] and [6 7 8 -100]."""
    batch = build_batch(Listed([1, 2, 3, 4, 5, 6, 7, 8]), [[Piece(0, 0, 0, 8)]], 8, BYTES)
    left, right = batch.labels[0].chunk(2)
    assert left.tolist() == [2, 3, 4, 5]
    assert right.tolist() == [6, 7, 8, -100]


def test_a_row_is_its_documents_then_padding() -> None:
    source = Listed([1, 2, 3], [4], [5, 6, 7])
    rows = [[Piece(0, 0, 0, 3), Piece(0, 1, 0, 1)], [Piece(0, 2, 0, 3)], []]
    batch = build_batch(source, rows, 5, BYTES)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 0], [5, 6, 7, 0, 0], [0] * 5]
    assert batch.labels.tolist() == [[2, 3, -100, -100, -100], [6, 7, -100, -100, -100], [-100] * 5]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 0, 0], [0] * 5]
    assert batch.layout.starts.tolist() == [0, 3, 5]
    assert (batch.label_tokens, batch.predicted_bytes, batch.padding_tokens) == (4, 4, 8)
    assert (batch.num_documents, batch.cut_documents) == (3, 0)
    assert [(d.row, d.name) for d in batch.documents] == [(0, "list[0]"), (0, "list[1]"), (1, "list[2]")]


def test_a_cut_document_goes_on_as_a_new_one() -> None:
    """Its positions restart, and no label reaches over the cut: the row's loss is that of its documents alone."""
    batch = build_batch(Listed([1, 2, 3, 4, 5]), [[Piece(0, 0, 0, 3)], [Piece(0, 0, 3, 5)]], 3, BYTES)
    assert batch.labels.tolist() == [[2, 3, IGNORE], [5, IGNORE, IGNORE]]
    assert batch.positions.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert batch.cut_documents == 1 and [d.whole for d in batch.documents] == [False, False]


def test_end_tokens_inside_a_text_make_no_boundary() -> None:
    """Boundaries are data: neither token ids nor positions are asked where a document ends."""
    eos = 257
    batch = build_batch(Listed([256, 5, eos, 6, eos], [256, eos]), [[Piece(0, 0, 0, 5), Piece(0, 1, 0, 2)]], 8, BYTES)
    assert batch.layout.lengths.tolist() == [5, 2]
    assert batch.labels.tolist() == [[5, eos, 6, eos, IGNORE, eos, IGNORE, IGNORE]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 0]]
    assert batch.predicted_bytes == 2  # ends of documents are no bytes


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_row_of_a_batch_keeps_its_own_boundaries(packing: str, corpus: Path) -> None:
    """More than one row must not join documents, nor positions run on from one to the next."""
    loader = PackedLoader(config_of(corpus, packing=packing), 258, 0)
    for step in range(5):
        batch = loader.batch(step)
        assert batch.tokens.shape == batch.labels.shape == batch.positions.shape == (4, 32)
        assert batch.tokens.dtype == batch.labels.dtype == batch.positions.dtype == torch.int64
        flat, labels, positions = batch.tokens.flatten(), batch.labels.flatten(), batch.positions.flatten()
        covered = torch.zeros(128, dtype=torch.bool)
        for document, start, stop in zip(batch.documents, batch.layout.starts.tolist(), batch.layout.stops.tolist()):
            assert start // 32 == (stop - 1) // 32 == document.row
            whole = loader.source.tokens(document.document).tolist()
            assert flat[start:stop].tolist() == whole[document.start : document.stop]
            assert labels[start:stop].tolist() == [*whole[document.start + 1 : document.stop], IGNORE]
            assert positions[start:stop].tolist() == list(range(stop - start))
            assert document.whole == (stop - start == len(whole))
            covered[start:stop] = True
        assert (labels[~covered] == IGNORE).all() and not flat[~covered].any() and not positions[~covered].any()
        assert torch.equal(~covered, torch.from_numpy(batch.layout.is_padding()))
        assert batch.padding_tokens == int((~covered).sum())


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_document_is_seen_exactly_once_per_epoch(packing: str, corpus: Path) -> None:
    loader = PackedLoader(config_of(corpus, packing=packing), 258, 5)
    assert loader.indices is not None
    seen: dict[int, list[tuple[int, int]]] = defaultdict(list)
    while loader.epoch < 4:
        for d in loader.batch(loader.step).documents:
            seen[d.epoch] += [(d.document, t) for t in range(d.start, d.stop)]
    expected = [(int(d), t) for d in sorted(loader.indices) for t in range(loader.source.length(int(d)))]
    for epoch in (0, 1, 2):
        assert sorted(seen[epoch]) == expected
    assert seen[0] != seen[1]  # another order each time


@pytest.mark.parametrize("lookahead", [1, 6, 500])
@pytest.mark.parametrize("packing", PACKINGS)
def test_an_epoch_is_over_when_its_last_token_was_given_out(packing: str, lookahead: int, corpus: Path) -> None:
    """Not when the packer has pulled it: with a long look-ahead that is many steps, and passes, earlier."""
    loader = PackedLoader(config_of(corpus, packing=packing, lookahead=lookahead, rows=2), 258, 5)
    assert loader.indices is not None and (loader.epoch, loader.epochs) == (0, {"files": 0})
    size = sum(loader.source.length(int(d)) for d in loader.indices)
    given: Counter[int] = Counter()
    while given[3] < size:
        for d in loader.batch(loader.step).documents:
            given[d.epoch] += d.stop - d.start
        over = sum(tokens == size for tokens in given.values())
        assert loader.epoch == loader.epochs["files"] == loader.state_dict()["epochs"]["files"] == over
    assert over >= 1


@pytest.mark.parametrize("packing", PACKINGS)
def test_no_label_of_an_epoch_is_lost(packing: str, corpus: Path) -> None:
    """Every token is predicted once an epoch but the first of each document, and the first after each cut."""
    loader = PackedLoader(config_of(corpus, packing=packing), 258, 2)
    assert loader.indices is not None
    found = cuts = 0
    while loader.epoch < 3:
        batch = loader.batch(loader.step)
        labels = batch.labels.flatten()
        for d, start, stop in zip(batch.documents, batch.layout.starts.tolist(), batch.layout.stops.tolist()):
            found += int((labels[start:stop] != IGNORE).sum()) * (d.epoch == 0)
            cuts += (d.start > 0) * (d.epoch == 0)
    assert found == sum(loader.source.length(int(i)) - 1 for i in loader.indices) - cuts


def test_best_fit_cuts_no_document_that_fits(corpus: Path) -> None:
    loader = PackedLoader(config_of(corpus), 258, 0)
    documents = [d for step in range(12) for d in loader.batch(step).documents]
    assert all(d.whole == (loader.source.length(d.document) <= 32) for d in documents)
    assert any(not d.whole for d in documents)


def test_parts_of_a_long_document_are_shuffled_among_the_others(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_bytes(b"L" * 3200)
    for i in range(100):
        (tmp_path / f"{i:03}.txt").write_bytes(b"s" * 30)
    loader = PackedLoader(config_of(tmp_path / "*.txt", eval_fraction=0.0, lookahead=1), 258, 0)
    rows = [d.name.endswith("long.txt") for step in range(50) for d in loader.batch(step).documents]
    assert sum(rows) > 90 and max(len(run) for run in "".join("L" if r else " " for r in rows).split()) < 20


@settings(max_examples=25)
@given(data=st.data(), packing=st.sampled_from(list(PACKINGS)), source=st.sampled_from(["files", "synthetic"]))
def test_a_resumed_stream_is_the_uninterrupted_one(
    data: st.DataObject, packing: str, source: str, corpus: Path
) -> None:
    config = config_of(corpus, packing=packing)
    if source == "synthetic":
        config = replace(config, source="synthetic", paths=[], mix="one_giant")
    seed = data.draw(st.integers(0, 5))
    stop = data.draw(st.integers(0, 12))
    first = PackedLoader(config, 258, seed)
    for step in range(stop):
        first.batch(step)
    state = json.loads(json.dumps(first.state_dict()))
    resumed = PackedLoader(config, 258, seed)
    for step in range(data.draw(st.integers(0, 3))):
        resumed.batch(step)  # whatever it did before is forgotten
    resumed.load_state_dict(state)
    assert resumed.step == stop and resumed.epoch == first.epoch
    for step in range(stop, stop + 4):
        assert equal(first.batch(step), resumed.batch(step))
    assert first.state_dict() == resumed.state_dict()


@given(steps=st.lists(st.integers(0, 15), min_size=1, max_size=6))
@settings(max_examples=20)
def test_a_batch_is_a_function_of_seed_and_step(steps: list[int], corpus: Path) -> None:
    jumping = PackedLoader(config_of(corpus), 258, 1)
    straight = [batch for batch, _ in zip(PackedLoader(config_of(corpus), 258, 1), range(16))]
    for step in steps:
        assert equal(jumping.batch(step), straight[step])
        assert jumping.step == step + 1


def test_seeds_give_different_orders(corpus: Path) -> None:
    first, second = (PackedLoader(config_of(corpus), 258, seed).batch(0) for seed in (0, 1))
    assert not torch.equal(first.tokens, second.tokens)


def test_peers_of_one_sequence_get_the_same_batch(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank is asked for, and none is read from the environment: a loader cannot be sharded, nor sharded twice."""
    batches = []
    for rank in ("0", "3"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "4")
        batches.append(PackedLoader(config_of(corpus), 258, 0).batch(2))
    assert equal(*batches)
    assert set(inspect.signature(PackedLoader).parameters) == {
        "config",
        "vocab_size",
        "seed",
        "split",
        "source",
        "prefix",
    }


@pytest.mark.parametrize("n", [1, 2, 4])
def test_micro_batches_are_the_batch(n: int, corpus: Path) -> None:
    batch = PackedLoader(config_of(corpus, packing="stream"), 258, 0).batch(1)
    parts = batch.micro_batches(n)
    assert [part.rows for part in parts] == [4 // n] * n
    assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)
    assert torch.equal(torch.cat([part.labels for part in parts]), batch.labels)
    assert torch.equal(torch.cat([part.positions for part in parts]), batch.positions)
    assert np.concatenate([part.layout.lengths for part in parts]).tolist() == batch.layout.lengths.tolist()
    assert [d.name for part in parts for d in part.documents] == [d.name for d in batch.documents]
    for part in parts:
        assert [d.row for d in part.documents] == part.layout.rows.tolist()
    for count in ("label_tokens", "predicted_bytes", "padding_tokens", "num_documents", "cut_documents"):
        assert sum(getattr(part, count) for part in parts) == getattr(batch, count)


@pytest.mark.parametrize("n", [0, 3, 8])
def test_micro_batches_that_do_not_divide_the_rows_are_refused(n: int, corpus: Path) -> None:
    batch = PackedLoader(config_of(corpus), 258, 0).batch(0)
    with pytest.raises(ValueError, match=rf"4 rows do not split into {n} micro-batches; use one of 1, 2, 4"):
        batch.micro_batches(n)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 64}, "seq_len was 32, is 64"),
        ({"rows": 2}, "rows was 4, is 2"),
        ({"packing": "stream"}, "packing was 'best_fit', is 'stream'"),
        ({"lookahead": 7}, "lookahead was 6, is 7"),
        ({"eval_fraction": 0.5}, "eval_fraction was 0.3, is 0.5"),
    ],
)
def test_a_state_of_another_configuration_is_refused(change: dict[str, Any], message: str, corpus: Path) -> None:
    state = PackedLoader(config_of(corpus), 258, 0).state_dict()
    with pytest.raises(ValueError, match=message):
        PackedLoader(config_of(corpus, **change), 258, 0).load_state_dict(state)


def test_a_state_of_another_corpus_seed_split_or_format_is_refused(corpus: Path, tmp_path: Path) -> None:
    state = PackedLoader(config_of(corpus), 258, 0).state_dict()
    grown = tmp_path / "grown.jsonl"
    grown.write_text(corpus.read_text() + '\n{"text": "one more"}')
    with pytest.raises(ValueError, match="documents was 20, is 21; corpus was '"):
        PackedLoader(config_of(grown), 258, 0).load_state_dict(state)
    with pytest.raises(ValueError, match="seed was 0, is 9"):
        PackedLoader(config_of(corpus), 258, 9).load_state_dict(state)
    with pytest.raises(ValueError, match="split was 'train', is 'eval'"):
        PackedLoader(config_of(corpus), 258, 0, "eval").load_state_dict(state)
    with pytest.raises(ValueError, match="format None"):
        PackedLoader(config_of(corpus), 258, 0).load_state_dict({})


def test_the_states_format_is_pinned(corpus: Path) -> None:
    """A checkpoint of an earlier version is read as what it is: raise the number where its meaning changes."""
    state = PackedLoader(config_of(corpus), 258, 0).state_dict()
    assert state["format"] == 3
    assert set(state) == {"format", "fingerprint", "step", "epochs", "order", "pending"}


def test_a_tokenizer_that_knows_no_bytes_trains_and_counts_none(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_bytes(config: DataConfig) -> Any:
        found = open_tokenizer(config)
        found.token_bytes = None
        return found

    monkeypatch.setattr(data.loader, "open_tokenizer", without_bytes)
    batch = PackedLoader(config_of(corpus), 258, 0).batch(0)
    assert batch.token_bytes is None and batch.predicted_bytes == 0 < batch.label_tokens


def test_the_state_is_small() -> None:
    loader = PackedLoader(DataConfig(), 258, 0)
    loader.batch(20)
    assert len(json.dumps(loader.state_dict())) < 20_000


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_evaluation_is_the_same_rows_each_time(packing: str, corpus: Path) -> None:
    loader = PackedLoader(config_of(corpus, packing=packing), 258, 0, "eval")
    first, again = list(loader), list(loader)
    other_seed = list(PackedLoader(config_of(corpus, packing=packing), 258, 77, "eval"))
    assert first and all(map(equal, first, again)) and len(first) == len(again) == len(other_seed)
    assert all(map(equal, first, other_seed))
    assert equal(loader.batch(0), first[0])
    assert all(batch.tokens.shape == (4, 32) for batch in first)
    assert sum(int((batch.layout.row_documents > 0).sum()) for batch in first) <= 6
    with pytest.raises(ValueError, match=rf"past the end of the eval split's {len(first)} batches"):
        loader.batch(len(first))


def test_a_short_evaluation_fills_its_last_batch_with_padding(corpus: Path) -> None:
    whole = list(PackedLoader(config_of(corpus, eval_rows=1000), 258, 0, "eval"))
    held_out = PackedLoader(config_of(corpus, eval_rows=1000), 258, 0, "eval")
    assert held_out.indices is not None
    tokens = sum(batch.layout.valid_tokens for batch in whole)
    assert tokens == sum(held_out.source.length(int(i)) for i in held_out.indices)
    one = list(PackedLoader(config_of(corpus, eval_rows=1), 258, 0, "eval"))
    assert len(one) == 1 and one[0].layout.row_documents[1:].tolist() == [0, 0, 0]


def test_train_and_eval_share_no_document(corpus: Path) -> None:
    train, held_out = (PackedLoader(config_of(corpus), 258, 0, split) for split in ("train", "eval"))
    assert train.indices is not None and held_out.indices is not None
    assert sorted([*train.indices, *held_out.indices]) == list(range(20))
    drawn = DataConfig(source="synthetic", seq_len=64, rows=2, eval_rows=2)
    first, second = (PackedLoader(drawn, 258, 0, split).batch(0) for split in ("train", "eval"))
    assert not torch.equal(first.tokens, second.tokens)
    assert equal(second, PackedLoader(drawn, 258, 5, "eval").batch(0))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("packing", PACKINGS)
def test_every_mix_packs(mix: str, packing: str) -> None:
    loader = PackedLoader(DataConfig(source="synthetic", mix=mix, packing=packing, seq_len=513, rows=3), 258, 0)
    for step in (0, 1, 5):
        batch = loader.batch(step)
        assert batch.layout.valid_tokens + batch.padding_tokens == 3 * 513
        assert 0 < batch.predicted_bytes <= batch.label_tokens < batch.layout.valid_tokens + batch.cut_documents
        assert (packing != "stream") or batch.padding_tokens == 0


@pytest.mark.parametrize("source", OPENERS)
def test_every_source_loads(source: str, source_keys: Callable[[str], dict[str, Any]]) -> None:
    config = DataConfig(source=source, seq_len=31, rows=2, eval_fraction=0.4, **source_keys(source))
    batch = PackedLoader(config, 258, 0).batch(0)
    assert batch.source_tokens() == {source: batch.label_tokens}
    assert batch.tokens.shape == (2, 31) and batch.label_tokens > 0


def test_tokenised_documents_predict_no_bytes(tmp_path: Path) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text("\n".join(json.dumps({"tokens": [1, 2, 300 + i]}) for i in range(9)))
    batch = PackedLoader(config_of(path, eval_fraction=0.0), 400, 0).batch(0)
    assert batch.label_tokens > 0 and batch.predicted_bytes == 0


def test_bad_requests_are_refused_before_anything_runs(corpus: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer has 258 ids, model\.vocab_size=100"):
        PackedLoader(config_of(corpus), 100, 0)
    with pytest.raises(ValueError, match="split='test' is unknown; choose one of train, eval"):
        PackedLoader(config_of(corpus), 258, 0, "test")
    with pytest.raises(ValueError, match="seed=-1"):
        PackedLoader(config_of(corpus), 258, -1)
    with pytest.raises(ValueError, match="step=-1"):
        PackedLoader(config_of(corpus), 258, 0).batch(-1)
    with pytest.raises(ValueError, match=r"data\.eval_fraction=0 holds out no documents"):
        PackedLoader(config_of(corpus, eval_fraction=0.0), 258, 0, "eval")
    with pytest.raises(ValueError, match=r"data\.seq_len=1;"):
        PackedLoader(config_of(corpus, seq_len=1), 258, 0)
