"""A run is the same under any default dtype and device: weights, batches, plans, losses, optimisers, checkpoints."""

import dataclasses
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import training.loop as loop
from kernels.mask_spec import MaskSpec
from models.config import ModelConfig
from models.decoder import Decoder
from models.initialise import initial_values
from models.loss import chunked_cross_entropy
from parallel.api import run_loopback
from parallel.plan.ir import AttentionShape
from parallel.plan.layout import PackedLayout
from parallel.strategy import load_strategy, preset_names
from tests.ambient import AMBIENTS, ambient
from tests.kernels.values import normal
from training.optim.kinds import OPTIMIZERS
from training.record.checkpoint import complete_checkpoints
from training.record.metrics import read_metrics

ambients = pytest.mark.parametrize("name", AMBIENTS)


@ambients
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_runs_that_stop_and_go_on(make_config, tmp_path: Path, optimizer: str, name: str) -> None:
    def run(folder: str) -> tuple[list[float], list[dict]]:
        config = make_config(
            run={"steps": 3, "dir": str(tmp_path / folder), "eval_every": 2}, optim={"name": optimizer},
            model={"sink": True, "qk_norm": True, "softcap": 20.0, "window": [16, None], "prefix": 2},
        )  # fmt: skip
        loop.train(dataclasses.replace(config, run=dataclasses.replace(config.run, stop_at=1)), Console(quiet=True))
        loop.train(config, Console(quiet=True))
        newest = complete_checkpoints(tmp_path / folder / "checkpoints")[-1]
        tensors = [load_file(newest / f"{part}.safetensors") for part in ("model", "optimizer")]
        return [row["train/loss"] for row in read_metrics(tmp_path / folder / "metrics.jsonl")], tensors

    losses, tensors = run("usual")
    with ambient(name):
        found = run("other")
    assert found[0] == losses
    for mine, others in zip(tensors, found[1], strict=True):
        assert mine.keys() == others.keys()
        for key in mine:
            assert mine[key].dtype == others[key].dtype and torch.equal(mine[key], others[key]), key


@ambients
@pytest.mark.parametrize("shape", ["norm.weight", "q_proj.bias", "self_attn.sinks", "o_proj.weight"])
def test_initial_weights(make_config, shape: str, name: str) -> None:
    config: ModelConfig = make_config().model
    usual = initial_values(config, f"layers.0.{shape}", (6, 5), 3)
    with ambient(name):
        found = initial_values(config, f"layers.0.{shape}", (6, 5), 3)
    assert found.dtype == torch.float32 and found.device.type == "cpu" and torch.equal(found, usual)
    with ambient(name):
        decoder = Decoder(config, 3)
    for key, value in Decoder(config, 3).state_dict().items():
        assert torch.equal(decoder.state_dict()[key], value)


@ambients
@pytest.mark.parametrize("preset", [n for n in preset_names() if n != "auto"])
def test_plans_that_run(preset: str, name: str) -> None:
    strategy = load_strategy(preset)
    layout = PackedLayout.from_lengths([9, 1, 6, 14], [2, 2], 20)
    mesh = strategy.mesh(1 if strategy.exchange == "none" else 4, 4, 4)
    shape, mask = AttentionShape(4, 4, 8, 8, "fp32"), MaskSpec(window=5)
    q, k, v, dout = (normal(40, 4, 8, seed=n) for n in range(4))
    fields = ("out", "lse", "dq", "dk", "dv")

    def run() -> list[torch.Tensor]:
        result = run_loopback(strategy.plan(strategy.shard(layout, mesh), shape, mask), q, k, v, dout)
        return [getattr(result, field) for field in fields]

    usual = run()
    with ambient(name):
        found = run()
    for field, a, b in zip(fields, usual, found):
        assert a.dtype == b.dtype and torch.equal(a, b), field


@ambients
def test_loss(name: str) -> None:
    labels = torch.tensor([0, 3, -100, 6, 2])

    def run() -> list[torch.Tensor]:
        hidden, weight = normal(5, 8).requires_grad_(), normal(7, 8, seed=1).requires_grad_()
        nll = chunked_cross_entropy(hidden, weight, labels, 2, 3.0)
        return [nll.detach(), *torch.autograd.grad(nll.sum(), (hidden, weight))]

    usual = run()
    with ambient(name):
        found = run()
    for a, b in zip(usual, found, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
