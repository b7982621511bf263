"""A small byte-level BPE and the same vocabulary as a rank file, trained here: no file is fetched."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from data.prepare.command import parse, prepare
from data.tokenizers.json_file import byte_alphabet
from data.tokenizers.rank_file import PATTERNS

TEXT = [
    "def function(self, number): return number + 12345",
    "it's the naïve café, don't\n\n  indent\ttabs",
    "雪 snow",
] * 9


def train(path: Path, pattern: str, special: list[str], ids: int = 300) -> Tokenizer:
    """A tokenizer.json with the words of TEXT, special tokens last, as the published ones have them."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERNS[pattern].regex), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=ids, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path))
    return tokenizer


def write_ranks(tokenizer: Tokenizer, path: Path) -> None:
    """The tokenizer's vocabulary as a rank file: the same ids."""
    to_byte = byte_alphabet()
    vocab = json.loads(tokenizer.to_str())["model"]["vocab"]
    lines = [
        f"{base64.b64encode(bytes(to_byte[c] for c in token)).decode()} {rank}"
        for token, rank in sorted(vocab.items(), key=lambda item: item[1])
    ]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`bpe("json")` and `bpe("ranks")`: the files."""
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer = train(folder / "tokenizer.json", "gpt2", ["<|endoftext|>"])
    write_ranks(tokenizer, folder / "gpt2.tiktoken")
    return lambda kind: folder / {"json": "tokenizer.json", "ranks": "gpt2.tiktoken"}[kind]


@pytest.fixture(scope="session")
def source_keys(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """`source_keys("files")`: the keys of DataConfig that point a source at 30 short documents, where it needs any."""
    folder = tmp_path_factory.mktemp("sources")
    lines = [json.dumps({"text": f"document {i} " * (1 + i % 5)}) for i in range(30)]
    (folder / "x.jsonl").write_text("\n".join(lines))
    (folder / "hub").mkdir()
    pq.write_table(pa.table({"text": [json.loads(line)["text"] for line in lines]}), folder / "hub" / "train.parquet")
    arguments = ["--source", "files", "--paths", str(folder / "x.jsonl"), "--tokenizer", "byte", "--workers", "1"]
    prepare(parse([*arguments, "--out", str(folder / "tokens")]), Console(quiet=True))
    keys: dict[str, dict[str, Any]] = {
        "files": {"paths": [str(folder / "x.jsonl")]},
        "hub": {"path": str(folder / "hub")},
        "tokens": {"path": str(folder / "tokens")},
    }
    return lambda source: keys.get(source, {})
