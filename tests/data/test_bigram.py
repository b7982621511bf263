"""The bigram baseline against a table that is counted by hand."""

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from data import bigram
from data.bigram import bigram_bits_per_byte
from data.config import DataConfig
from data.loader import PackedLoader


def loaders(config: DataConfig) -> tuple[PackedLoader, PackedLoader]:
    return PackedLoader(config, 258, 0), PackedLoader(config, 258, 0, "eval")


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    for i in range(12):
        (tmp_path / f"{i}.txt").write_bytes(bytes((i * j * j) % 7 for j in range(3 * i + 1)))
    return str(tmp_path / "*.txt")


@pytest.mark.parametrize("packing", ["best_fit", "stream", "padded"])
def test_bits_are_those_of_a_table_counted_token_by_token(packing: str, corpus: str) -> None:
    config = DataConfig(source="files", paths=[corpus], seq_len=16, rows=2, packing=packing, eval_fraction=0.4)
    train, held_out = loaders(config)
    assert train.indices is not None and held_out.indices is not None
    pairs: Counter = Counter()
    for i in train.indices.tolist():
        ids = train.source.tokens(i).tolist()
        pairs.update(pairwise(ids))
    seen: Counter = Counter()
    for (previous, _), count in pairs.items():
        seen[previous] += count
    bits, num_bytes = 0.0, 0
    pieces = [d for batch in held_out for d in batch.documents]
    for piece in pieces:
        ids = held_out.source.tokens(piece.document, piece.start, piece.stop).tolist()
        for previous, following in pairwise(ids):
            bits -= math.log2((pairs[previous, following] + 0.5) / (seen[previous] + 0.5 * 258))
            num_bytes += following < 256
    assert {p.document for p in pieces} == set(held_out.indices.tolist())
    assert bigram_bits_per_byte(train, held_out, add_k=0.5) == pytest.approx(bits / num_bytes, rel=1e-12)


def test_the_training_stream_does_not_move(corpus: str) -> None:
    train, held_out = loaders(DataConfig(source="files", paths=[corpus], seq_len=16, rows=2, eval_fraction=0.4))
    train.batch(2)
    before = train.state_dict()
    bigram_bits_per_byte(train, held_out)
    assert train.state_dict() == before


def test_the_standard_library_costs_about_three_and_a_half_bits() -> None:
    """Real text with a known figure: far from 8 bits (nothing learnt) and from what a longer memory could reach."""
    assert 3.3 < bigram_bits_per_byte(*loaders(DataConfig())) < 3.8


def test_drawn_documents_cost_their_entropy_and_the_ends() -> None:
    train, held_out = loaders(DataConfig(source="synthetic", mix="one_giant", seq_len=8192, rows=4))
    found = bigram_bits_per_byte(train, held_out, max_tokens=1 << 20)
    assert 0 < found - train.source.entropy_bits < 0.2  # type: ignore[attr-defined]


def test_fewer_training_tokens_cost_more() -> None:
    train, held_out = loaders(DataConfig(eval_rows=8))
    assert bigram_bits_per_byte(train, held_out, max_tokens=10_000) > bigram_bits_per_byte(train, held_out) + 0.2


def test_tokens_that_are_no_bytes_are_refused(tmp_path: Path, corpus: str) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text('{"tokens": [1, 2]}\n' * 30)
    with pytest.raises(ValueError, match="tokenised beforehand"):
        bigram_bits_per_byte(*loaders(DataConfig(source="files", paths=[str(path)], eval_fraction=0.4)))
    with pytest.raises(ValueError, match="predicts no bytes"):
        bigram_bits_per_byte(PackedLoader(DataConfig(), 258, 0), [])


@pytest.mark.parametrize("most", [50, 1 << 20])
def test_counting_says_how_far_it_is(source_keys, monkeypatch, most):
    monkeypatch.setattr(bigram, "_CHUNK", 20)
    config = DataConfig(source="files", **source_keys("files"), seq_len=64, rows=2, eval_fraction=0.2)
    train, held = PackedLoader(config, 258, 0), PackedLoader(config, 258, 0, "eval")
    said: list[tuple[int, int]] = []
    plain = bigram_bits_per_byte(train, held, max_tokens=most)
    assert bigram_bits_per_byte(train, held, max_tokens=most, counted=lambda *n: said.append(n)) == plain
    assert said == sorted(said) and {n for _, n in said} == {min(most, train.total_tokens())}
