"""Runs on mixtures, prepared tokens and tokenizer files: counts by source, exact resumption, what the hash covers."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from data.config import MixPart
from data.prepare.command import parse, prepare
from training.config import ConfigError, config_hash
from training.loop import train
from training.record.checkpoint import complete_checkpoints
from training.record.metrics import read_metrics

QUIET = Console(quiet=True)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(complete_checkpoints(folder / "checkpoints")[-1] / "model.safetensors")


def tokens_of(path: Path, out: Path, tokenizer: str = "byte") -> str:
    prepare(
        parse(
            ["--source", "files", "--paths", str(path), "--tokenizer", tokenizer, "--out", str(out), "--workers", "1"]
        ),
        QUIET,
    )
    return str(out)


def test_a_stopped_run_on_a_mixture_goes_on_bit_for_bit_and_counts_by_source(make_config, tmp_path):
    make_config()  # writes the corpus
    prepared = tokens_of(tmp_path / "corpus.jsonl", tmp_path / "tokens")
    parts = [
        MixPart("tokens", path=prepared, weight=0.7),
        MixPart("synthetic", mix="wlb", weight=0.1, label="drawn"),
        MixPart("files", paths=[str(tmp_path / "corpus.jsonl")], weight=0.2),
    ]
    data = {"source": "mix", "paths": [], "sources": parts}
    train(make_config(data=data, run={"dir": str(tmp_path / "a")}), QUIET)
    train(make_config(data=data, run={"dir": str(tmp_path / "b"), "stop_at": 3}), QUIET)
    train(make_config(data=data, run={"dir": str(tmp_path / "b")}), QUIET)
    first, second = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(first[name], second[name]) for name in first)
    rows, again = (read_metrics(tmp_path / folder / "metrics.jsonl") for folder in "ab")
    names = [f"data/tokens/{label}" for label in ("tokens", "drawn", "files")]
    for row, other in zip(rows, again, strict=True):
        assert sum(row.get(name, 0) for name in names) == row["train/tokens"]
        assert [row.get(name) for name in names] == [other.get(name) for name in names]
        assert row["data/epoch"] == min(row[f"data/epoch/{label}"] for label in ("tokens", "drawn", "files"))


def test_one_source_is_counted_under_its_name(make_config, tmp_path):
    train(make_config(), QUIET)
    for row in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert row["data/tokens/files"] == row["train/tokens"] and "data/epoch/files" not in row


def test_prepared_tokens_give_the_losses_of_the_text(make_config, tmp_path):
    train(make_config(run={"dir": str(tmp_path / "text")}), QUIET)
    prepared = tokens_of(tmp_path / "corpus.jsonl", tmp_path / "tokens")
    data = {"source": "tokens", "paths": [], "path": prepared, "tokenizer": "manifest"}
    train(make_config(data=data, run={"dir": str(tmp_path / "shards")}), QUIET)
    text, shards = (read_metrics(tmp_path / folder / "metrics.jsonl") for folder in ("text", "shards"))
    assert [r["train/loss"] for r in text] == [r["train/loss"] for r in shards]
    assert text[-1]["eval/bits_per_byte"] == shards[-1]["eval/bits_per_byte"]


def write_tokenizer(path: Path, extra: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=257, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([extra * 2] * 20, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))


def test_the_hash_of_a_tokenizers_file_is_part_of_the_runs_and_bits_are_of_bytes(make_config, tmp_path):
    path = tmp_path / "tokenizer.json"
    write_tokenizer(path, "to")
    config = make_config(data={"tokenizer": str(path)})
    config.validate()
    first = config_hash(config)
    outcome = train(config, QUIET)
    assert outcome.summary and 0 < outcome.summary["eval_bits_per_byte"] < 12
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["data"]["tokenizer_sha256"] == config.data.tokenizer_sha256 and len(config.data.tokenizer_sha256) == 64
    write_tokenizer(path, "be")
    with pytest.raises(ValueError, match=r"data\.tokenizer_sha256=[0-9a-f]{64}: another file"):
        config.validate()
    other = make_config(data={"tokenizer": str(path)})
    other.validate()
    assert config_hash(other) != first
    with pytest.raises(ValueError, match="tokenizer_sha256"):
        train(other, QUIET)  # the run folder is the other file's


def test_a_vocabulary_that_the_model_lacks_is_refused_before_the_data_is_read(make_config, tmp_path):
    write_tokenizer(tmp_path / "tokenizer.json", "to")
    config = make_config(data={"tokenizer": str(tmp_path / "tokenizer.json"), "paths": ["none.txt"]})
    config.model.vocab_size = 200
    with pytest.raises(ConfigError, match=r"tokenizer has 25\d ids and model\.vocab_size=200"):
        config.validate()
