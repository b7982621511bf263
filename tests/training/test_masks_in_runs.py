"""Chunks, prefixes and first keys in whole runs: the same losses alone and on four ranks; no labels in a prefix."""

import pytest
import torch

from data.batch import IGNORE
from data.loader import PackedLoader
from kernels.mask_spec import MaskSpec
from models.config import ModelConfig
from parallel.strategy import load_strategy
from tests.training.start.test_ranks import SLOW, rows, train
from training.config import ConfigError

MODELS = {
    "chunked and full": dict(chunk=[16, None]),
    "chunked with first keys, and a prefix": dict(chunk=[16, None], first=3, prefix=5),
    "window with first keys, a prefix, a sink": dict(window=[24, None], first=2, prefix=9, sink=True, recompute=True),
}


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_losses_alone_and_on_four_ranks(ranks, make_config, tmp_path, model: str):
    data = {"source": "synthetic", "paths": [], "seq_len": 192, "rows": 2}
    changes: dict = {"optim": SLOW, "model": MODELS[model], "data": data}
    train(make_config(**changes, run={"steps": 6, "dir": str(tmp_path / "one")}))
    alone = rows(tmp_path / "one")
    for name in ("flashcp_hsap", "zigzag_ring"):
        run = {"steps": 6, "dir": str(tmp_path / name)}
        config = make_config(**changes, run=run, strategy=vars(load_strategy(name)))
        assert ranks.run(train, config, world=4) == [(6, None)] * 4
        for one, four in zip(alone, rows(tmp_path / name), strict=True):
            assert four["train/loss"] == pytest.approx(one["train/loss"], rel=1e-5)
            assert four["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-5)
            assert four["perf/model_tflops"] > 0 and four["train/tokens"] == one["train/tokens"]
        assert four["eval/loss"] == pytest.approx(one["eval/loss"], rel=1e-5)


@pytest.mark.parametrize("prefix", [1, 2, 7, 1000])
def test_labels_inside_a_prefix_are_none(make_config, prefix: int):
    """Position p predicts p + 1, which it sees where both lie in the prefix; sources' counts add up all the same."""
    config = make_config()
    with_prefix = PackedLoader(config.data, 258, 0, prefix=prefix).batch(0)
    without = PackedLoader(config.data, 258, 0).batch(0)
    labels, plain = with_prefix.labels.flatten(), without.labels.flatten()
    for start, stop in zip(with_prefix.layout.starts.tolist(), with_prefix.layout.stops.tolist()):
        inside = min(start + prefix, stop) - 1
        assert (labels[start:inside] == IGNORE).all() and torch.equal(labels[inside:stop], plain[inside:stop])
    assert sum(with_prefix.source_tokens().values()) == with_prefix.label_tokens
    parts = with_prefix.micro_batches(2)
    assert sum(sum(part.source_tokens().values()) for part in parts) == with_prefix.label_tokens
    assert torch.equal(with_prefix.tokens, without.tokens)


def test_evaluation_and_bigram_count_the_same_labels(make_config, tmp_path):
    """With a prefix as long as any document nothing is predicted; with one of 1, everything."""
    results = {}
    for prefix in (None, 1, 30):
        config = make_config(model={"prefix": prefix}, run={"steps": 2, "dir": str(tmp_path / str(prefix))})
        train(config)
        results[prefix] = rows(tmp_path / str(prefix))
    assert [row["train/loss"] for row in results[None]] == [row["train/loss"] for row in results[1]]
    assert results[30][-1]["train/tokens"] < results[None][-1]["train/tokens"] / 2


def test_a_resumed_run_keeps_its_prefix(make_config):
    config = make_config()
    state = PackedLoader(config.data, 258, 0, prefix=4).state_dict()
    PackedLoader(config.data, 258, 0, prefix=4).load_state_dict(state)
    with pytest.raises(ValueError, match="prefix was 4, is None"):
        PackedLoader(config.data, 258, 0).load_state_dict(state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(chunk=[4, None, 4]), "model.chunk lists 3 layers, which does not divide model.layers=2"),
        (dict(chunk=[0]), "layer 0: model.chunk=0 must be at least 1"),
        (dict(window=[8, None], chunk=[8, None]), "layer 0: model.window=8 and chunk=8 do not go together"),
        (dict(first=4), "model.first=4 keeps a document's first keys beside a window or a chunk, and no layer has one"),
        (dict(chunk=[4], first=8), "layer 0: model.first=8 reaches beyond the first chunk=4"),
        (dict(prefix=0), "^model.prefix=0 must be at least 1, or leave prefix out"),
        (dict(first=0, window=[4]), "^model.first=0 must be at least 1"),
        (dict(prefix=10**15), "^model.prefix=1000000000000000 is longer than any sequence"),
        (dict(prefix=96), "model.prefix=96 leaves nothing to predict in rows of data.seq_len=96"),
    ],
)
def test_masks_that_are_none_are_refused_with_the_configuration(make_config, changes: dict, message: str):
    with pytest.raises((ConfigError, ValueError), match=message):
        make_config(model=changes).validate()


@pytest.mark.parametrize(("key", "value"), [("chunk", 64), ("window", "8")])
def test_a_size_alone_is_no_list(make_config, key: str, value: object):
    """What annotations refuse in a test, and a library's user may give."""
    config = make_config()
    setattr(config.model, key, value)
    with pytest.raises(ValueError, match=rf"^model.{key}={value!r} must be a list.*: model.{key}=\[{value}\]"):
        config.model.validate()


def test_each_layer_has_its_mask(make_config):
    model: ModelConfig = make_config(model=dict(window=[None, 8], chunk=[16, None], prefix=4, first=2)).model
    assert model.layer_masks() == [MaskSpec(chunk=16, prefix=4, first=2), MaskSpec(window=8, prefix=4, first=2)]
