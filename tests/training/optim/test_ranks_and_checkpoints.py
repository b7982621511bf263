"""Each optimiser on real ranks equals one process, or is refused before one starts; resumed runs are straight ones."""

from pathlib import Path
from typing import Any

import pytest

from tests.training.start.test_ranks import SLOW, close, rows, train
from training.config import ConfigError
from training.optim.kinds import OPTIMIZERS

WEIGHTS = ["replicated", "fully_sharded"]
FITTING = [(name, w) for name, kind in OPTIMIZERS.items() for w in WEIGHTS if kind.sharded or w == "replicated"]


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw"])  # which tests/training/start covers
def test_losses_and_norms_of_twenty_steps_equal_one_process(ranks, make_config, tmp_path, name):
    optim = {**SLOW, "name": name}
    train(make_config(run={"steps": 20, "dir": str(tmp_path / "one")}, optim=optim))
    for weights in (w for fits, w in FITTING if fits == name):
        run = {"steps": 20, "dir": str(tmp_path / weights)}
        config = make_config(run=run, strategy={"weights": weights}, optim=optim)
        assert ranks.run(train, config, world=4) == [(20, None)] * 4
        close(tmp_path / weights, tmp_path / "one", 1e-6)


def series(folder: Path) -> list[tuple[float, float]]:
    return [(row["train/loss"], row["train/grad_norm"]) for row in rows(folder)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_and_ten_steps_are_bitwise_twenty(make_config, tmp_path, name):
    for folder, stops in (("straight", [None]), ("resumed", [10, None])):
        for stop_at in stops:
            run: dict[str, Any] = {"steps": 20, "stop_at": stop_at, "dir": str(tmp_path / folder)}
            train(make_config(run=run, optim={"name": name}))
    assert len(series(tmp_path / "straight")) == 20 and series(tmp_path / "straight") == series(tmp_path / "resumed")
    states = [(tmp_path / f / "checkpoints/step_00000020" / file).read_bytes() for f in ("straight", "resumed")
              for file in ("model.safetensors", "optimizer.safetensors")]  # fmt: skip
    assert states[:2] == states[2:]


def test_sharded_muon_resumes_bitwise_and_goes_on_in_one_process(ranks, make_config, tmp_path):
    optim, strategy = {**SLOW, "name": "muon"}, {"weights": "fully_sharded"}

    def go(folder: str, stop_at: int | None, world: int) -> None:
        config = make_config(run={"steps": 20, "stop_at": stop_at, "dir": str(tmp_path / folder)}, optim=optim,
                             strategy=strategy)  # fmt: skip
        if world == 1:
            train(config)
        else:
            ranks.run(train, config, world=world)

    go("straight", None, 2)
    go("resumed", 10, 2)
    go("resumed", None, 2)
    assert series(tmp_path / "straight") == series(tmp_path / "resumed")
    go("moved", 10, 2)
    go("moved", None, 1)
    close(tmp_path / "moved", tmp_path / "straight", 1e-6)


def test_shards_that_an_optimiser_cannot_update_are_refused_before_a_process_starts(make_config):
    config = make_config(optim={"name": "adafactor"}, strategy={"weights": "fully_sharded"})
    with pytest.raises(
        ConfigError, match=r"optim.name=adafactor cannot update .* 4 ranks; use optim=adamw or muon, or"
    ):
        config.check_ranks(4)
    config.check_ranks(1)  # nothing is sharded
