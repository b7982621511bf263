"""Mixtures: shares of tokens by weight, the sources' own orders, exact resumption, counts by source."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.bigram import bigram_bits_per_byte
from data.config import DataConfig, MixPart
from data.loader import PackedLoader
from data.order import MixtureOrder
from data.packing import PACKINGS

Keys = Callable[[str], dict[str, Any]]


def mixed(keys: Keys, *weights: tuple[str, float], **settings: Any) -> DataConfig:
    parts = [MixPart(source=source, weight=weight, **keys(source)) for source, weight in weights]
    shape = {"seq_len": 128, "rows": 4, "lookahead": 16, "eval_fraction": 0.4, "eval_rows": 8}
    return DataConfig(source="mix", sources=parts, **{**shape, **settings})


@pytest.mark.parametrize("packing", PACKINGS)
def test_shares_of_tokens_are_the_weights(packing: str, source_keys: Keys) -> None:
    third = "hub" if packing == "stream" else "stdlib"  # whose documents are longer than a row, and then come in parts
    config = mixed(source_keys, ("files", 0.5), (third, 0.2), ("tokens", 1.3), packing=packing)
    loader = PackedLoader(config, 258, 0)
    order = loader._order
    assert isinstance(order, MixtureOrder)
    while sum(order._drawn) < 60_000:
        loader.batch(loader.step)
    for tokens, weight in zip(order._drawn, (0.5, 0.2, 1.3)):
        assert abs(tokens - sum(order._drawn) * weight / 2.0) <= 128
    assert loader.epochs["tokens"] > loader.epochs["files"] > loader.epochs[third] == loader.epoch


def test_a_long_document_is_made_up_for(source_keys: Keys) -> None:
    loader = PackedLoader(mixed(source_keys, ("files", 0.5), ("synthetic", 0.5)), 258, 0)
    order = loader._order
    assert isinstance(order, MixtureOrder)
    longest = 0
    while sum(order._drawn) < 60_000:
        longest = max(longest, max(piece.length for _ in range(9) if (piece := order.pull())))
        assert abs(order._drawn[0] - order._drawn[1]) <= longest


def test_each_source_keeps_its_own_order_passes_and_held_out_documents(source_keys: Keys) -> None:
    alone = DataConfig(source="files", seq_len=128, rows=4, eval_fraction=0.4, **source_keys("files"))
    for split in ("train", "eval"):
        loader = PackedLoader(mixed(source_keys, ("stdlib", 3.0), ("files", 1.0)), 258, 7, split)
        single = PackedLoader(alone, 258, 7, split)
        pulled = [piece for _ in range(300) if (piece := loader._order.pull()) is not None]
        ours = [(p.epoch, p.document // 2, p.start, p.stop) for p in pulled if p.document % 2]
        theirs = [single._order.pull() for _ in ours]
        assert ours and ours == [tuple(p) for p in theirs if p is not None]


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_resumed_mixture_is_the_uninterrupted_one(packing: str, source_keys: Keys) -> None:
    config = mixed(source_keys, ("files", 0.3), ("hub", 0.3), ("synthetic", 0.4), packing=packing)
    for stop in (0, 1, 23):
        first = PackedLoader(config, 258, 4)
        for step in range(stop):
            first.batch(step)
        state = json.loads(json.dumps(first.state_dict()))
        resumed = PackedLoader(config, 258, 4)
        resumed.batch(0)
        resumed.load_state_dict(state)
        for step in range(stop, stop + 5):
            one, two = first.batch(step), resumed.batch(step)
            assert torch.equal(one.tokens, two.tokens) and one.documents == two.documents
        assert first.state_dict() == resumed.state_dict()


def test_counts_by_source_add_up(source_keys: Keys) -> None:
    batch = PackedLoader(mixed(source_keys, ("files", 1.0), ("tokens", 1.0)), 258, 0).batch(3)
    counts = batch.source_tokens()
    assert set(counts) == {"files", "tokens"} and sum(counts.values()) == batch.label_tokens
    names = Counter(d.name.split(":")[0] for d in batch.documents)
    assert set(names) == {"files", "tokens"}


def test_the_evaluation_mixes_held_out_documents_and_opens_nothing_twice(source_keys: Keys) -> None:
    config = mixed(source_keys, ("files", 1.0), ("synthetic", 1.0), ("tokens", 1.0), eval_rows=60)
    train = PackedLoader(config, 258, 0)
    held_out = PackedLoader(config, 258, 0, "eval", source=train.source)
    ours, theirs = train.source.sources, held_out.source.sources  # type: ignore[attr-defined]
    assert ours[0] is theirs[0] and ours[2] is theirs[2] and ours[1] is not theirs[1]
    first, again = list(held_out), list(held_out)
    assert [b.tokens.tolist() for b in first] == [b.tokens.tolist() for b in again] and first
    names = {d.name for b in first for d in b.documents}
    trained = {d.name for step in range(60) for d in train.batch(step).documents}
    assert not {n for n in names if not n.startswith("synthetic")} & trained
    assert {n.split(":")[0] for n in names} == {"files", "synthetic", "tokens"}
    assert bigram_bits_per_byte(train, held_out, max_tokens=20_000) > 0
    assert train.describe() == "30 documents of files, documents without end of synthetic, 30 documents of tokens"


def test_a_mixture_with_ids_made_beforehand_predicts_no_bytes(tmp_path: Path, source_keys: Keys) -> None:
    (tmp_path / "ids.jsonl").write_text('{"tokens": [1, 2, 3]}\n' * 9)
    config = mixed(source_keys, ("stdlib", 1.0), eval_fraction=0.0)
    config.sources.append(MixPart(source="files", paths=[str(tmp_path / "ids.jsonl")]))
    assert PackedLoader(config, 258, 0).batch(0).predicted_bytes == 0


def test_a_part_that_holds_out_nothing_is_named(tmp_path: Path, source_keys: Keys) -> None:
    (tmp_path / "one.txt").write_text("x")
    one = MixPart(source="files", paths=[str(tmp_path / "one.txt")], label="alone")
    config = DataConfig(source="mix", sources=[one, MixPart(source="files", **source_keys("files"))], eval_fraction=0.3)
    with pytest.raises(ValueError, match=r"holds out none of 1 documents of alone|leaves none of 1 documents of alone"):
        PackedLoader(config, 258, 0)


def test_a_state_of_other_weights_is_refused(source_keys: Keys) -> None:
    state = PackedLoader(mixed(source_keys, ("files", 1.0), ("tokens", 1.0)), 258, 0).state_dict()
    with pytest.raises(ValueError, match="corpus was"):
        PackedLoader(mixed(source_keys, ("files", 1.0), ("tokens", 2.0)), 258, 0).load_state_dict(state)


def test_the_schema_takes_a_list_of_sources_and_refuses_an_unknown_key() -> None:
    schema = OmegaConf.structured(DataConfig)
    given = {"source": "mix", "sources": [{"source": "stdlib", "weight": 0.3}, {"source": "synthetic", "mix": "code"}]}
    config = OmegaConf.to_object(OmegaConf.merge(schema, given))
    assert isinstance(config, DataConfig) and config.labels() == ["stdlib", "synthetic"]
    assert config.sources == [MixPart(weight=0.3), MixPart("synthetic", mix="code")]
    config.validate()
    with pytest.raises(OmegaConfBaseException, match="wieght"):
        OmegaConf.merge(schema, {"sources": [{"source": "stdlib", "wieght": 0.3}]})


def test_tokens_in_a_mixture_bring_the_tokenizer(source_keys: Keys) -> None:
    config = mixed(source_keys, ("stdlib", 1.0), ("tokens", 1.0), tokenizer="manifest")
    assert PackedLoader(config, 258, 0).batch(0).predicted_bytes > 0
