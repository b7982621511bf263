"""`model.compile=true` as a user types it: the losses of an eager process, whatever the ranks; or a refusal."""

import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from torch._dynamo.utils import counters

from parallel.strategy import preset_names
from tests.training.start.test_launch import command
from tests.training.start.test_ranks import rows
from training.config import ConfigError
from training.loop import train
from training.start.launch import check_compiler

EVERYTHING = ["model.layers=2", "model.window=[9,null]", "model.softcap=20", "model.sink=true", "model.recompute=true"]


def typed(folder: Path, name: str, *options: str) -> list[dict]:
    """The metrics of a run of ten steps in `folder`/`name`, made unless it is there."""
    if not (folder / name / "summary.json").exists():
        shape = ["model.heads=4", "model.kv_heads=2", "data.rows=4", "run.steps=10", "run.save_every=0"]
        arguments = command(*shape, f"run.dir={name}", *options)
        done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0 and "finished" in done.stdout, done.stdout + done.stderr
    return rows(folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where runs of this file lie; the eager one serves all."""
    return tmp_path_factory.mktemp("compiled")


def compare(found: list[dict], wanted: list[dict], tolerance: float) -> None:
    assert len(found) == len(wanted) == 10
    for a, b in zip(found, wanted):
        for name in ("train/loss", "train/grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=tolerance), (a["step"], name)
    assert found[-1]["eval/loss"] == pytest.approx(wanted[-1]["eval/loss"], rel=tolerance)


@pytest.mark.deep
@pytest.mark.parametrize("name", preset_names())
def test_compiled_ranks_train_as_one_eager_process(folder, name):
    found = typed(folder, name, "nproc=2", f"strategy={name}", "model.compile=true")
    compare(found, typed(folder, "eager"), 1e-5)


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("weights", ["replicated", "fully_sharded"])
def test_compiled_with_everything_on(folder, ranks, weights):
    """Windows, caps, sinks, recomputation and accumulation, on replicated and on sharded weights."""
    options = [*EVERYTHING, "run.accumulate=2"]
    strategy = ["strategy=zigzag_ring", f"strategy.weights={weights}", f"nproc={ranks}"]
    found = typed(folder, f"everything_{ranks}_{weights}", *options, *strategy, "model.compile=true")
    compare(found, typed(folder, "eager_everything", *options), 1e-5)


@pytest.mark.deep
def test_compiled_in_bf16(folder):
    options = [*EVERYTHING, "run.precision=bf16"]
    found = typed(folder, "bf16", *options, "nproc=2", "strategy=usp", "model.compile=true")
    compare(found, typed(folder, "eager_bf16", *options), 2e-2)


@pytest.mark.usefixtures("traceable")
def test_a_compiled_run_has_the_eager_losses(make_config, tmp_path):
    losses = []
    counters.clear()
    for compiled in (True, False):
        run = {"steps": 3, "dir": str(tmp_path / str(compiled))}
        config = make_config(model={"compile": compiled, "layers": 1}, data={"eval_fraction": 0.0}, run=run)
        train(config, Console(quiet=True))
        losses.append([row["train/loss"] for row in rows(tmp_path / str(compiled))])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and counters["stats"]["unique_graphs"] == 2


def test_no_compiler_is_refused_before_a_process_starts(make_config):
    config = make_config(model={"compile": True})
    check_compiler(config, {})
    with pytest.raises(ConfigError, match="needs a C\\+\\+ compiler on a CPU, and no-such-compiler is not on the PATH"):
        check_compiler(config, {"CXX": "no-such-compiler"})
    check_compiler(make_config(), {"CXX": "no-such-compiler"})
    check_compiler(make_config(model={"compile": True}, run={"device": "cuda"}), {"CXX": "no-such-compiler"})
