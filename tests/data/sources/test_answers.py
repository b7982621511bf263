"""Answers only: labels of prompts are ignored, from every source and from prepared shards, on resuming and when cut."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from rich.console import Console

from data.batch import IGNORE, PackedBatch
from data.bigram import bigram_bits_per_byte
from data.config import DataConfig
from data.loader import PackedLoader
from data.prepare.command import parse, prepare
from data.sources.marks import mark_by_bits, marked, pack_bits, plain_ids, trained

RECORDS = [{"question": "q" * (1 + n % 7), "answer": "a" * (n % 5) + str(n), "other": n} for n in range(30)]
CHATS = [
    {"messages": [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "u" * n},
        {"role": "assistant", "content": f"yes {n}"}, {"role": "user", "content": "more"},
        {"role": "assistant", "content": "no"}, *([{"role": "user", "content": "thanks"}] if n % 2 else []),
    ]} for n in range(12)
]  # fmt: skip
ANSWERS: dict[str, Any] = {"prompt_key": "question", "text_key": "answer"}


def write(folder: Path, records: list[dict], kind: str) -> str:
    path = folder / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=7)
    return str(path)


def loader_of(file: str, **keys: Any) -> PackedLoader:
    return PackedLoader(DataConfig(**{"source": "files", "paths": [file], "seq_len": 64, "rows": 3, **keys}), 258, 0)


def texts(batch: PackedBatch) -> list[tuple[bytes, bytes]]:
    """Of each document its text and the text of its labels; 256 and 257, its begin and end, as ^ and $."""
    found = []
    for start, stop in zip(batch.layout.starts.tolist(), batch.layout.stops.tolist()):
        ids, labels = (x.flatten()[start:stop].tolist() for x in (batch.tokens, batch.labels))
        shown = ["".join(chr(i) if i < 256 else "^$"[i - 256] for i in part if i != IGNORE) for part in (ids, labels)]
        found.append((shown[0].encode(), shown[1].encode()))
    return found


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_only_answers_are_labels(tmp_path: Path, kind: str):
    loader = loader_of(write(tmp_path, RECORDS, kind), eval_fraction=0.0, **ANSWERS)
    batch = loader.batch(0)
    expected = {f"^{r['question']}{r['answer']}$".encode(): f"{r['answer']}$".encode() for r in RECORDS}
    found = texts(batch)
    assert len(found) > 10 and all(expected[text] == labels for text, labels in found)
    assert batch.label_tokens == sum(len(labels) for _, labels in found) == sum(batch.source_tokens().values())
    assert batch.predicted_bytes == batch.label_tokens - len(found)  # the end is no byte
    assert int(batch.tokens.min()) >= 0 and loader.source.counts_bytes
    whole = loader_of(write(tmp_path, RECORDS, kind), eval_fraction=0.0, text_key="answer").batch(0)
    assert whole.label_tokens > 0 and not any(b"q" in text for text, _ in texts(whole))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_only_the_assistant_is_predicted(tmp_path: Path, kind: str):
    loader = loader_of(write(tmp_path, CHATS, kind), eval_fraction=0.0, messages_key="messages", seq_len=256)
    for text, labels in texts(loader.batch(0)):
        n = text.count(b"u") - 3 * text.count(b"user")  # not exact, but tells documents apart
        assert text.startswith(b"^system\nbe brief\nuser\n") and n >= -9
        last = b"" if text.endswith(b"user\nthanks\n$") else b"$"
        (number,) = [c["messages"][2]["content"] for c in CHATS if c["messages"][2]["content"].encode() + b"\n" in text]
        assert labels == number.encode() + b"\nno\n" + last


@pytest.mark.parametrize("packing", ["best_fit", "stream", "padded"])
def test_a_cut_document_keeps_its_marks_and_a_stream_resumes(tmp_path: Path, packing: str):
    records = [{"question": "q" * 50, "answer": "a" * 90}, *RECORDS]
    path = write(tmp_path, records, "jsonl")
    loader = loader_of(path, eval_fraction=0.0, packing=packing, **ANSWERS)
    batches = [loader.batch(step) for step in range(6)]
    letters = b"".join(labels for batch in batches for _, labels in texts(batch))
    assert b"q" not in letters and b"a" in letters
    again = loader_of(path, eval_fraction=0.0, packing=packing, **ANSWERS)
    first = loader_of(path, eval_fraction=0.0, packing=packing, **ANSWERS)
    first.batch(2)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert torch.equal(again.batch(3).labels, batches[3].labels)
    part = batches[1].select_rows(1, 3)
    assert part.label_tokens == sum(part.source_tokens().values()) == int((batches[1].labels[1:] >= 0).sum())


@pytest.mark.parametrize(("records", "keys"), [(RECORDS, ANSWERS), (CHATS, {"messages_key": "messages"})])
def test_prepared_shards_are_the_same_stream(tmp_path: Path, records: list[dict], keys: dict[str, str]):
    path, out = write(tmp_path, records, "jsonl"), tmp_path / "tokens"
    options = ["--source", "files", "--paths", path, "--tokenizer", "byte", "--out", str(out), "--shard-tokens", "90"]
    options += [part for key, value in keys.items() for part in (f"--{key.replace('_', '-')}", value)]
    manifest = prepare(parse([*options, "--workers", "2"]), Console(quiet=True))
    assert len(manifest.shards) > 1 and all(shard.trained_file for shard in manifest.shards)
    text = loader_of(path, seq_len=256, eval_fraction=0.0, **keys)
    tokens = loader_of(
        "", source="tokens", paths=[], path=str(out), tokenizer="manifest", seq_len=256, eval_fraction=0.0
    )
    for step in range(3):
        one, two = text.batch(step), tokens.batch(step)
        assert torch.equal(one.tokens, two.tokens) and torch.equal(one.labels, two.labels)
    index = max(range(tokens.source.size or 0), key=tokens.source.length)
    whole = tokens.source.tokens(index)
    for start in range(0, len(whole) - 9, 3):
        assert tokens.source.tokens(index, start, start + 9).tolist() == whole[start : start + 9].tolist()
    bits = out / "shard-00000.trained"
    bits.write_bytes(bytes([bits.read_bytes()[0] ^ 1]) + bits.read_bytes()[1:])
    with pytest.raises(ValueError, match="trained is damaged"):
        loader_of("", source="tokens", paths=[], path=str(out), tokenizer="manifest")


def test_a_manifest_without_marks_is_as_it_was(tmp_path: Path):
    path, out = write(tmp_path, [{"text": "abc"}], "jsonl"), tmp_path / "tokens"
    prepare(
        parse(["--source", "files", "--paths", path, "--tokenizer", "byte", "--out", str(out)]), Console(quiet=True)
    )
    text = (out / "manifest.json").read_text()
    assert "trained" not in text and "prompt_key" not in text and not list(out.glob("*.trained"))


@pytest.mark.parametrize("streaming", [True, False])
def test_hub(tmp_path: Path, streaming: bool):
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    write(tmp_path / "set", RECORDS, "jsonl")
    keys = {"source": "hub", "paths": [], "path": str(tmp_path / "set"), "streaming": streaming, **ANSWERS}
    found = texts(loader_of("", eval_fraction=0.0, **keys).batch(0))
    expected = {f"^{r['question']}{r['answer']}$".encode(): f"{r['answer']}$".encode() for r in RECORDS}
    assert len(found) > 10 and all(expected[text] == labels for text, labels in found)


@pytest.mark.parametrize(("record", "keys", "sentence"), [
    ({"question": "a"}, ANSWERS, "has no 'answer'.*data.prompt_key or data.text_key"),
    ({"answer": "a"}, ANSWERS, "has no 'question'"),
    ({"question": 3, "answer": "a"}, ANSWERS, "'question' holds int"),
    ({"tokens": [1, 2]}, ANSWERS, "has no 'question'"),
    ({"messages": "hello"}, {"messages_key": "messages"}, "message 0 of 'messages' must be"),
    ({"messages": [{"role": "user", "content": "a"}]}, {"messages_key": "messages"}, "nothing would be trained"),
    ({"messages": [{"role": "assistant"}]}, {"messages_key": "messages"}, "must be"),
])  # fmt: skip
def test_records_that_do_not_fit_are_named(tmp_path: Path, record: dict, keys: dict[str, str], sentence: str):
    path = write(tmp_path, [record], "jsonl")
    with pytest.raises(ValueError, match=rf"data.jsonl:1: .*{sentence}"):
        loader_of(path, eval_fraction=0.0, **keys)


def test_keys_that_do_not_go_together_are_refused():
    for keys, sentence in (
        ({"prompt_key": "a", "messages_key": "b"}, "two forms of a document"),
        ({"prompt_key": "text"}, "are both text"),
    ):
        with pytest.raises(ValueError, match=sentence):
            DataConfig(source="files", paths=["x"], **keys).validate()
    with pytest.raises(ValueError, match="reads no prompt_key"):
        DataConfig(prompt_key="a").validate()


def test_a_table_without_the_columns_names_those_it_has(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has no column .question.; its columns are a: set data\.prompt_key"):
        loader_of(write(tmp_path, [{"a": "b"}], "parquet"), **ANSWERS)


def test_the_bigram_table_counts_prompts_as_text(tmp_path: Path):
    path = write(tmp_path, RECORDS * 3, "jsonl")
    train = loader_of(path, eval_fraction=0.5, **ANSWERS)
    held_out = PackedLoader(train.config, 258, 0, split="eval")
    assert 0 < bigram_bits_per_byte(train, held_out) < 8


def test_marks():
    ids = np.array([0, 5, 65_535, 3, 0, 1, 2, 9, 7], np.int32)
    both = np.concatenate([marked(ids), ids])
    assert (plain_ids(both) == np.concatenate([ids, ids])).all() and trained(both).sum() == 9
    assert (marked(marked(ids)) == marked(ids)).all()
    bits = np.frombuffer(pack_bits(trained(both)), np.uint8)
    for first in range(18):
        for stop in range(first, 19):
            assert (mark_by_bits(plain_ids(both[first:stop]), bits, first) == both[first:stop]).all()
