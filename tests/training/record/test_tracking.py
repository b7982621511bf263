"""W&B offline: one id across resumptions, every step in the newest folder, nothing at all when disabled."""

import importlib.util
import json
import struct
from pathlib import Path

import pytest
import wandb
from rich.console import Console
from wandb.proto.wandb_internal_pb2 import Record

from training.config import WANDB_VARIABLES, ConfigError, WandbConfig, WandbMode
from training.loop import train
from training.record.tracking import Tracker, tag


def offline_runs(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"))


def logged_steps(run: Path) -> list[int]:
    """The `step` of each history record in an offline run's log: 32 KiB blocks of length-prefixed chunks."""
    wandb.teardown()  # finish() returns before its last bytes are on disk; this waits for them
    data = next(run.glob("*.wandb")).read_bytes()
    at, parts, steps = 7, b"", []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last chunk of one
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            for item in record.history.item:
                if (item.key or "/".join(item.nested_key)) == "step":
                    steps.append(int(json.loads(item.value_json)))
    return steps


def test_resumed_run_keeps_its_id_and_the_newest_folder_holds_every_step(make_config, tmp_path):
    folder = tmp_path / "run"
    for stop_at in (2, 4, None):
        train(make_config(run={"stop_at": stop_at}, wandb={"mode": WandbMode.offline}), Console(quiet=True))
    (newest,) = offline_runs(folder)
    assert logged_steps(newest) == [1, 2, 3, 4, 5, 6]
    ids = {p.name.rsplit("-", 1)[1] for p in (folder / "wandb").iterdir() if "offline-run" in p.name}
    assert ids == {json.loads((folder / "wandb_id.json").read_text())["id"]}


def test_replay_stops_at_the_checkpoint(make_config, tmp_path):
    """Steps after the checkpoint are trained again, so they must not be logged twice."""
    config = WandbConfig(mode=WandbMode.offline)
    first = Tracker(config, tmp_path, "r", {}, [])
    for step in (1, 2, 3):
        first.log({"step": step, "train/loss": 1.0})
    first.finish()
    second = Tracker(config, tmp_path, "r", {}, [{"step": 1, "train/loss": 1.0}, {"step": 2, "train/loss": 1.0}])
    second.log({"step": 3, "train/loss": 1.0})
    second.finish()
    assert logged_steps(offline_runs(tmp_path)[-1]) == [1, 2, 3]


def test_two_folders_of_one_second_are_both_kept(tmp_path):
    (tmp_path / "wandb_id.json").write_text('{"id": "abc"}')
    for name in ("offline-run-20260101_000000-abc", "superseded-offline-run-20260101_000000-abc"):
        (tmp_path / "wandb" / name).mkdir(parents=True)
        (tmp_path / "wandb" / name / "log").write_text(name)
    Tracker(WandbConfig(mode=WandbMode.offline), tmp_path, "r", {}, []).finish()
    kept = sorted(path.parent.name for path in (tmp_path / "wandb").glob("superseded*/log"))
    assert kept == ["superseded-2-offline-run-20260101_000000-abc", "superseded-offline-run-20260101_000000-abc"]
    assert len(offline_runs(tmp_path)) == 1


def test_disabled_writes_nothing(tmp_path):
    tracker = Tracker(WandbConfig(mode=WandbMode.disabled), tmp_path, "r", {}, [])
    tracker.log({"step": 1})
    tracker.finish()
    assert list(tmp_path.iterdir()) == []


def test_auto_is_offline_without_a_key(tmp_path, monkeypatch):
    monkeypatch.setattr("wandb.login", lambda prompt: False)
    assert Tracker(WandbConfig(mode=WandbMode.auto), tmp_path, "r", {}, []).mode == "offline"


ENVIRONMENT = {
    "WANDB_PROJECT": "theirs", "WANDB_ENTITY": "lab", "WANDB_RUN_GROUP": "g", "WANDB_TAGS": "a, b",
    "WANDB_NAME": "n", "WANDB_RUN_ID": "abc", "WANDB_DIR": "/tmp/elsewhere",
}  # fmt: skip


@pytest.mark.parametrize(("key", "variable"), WANDB_VARIABLES.items())
def test_a_key_that_the_user_sets_goes_before_the_environment_and_that_before_the_default(key, variable):
    mine, theirs = (["mine"], ["a", "b"]) if key == "tags" else ("mine", ENVIRONMENT[variable])
    for given, environment, found in (
        (mine, ENVIRONMENT, mine), (None, ENVIRONMENT, theirs), (None, {}, None), (mine, {}, mine),
        (None, {variable: ""}, None),
    ):  # fmt: skip
        config = WandbConfig(WandbMode.disabled, **{key: given})
        config.settle(environment)
        assert getattr(config, key) == found


@pytest.mark.parametrize(
    ("mode", "environment", "found"),
    [
        ("auto", {}, "auto"), ("auto", {"WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_MODE": "online"}, "online"),
        ("auto", {"WANDB_MODE": "disabled"}, "disabled"), ("auto", {"WANDB_MODE": "dryrun"}, "offline"),
        ("auto", {"WANDB_DISABLED": "true"}, "disabled"), ("auto", {"WANDB_DISABLED": "1"}, "disabled"),
        ("auto", {"WANDB_DISABLED": "false"}, "auto"), ("auto", {"WANDB_MODE": "OFFLINE"}, "offline"),
        ("auto", {"WANDB_DISABLED": "true", "WANDB_MODE": "online"}, "disabled"),
        ("offline", {"WANDB_MODE": "disabled", "WANDB_DISABLED": "true"}, "offline"),
        ("online", {"WANDB_MODE": "offline"}, "online"), ("disabled", {"WANDB_MODE": "online"}, "disabled"),
    ],
)  # fmt: skip
def test_the_mode_is_the_user_s_then_the_environment_s(mode, environment, found):
    config = WandbConfig(WandbMode(mode))
    config.settle(environment)
    assert config.mode.value == found


@pytest.mark.parametrize(
    ("keys", "environment", "named"),
    [
        ({"project": "a/b"}, {}, r"wandb\.project=a/b: W&B takes 1 to 128 characters"),
        ({}, {"WANDB_PROJECT": "a?b"}, r"the environment's WANDB_PROJECT=a\?b"),
        ({"project": "x" * 129}, {}, r"wandb\.project=x+: "), ({"project": " "}, {}, r"wandb\.project= : "),
        ({"tags": ["ok", "x" * 65]}, {}, r"wandb\.tags=.*'x+' has 65"), ({"tags": [""]}, {}, r"'' has 0"),
        ({}, {"WANDB_TAGS": "ok,,x"}, r"the environment's WANDB_TAGS=.*'' has 0"),
        ({"id": "a:b"}, {}, r"wandb\.id=a:b"), ({}, {"WANDB_MODE": "on"}, r"WANDB_MODE=on is none of online, run"),
    ],
)  # fmt: skip
def test_what_wandb_would_refuse_late_is_refused_with_the_configuration(keys, environment, named):
    with pytest.raises(ConfigError, match=named) as caught:
        WandbConfig(**keys).settle(environment)
    assert "\n" not in str(caught.value)


def test_without_wandb_a_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for mode in WandbMode:
        if mode is WandbMode.disabled:
            WandbConfig(mode).settle({})
            continue
        with pytest.raises(
            ConfigError, match=rf"wandb\.mode={mode.value} needs the package wandb.*wandb\.mode=disabled"
        ):
            WandbConfig(mode).settle({})


def test_a_name_an_id_and_a_place_of_ones_own(tmp_path):
    config = WandbConfig(mode=WandbMode.offline, name="n", id="mine1", dir=str(tmp_path / "elsewhere"))
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    Tracker(config, tmp_path / "run", "r", {}, []).finish()
    (found,) = offline_runs(tmp_path / "elsewhere")
    assert found.name.endswith("mine1") and not (tmp_path / "run" / "wandb").exists()


def test_the_label_is_a_tag_that_wandb_takes():
    assert tag("local with exchange=ring") == "local with exchange=ring"
    assert tag("x" * 99) == "x" * 61 + "..." and len(tag("x" * 64)) == 64
