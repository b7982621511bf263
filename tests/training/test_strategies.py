"""The loss curve does not notice which schedule ran: every preset on real ranks against one process."""

import subprocess
from pathlib import Path

import pytest
import torch

from parallel.strategy import load_strategy, preset_names
from tests.training.start.test_launch import command
from tests.training.start.test_ranks import SLOW, WEIGHTS, gradients, held_out, rows, train, train_poisoned
from training.config import Precision
from training.record.metrics import METRICS

CONTEXT = [name for name in preset_names() if load_strategy(name).exchange != "none"]


def strategy(name: str, **axes) -> dict:
    return vars(load_strategy(name, **axes))


def compare(a: Path, b: Path, steps: int, tolerance: float) -> None:
    first, second = rows(a), rows(b)
    assert len(first) == len(second) == steps
    for x, y in zip(first, second):
        for name in ("train/loss", "train/grad_norm"):
            assert x[name] == pytest.approx(y[name], rel=tolerance), (x["step"], name)
    assert first[-1]["eval/loss"] == pytest.approx(second[-1]["eval/loss"], rel=tolerance)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """Where one process trained eight steps, once it has."""
    return tmp_path_factory.mktemp("straight") / "run"


@pytest.mark.parametrize("name", CONTEXT)
def test_losses_equal_one_process(ranks, make_config, tmp_path, straight, name):
    data = {"source": "synthetic", "paths": [], "seq_len": 192, "rows": 2}  # four ranks cut each row in two
    changes: dict[str, dict] = {"optim": SLOW, "model": {"window": [None, 40]}, "data": data}
    if not straight.exists():
        train(make_config(**changes, run={"steps": 8, "dir": str(straight)}))
    config = make_config(**changes, run={"steps": 8, "dir": str(tmp_path / "four")}, strategy=strategy(name))
    assert ranks.run(train, config, world=4) == [(8, None)] * 4
    compare(tmp_path / "four", straight, 8, 1e-5)
    found = rows(tmp_path / "four")
    for row, alone in zip(found, rows(straight)):
        assert row.keys() == alone.keys()
        sent, kept = ({k: v for k, v in r.items() if k.startswith("comm/bytes/")} for r in (row, alone))
        assert any(v > 0 for k, v in sent.items() if "intra" in k) and not any(kept.values())
        assert not any(v for k, v in sent.items() if "inter" in k)  # the four are one node
    assert all(row["plan/imbalance"] >= 1 for row in found)


def test_every_preset_reports_the_same_numbers(make_config, tmp_path):
    """A column of one run is a column of every run: what nothing moved is 0, what only auto knows is null."""
    wanted = {name for name in METRICS if name.startswith(("comm/bytes/", "plan/"))}
    keys = {}
    for name in preset_names():
        train(make_config(strategy=strategy(name), run={"steps": 1, "dir": str(tmp_path / name)}))
        keys[name] = rows(tmp_path / name)[0].keys()
        assert keys[name] >= wanted
    assert all(found == keys["local"] for found in keys.values())


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    ("name", "axes"), [("zigzag_ring", {"cp_outer": 2}), ("ulysses", {"cp_inner": 2}), ("usp", {"cp_inner": 2})]
)
def test_replicas_of_split_sequences_sum_their_gradients(ranks, make_config, name, axes, weights):
    """dp x cp: E1 to E3, the loss and the gradient of every token count once, whoever holds it."""
    changes: dict[str, dict] = {"optim": {"clip_norm": 0.05}, "run": {"accumulate": 2}}
    for keep in ([0, 1, 2, 3], [1]):
        loss, norm, grads = gradients(make_config(**changes), keep)
        config = make_config(**changes, strategy=strategy(name, weights=weights, **axes))
        for found_loss, found_norm, found in ranks.run(gradients, config, keep, world=4):
            assert found_loss == pytest.approx(loss, rel=1e-6) and found_norm == pytest.approx(norm, rel=1e-5)
            for a, b in zip(grads, found, strict=True):
                assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", ["zigzag_ring", "ulysses", "llama3"])
def test_ranks_without_tokens_add_nothing(ranks, make_config, name, weights):
    """Three tokens on four ranks."""
    changes: dict[str, dict] = {"data": {"source": "synthetic", "paths": [], "seq_len": 3, "rows": 1, "eval_rows": 1}}
    loss, norm, grads = gradients(make_config(**changes), [0])
    config = make_config(**changes, strategy=strategy(name, weights=weights))
    for found_loss, found_norm, found in ranks.run(gradients, config, [0], world=4):
        assert found_loss == pytest.approx(loss, rel=1e-6) and found_norm == pytest.approx(norm, rel=1e-5)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(grads, found, strict=True))


@pytest.mark.parametrize("name", ["llama3", "usp"])
def test_evaluation_of_split_sequences_is_one_processs(ranks, make_config, name):
    changes: dict[str, dict] = {"data": {"packing": "padded", "eval_rows": 6}}
    wanted = held_out(make_config(**changes))
    for found in ranks.run(held_out, make_config(**changes, strategy=strategy(name)), world=4):
        assert found == pytest.approx(wanted, rel=1e-6)


def test_everything_on_trains_alike(ranks, make_config, tmp_path):
    """bf16, windows, soft cap, sinks, query-key norms, recomputation and accumulation at once."""
    changes = {
        "model": {"window": [9, None], "softcap": 20.0, "sink": True, "qk_norm": True, "recompute": True},
        "optim": SLOW,
    }
    run = {"steps": 5, "accumulate": 2, "precision": Precision.bf16}
    train(make_config(**changes, run={**run, "dir": str(tmp_path / "one")}))
    config = make_config(**changes, run={**run, "dir": str(tmp_path / "four")}, strategy=strategy("usp"))
    ranks.run(train, config, world=4)
    compare(tmp_path / "four", tmp_path / "one", 5, 2e-2)


def test_documents_of_a_loss_that_is_not_finite_are_named_by_their_holder(ranks, make_config):
    first, second = ranks.run(train_poisoned, make_config(strategy=strategy("zigzag_ring")), 3, 1, world=2)
    assert first == second and first.startswith("step 3: loss nan is not finite; documents: ")


def typed_run(folder: Path, *options: str) -> None:
    shape = ["model.heads=4", "model.kv_heads=2", "data.rows=4", "optim.lr=3e-3", "run.steps=20", "run.save_every=0"]
    arguments = command(*shape, "run.dir=out", *options)
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "finished" in done.stdout, done.stdout + done.stderr


@pytest.fixture(scope="module")
def typed(tmp_path_factory) -> Path:
    """Where the command without ranks has run."""
    folder = tmp_path_factory.mktemp("typed")
    typed_run(folder)
    return folder


@pytest.mark.deep
@pytest.mark.parametrize("name", preset_names())
def test_command_line_run_equals_one_process(typed, tmp_path, name):
    """`python train.py nproc=4 strategy=S` as a user types it, twenty steps."""
    typed_run(tmp_path, "nproc=4", f"strategy={name}")
    compare(tmp_path / "out", typed / "out", 20, 1e-5)


def test_plans_are_made_ahead_and_a_resumed_stream_is_the_same(ranks, make_config, tmp_path):
    """The batch after next is drawn early; where the stream stands in a checkpoint must not notice."""
    data = {"source": "synthetic", "paths": [], "seq_len": 128, "rows": 2}
    whole = make_config(data=data, run={"steps": 8, "dir": str(tmp_path / "whole")}, strategy=strategy("hsap"))
    ranks.run(train, whole, world=2)
    for stop in (3, None):
        run = {"steps": 8, "stop_at": stop, "dir": str(tmp_path / "parts")}
        ranks.run(train, make_config(data=data, run=run, strategy=strategy("hsap")), world=2)
    a, b = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert [x["train/loss"] for x in a] == [x["train/loss"] for x in b]
    assert [x["data/epoch"] for x in a] == [x["data/epoch"] for x in b]
    assert all(x["plan/exposed_s"] >= 0 for x in a)


@pytest.mark.parametrize("name", ["basp", "hsap"])
def test_batch_groups_train_as_one_process(ranks, make_config, tmp_path, straight_rows, name):
    """Four rows on four ranks as four, and in two micro-batches as two groups; other rows than ranks, one group."""
    for accumulate, groups in ((1, 4), (2, 2)):
        config = make_config(
            optim=SLOW,
            run={"steps": 4, "accumulate": accumulate, "dir": str(tmp_path / f"{name}{accumulate}")},
            strategy=strategy(name, batch_groups="auto"),
        )
        assert config.strategy.groups(4 // accumulate, 4) == groups
        ranks.run(train, config, world=4)
        for found, right in zip(rows(tmp_path / f"{name}{accumulate}"), straight_rows, strict=True):
            assert found["train/loss"] == pytest.approx(right["train/loss"], rel=1e-6)
            assert found["train/grad_norm"] == pytest.approx(right["train/grad_norm"], rel=1e-5)


@pytest.fixture
def straight_rows(make_config, tmp_path) -> list[dict]:
    train(make_config(optim=SLOW, run={"steps": 4, "dir": str(tmp_path / "one")}))
    return rows(tmp_path / "one")
