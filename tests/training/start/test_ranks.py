"""Many ranks train as one process does: losses, gradients, refusals, checkpoints; in real gloo processes."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

import training.loop as loop
from data.loader import PackedLoader
from models.decoder import Decoder
from training.config import Config, ConfigError, Precision
from training.optim.build import gradient_norm
from training.record.checkpoint import complete_checkpoints
from training.record.metrics import read_metrics
from training.share import Share
from training.step import NonFiniteLoss, evaluate, forward_backward
from training.team import Team

SLOW = {"lr": 3e-3}  # at 1e-2 AdamW doubles the rounding of fp32 sums every few steps
WEIGHTS = ["replicated", "fully_sharded"]


def team_of(config: Config) -> Team:
    return Team(config, dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Team(config)


def train(config: Config) -> tuple[int, str | None]:
    """A job: the whole loop on this rank."""
    outcome = loop.train(config, Console(quiet=True), team_of(config))
    return outcome.step, outcome.stopped_by


def gradients(config: Config, keep: list[int]) -> tuple[float, float, list[Tensor]]:
    """A job: loss, norm and clipped gradients of a first batch of which only rows `keep` have labels."""
    team = team_of(config)
    share = Share(Decoder(config.model, seed=0), team, config.strategy)
    batch = PackedLoader(config.data, config.model.vocab_size, 0).batch(0)
    labels = torch.full_like(batch.labels, -100)
    labels[keep] = batch.labels[keep]
    batch = dataclasses.replace(batch, labels=labels)
    found = forward_backward(share.model, batch, config.run.accumulate, Precision.fp32, share)
    loss = share.total(found.loss)
    norm = float(gradient_norm(share.model, config.optim.clip_norm))
    from parallel.weights.data_parallel import whole

    return loss, norm, [whole(p.grad) for p in share.model.parameters() if p.grad is not None]


def held_out(config: Config) -> tuple[float, float | None]:
    """A job: the evaluation of fresh weights."""
    share = Share(Decoder(config.model, seed=0), team_of(config), config.strategy)
    result = evaluate(
        share.model, PackedLoader(config.data, config.model.vocab_size, 0, split="eval"), Precision.fp32, share=share
    )
    assert result is not None
    return result.loss, result.bits_per_byte


def train_poisoned(config: Config, at: int, rank: int) -> str:
    """A job: weights of `rank` alone go bad in step `at`; the sentence with which this rank ends."""
    original, calls = loop.forward_backward, []

    def poisoned(model: Decoder, batch: Any, *rest: Any) -> Any:
        calls.append(1)
        if len(calls) == at and dist.get_rank() == rank:
            with torch.no_grad():
                model.layers[0].mlp.up_proj.weight.fill_(float("nan"))
        return original(model, batch, *rest)

    loop.forward_backward = poisoned
    try:
        train(config)
    except NonFiniteLoss as error:
        return str(error)
    finally:
        loop.forward_backward = original
    return "no error"


def train_signalled(config: Config, at: int, rank: int, number: int) -> tuple[int, str | None]:
    """A job: one rank gets a signal in step `at`."""
    original, calls = loop.forward_backward, []

    def signalled(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == at and dist.get_rank() == rank:
            os.kill(os.getpid(), number)
        return original(*arguments)

    loop.forward_backward = signalled
    try:
        return train(config)
    finally:
        loop.forward_backward = original


def refused(config: Config, differing: dict[str, dict[str, Any]]) -> str:
    """A job: how this rank refuses when the last one composed `differing` keys."""
    if dist.get_rank() == dist.get_world_size() - 1:
        for section, values in differing.items():
            setattr(config, section, dataclasses.replace(getattr(config, section), **values))
    try:
        train(config)
    except ConfigError as error:
        return str(error)
    return "no error"


def decide(kind: str) -> str:
    """A job: what a failure of one rank becomes on this one."""
    rank = dist.get_rank()

    def make() -> int:
        if rank == (0 if kind == "first_decides" else 1):
            raise ConfigError("only I know that")
        return rank

    try:
        getattr(Team(loop_config(), rank, dist.get_world_size()), kind)(make)
    except ConfigError as error:
        return str(error)
    return "no error"


def loop_config() -> Config:
    from data.config import DataConfig
    from models.config import ModelConfig

    return Config(model=ModelConfig(**SMALL), data=DataConfig(), run=loop_run())


def loop_run() -> Any:
    from training.config import RunConfig

    return RunConfig(device="cpu")


SMALL: dict[str, Any] = dict(
    vocab_size=258, layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=32, max_positions=128, norm_eps=1e-5,
    tied_embeddings=True, rope_theta=10000.0,
)  # fmt: skip


def rows(folder: Path) -> list[dict]:
    return read_metrics(folder / "metrics.jsonl")


def close(a: Path, b: Path, tolerance: float) -> None:
    first, second = rows(a), rows(b)
    assert len(first) == len(second) == 20
    for x, y in zip(first, second):
        for name in ("train/loss", "train/grad_norm"):
            assert x[name] == pytest.approx(y[name], rel=tolerance), (x["step"], name)
        assert x["train/tokens"] == y["train/tokens"]
    assert first[-1]["eval/loss"] == pytest.approx(second[-1]["eval/loss"], rel=tolerance)


@pytest.fixture
def one_process(make_config, tmp_path):
    """The folder of twenty steps of one process."""
    config = make_config(run={"steps": 20, "dir": str(tmp_path / "one")}, optim=SLOW)
    train(config)
    return tmp_path / "one"


@pytest.mark.parametrize("weights", WEIGHTS)
def test_losses_and_norms_of_twenty_steps_equal_one_process(ranks, make_config, tmp_path, one_process, weights):
    for world in (2, 4):
        folder = tmp_path / f"{weights}{world}"
        config = make_config(run={"steps": 20, "dir": str(folder)}, strategy={"weights": weights}, optim=SLOW)
        assert ranks.run(train, config, world=world) == [(20, None)] * world
        close(folder, one_process, 1e-6)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("keep", [[0, 1, 2, 3], [1], [], [0, 2, 3]], ids=["all", "one row", "no row", "unequal"])
def test_gradient_is_the_sum_over_valid_tokens_whoever_holds_them(ranks, make_config, weights, keep):
    """Rows without labels leave ranks without valid tokens: they add nothing, and nobody waits for them."""
    for accumulate, world in ((1, 2), (2, 2), (1, 4)):
        changes: dict[str, dict] = {"run": {"accumulate": accumulate}, "optim": {"clip_norm": 0.05}}
        loss, norm, grads = gradients(make_config(**changes), keep)
        found = ranks.run(gradients, make_config(**changes, strategy={"weights": weights}), keep, world=world)
        for other_loss, other_norm, other_grads in found:
            assert other_loss == pytest.approx(loss, rel=1e-6)
            assert other_norm == pytest.approx(norm, rel=1e-5)
            for a, b in zip(grads, other_grads, strict=True):
                assert torch.allclose(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_evaluation_is_one_processs(ranks, make_config, weights):
    """Unequal counts per replica: a mean of ranks' means would be another number."""
    changes: dict[str, dict] = {"data": {"packing": "padded", "eval_rows": 6}}
    loss, bits = held_out(make_config(**changes))
    for found in ranks.run(held_out, make_config(**changes, strategy={"weights": weights}), world=4):
        assert found == pytest.approx((loss, bits), rel=1e-6)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_loss_that_is_not_finite_is_refused_by_all_ranks_at_once(ranks, make_config, tmp_path, weights):
    config = make_config(run={"save_every": 1}, strategy={"weights": weights})
    first, second = ranks.run(train_poisoned, config, 3, 1, world=2)
    assert first == second and first.startswith("step 3: loss nan is not finite; documents: ")
    named = first.split("documents: ")[1]
    batch = PackedLoader(config.data, 258, 0).batch(2)
    if weights == "replicated":  # rank 1's rows alone; sharded weights are everybody's
        assert batch.documents[-1].name.split("/")[-1] in named or batch.select_rows(2, 4).documents[0].name in named
        assert batch.documents[0].name not in named.split(". Lower")[0].split(", ")
    assert [p.name for p in complete_checkpoints(tmp_path / "run" / "checkpoints")][-1] == "step_00000002"


@pytest.mark.parametrize("rank", [0, 1])
def test_signal_to_one_rank_stops_all_after_the_same_step(ranks, make_config, tmp_path, rank):
    assert ranks.run(train_signalled, make_config(), 3, rank, 15, world=2) == [(3, "SIGTERM")] * 2
    assert complete_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == "step_00000003"


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("world", [2, 4])
def test_resumed_run_is_bitwise_the_straight_one(ranks, make_config, tmp_path, weights, world):
    for folder, stops in (("straight", [None]), ("resumed", [4, None])):
        for stop_at in stops:
            run = {"steps": 8, "stop_at": stop_at, "dir": str(tmp_path / folder)}
            ranks.run(train, make_config(run=run, strategy={"weights": weights}), world=world)
    a, b = ([(r["train/loss"], r["train/grad_norm"]) for r in rows(tmp_path / n)] for n in ("straight", "resumed"))
    assert len(a) == 8 and a == b


def test_another_number_of_ranks_goes_on_from_the_checkpoint(ranks, make_config, tmp_path, one_process):
    """nproc is no part of a run's name: sharded on four ranks, then on two, then in one process."""
    changes: dict[str, dict] = {"strategy": {"weights": "fully_sharded"}, "optim": SLOW}
    for stop_at, world in ((7, 4), (14, 2)):
        run = {"steps": 20, "stop_at": stop_at, "dir": str(tmp_path / "moved")}
        ranks.run(train, make_config(run=run, **changes), world=world)
    train(make_config(run={"steps": 20, "dir": str(tmp_path / "moved")}, **changes))
    close(tmp_path / "moved", one_process, 1e-6)


def test_rank_zero_alone_writes_and_its_rows_count_all_ranks(ranks, make_config, tmp_path):
    config = make_config(run={"steps": 2})
    ranks.run(train, config, world=4)
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == [1, 2]
    batch = PackedLoader(config.data, 258, 0).batch(0)
    assert found[0]["train/tokens"] == batch.label_tokens
    per_second = found[0]["perf/tokens_per_s"] * found[0]["perf/step_s"]
    assert per_second == pytest.approx(batch.tokens.numel() - batch.padding_tokens)
    assert json.loads((tmp_path / "run" / "provenance.json").read_text())[0]["ranks"] == 4


def test_configurations_that_differ_are_refused_on_every_rank(ranks, make_config):
    first, second = ranks.run(refused, make_config(), {"optim": {"lr": 0.5}, "run": {"eval_every": 3}}, world=2)
    assert first == second and "rank 1 composed another configuration" in first
    assert "optim.lr is 0.5 there, 0.01 on rank 0" in first and "run.eval_every is 3 there" in first


@pytest.mark.parametrize("kind", ["first_decides", "together"])
def test_one_ranks_refusal_is_everybodys(ranks, kind):
    assert ranks.run(decide, kind, world=2) == ["only I know that"] * 2


def test_busy_run_folder_is_refused_on_every_rank(ranks, make_config):
    from training.record.folder import RunFolder

    config = make_config()
    with RunFolder(config):
        found = ranks.run(refused, config, {}, world=2)
    assert found[0] == found[1] and "another process is training in" in found[0]


@pytest.mark.parametrize(
    ("changes", "world", "named"),
    [
        ({"data": {"rows": 6}}, 4, r"data\.rows=6 .*dp=4.*multiple of 4"),
        ({"data": {"rows": 4}, "run": {"accumulate": 2}}, 4, r"run\.accumulate=2.*multiple of 8"),
        ({"strategy": {"dp": 3}}, 4, "4 ranks.*dp=3"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_with_numbers(make_config, changes, world, named):
    with pytest.raises(ConfigError, match=named):
        make_config(**changes).check_ranks(world)
