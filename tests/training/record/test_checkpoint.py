"""A checkpoint is complete or ignored, whatever moment the process dies at."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from training.record import checkpoint as ck

ROOT = Path(__file__).resolve().parents[3]


def trained(seed: int = 0, width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], keep: int
) -> Path:
    return ck.write_checkpoint(folder, step, ck.snapshot(model, optimizer), state, keep)


def test_round_trip_is_bitwise(tmp_path):
    model, optimizer = trained()
    path = save(tmp_path, 7, model, optimizer, {"note": "x"}, keep=2)
    other, other_optimizer = trained(seed=1)
    ck.load_checkpoint(path, other, other_optimizer)
    assert ck.load_state(path) == {"step": 7, "note": "x"}
    for (name, a), b in zip(model.named_parameters(), other.parameters()):
        assert torch.equal(a, b), name
        for kind, value in optimizer.state[a].items():
            assert torch.equal(value, other_optimizer.state[b][kind]), (name, kind)


def test_tied_weights_survive(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    optimizer = torch.optim.AdamW(model.parameters())
    path = save(tmp_path, 1, model, optimizer, {}, keep=1)
    wanted = model["a"].weight.detach().clone()
    with torch.no_grad():
        model["a"].weight.zero_()
    ck.load_checkpoint(path, model, optimizer)
    assert torch.equal(model["b"].weight, wanted) and model["a"].weight is model["b"].weight


def test_keeps_the_last_k_and_removes_leftovers(tmp_path):
    model, optimizer = trained()
    (tmp_path / ".writing_step_00000001").mkdir()
    (tmp_path / "step_00000002").mkdir()  # renamed, but killed before its marker
    for step in (3, 4, 5):
        save(tmp_path, step, model, optimizer, {}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000004", "step_00000005"]


@pytest.mark.parametrize("damage", ["no marker", "short file", "missing file", "broken marker"])
def test_incomplete_newest_is_passed_over(tmp_path, damage):
    model, optimizer = trained()
    save(tmp_path, 1, model, optimizer, {}, keep=5)
    newest = save(tmp_path, 2, model, optimizer, {}, keep=5)
    if damage == "no marker":
        (newest / ck.MARKER).unlink()
    elif damage == "short file":
        os.truncate(newest / "model.safetensors", 10)
    elif damage == "missing file":
        (newest / "optimizer.safetensors").unlink()
    else:
        (newest / ck.MARKER).write_text('{"model.saf')
    assert [p.name for p in ck.complete_checkpoints(tmp_path)] == ["step_00000001"]


def test_other_model_is_named(tmp_path):
    path = save(tmp_path, 1, *trained(), {}, keep=1)
    with pytest.raises(ValueError, match=r"another model: 0.bias is shape \[4\] there and shape \[6\] here"):
        ck.load_checkpoint(path, *trained(width=6))


# Forks: loading torch five times would take longer than all the rest.
SAVE_AND_DIE = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from training.record.checkpoint import snapshot, write_checkpoint
rng = random.Random(0)
for attempt in range(5):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        model = nn.Linear(300, 300)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(1, 10**6):
            with torch.no_grad():
                model.weight.fill_(step)
            write_checkpoint(Path(sys.argv[1], str(attempt)), step, snapshot(model, optimizer), {"step_again": step}, 2)
            os.write(writing, f"{step} ".encode())
    os.close(writing)
    said = os.read(reading, 64)
    time.sleep(rng.uniform(0.0, 0.3))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reading, 4096):
        said += more
    print(said.decode().split()[-1])
"""


def test_killed_while_saving_five_times_always_leaves_a_complete_one(tmp_path):
    """SIGKILL at random moments of a loop that does nothing but save."""
    command = [sys.executable, "-c", SAVE_AND_DIE, str(tmp_path)]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert len(printed) == 5
    for attempt, done in enumerate(printed):
        newest = ck.complete_checkpoints(tmp_path / str(attempt))[-1]
        state = ck.load_state(newest)
        assert state["step"] == state["step_again"] >= int(done)
        model = nn.Linear(300, 300)
        ck.load_checkpoint(newest, model, torch.optim.AdamW(model.parameters()))
        assert torch.equal(model.weight, torch.full((300, 300), float(state["step"])))


def test_a_copy_under_another_name_is_no_checkpoint(tmp_path):
    path = save(tmp_path, 10, *trained(), {}, keep=2)
    shutil.copytree(path, tmp_path / "step_backup")
    assert ck.complete_checkpoints(tmp_path) == [path]


def test_a_flipped_byte_is_noticed(tmp_path):
    path = save(tmp_path, 1, *trained(), {}, keep=1)
    assert ck.is_intact(path)
    data = bytearray((path / "optimizer.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "optimizer.safetensors").write_bytes(data)
    assert ck.complete_checkpoints(tmp_path) == [path] and not ck.is_intact(path)


class Disk:
    """What is synced, renamed and removed, in order; by name below the checkpoints' folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.events = folder, []
        self.synced: dict[str, int] = {}  # bytes that a file held when it was synced
        sync, rename, remove = os.fsync, os.rename, shutil.rmtree

        def fsync(handle: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{handle}"))
            self.note("sync", path)
            self.synced[path.name] = os.fstat(handle).st_size
            sync(handle)

        def moved(a: Path, b: Path) -> None:
            self.note("rename", b)
            rename(a, b)

        def removed(path: Path, *_: object) -> None:
            self.note("remove marked" if (path / ck.MARKER).exists() else "remove", path)
            remove(path)

        monkeypatch.setattr(ck.os, "fsync", fsync)
        monkeypatch.setattr(ck.os, "rename", moved)
        monkeypatch.setattr(ck.shutil, "rmtree", removed)

    def note(self, what: str, path: Path) -> None:
        name = str(path.relative_to(self.folder))
        self.events.append((what, name.replace(".writing_step_00000002", "new").replace("step_00000002", "2")))


def test_everything_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    """Files and their folder before the rename, the rename before the marker; what is old goes last, unmarked first."""
    save(tmp_path, 1, *trained(), {}, keep=1)
    disk = Disk(tmp_path, monkeypatch)
    save(tmp_path, 2, *trained(), {}, keep=1)
    assert disk.events == [
        ("sync", "new/model.safetensors"), ("sync", "new/optimizer.safetensors"), ("sync", "new/state.json"),
        ("sync", "new"), ("rename", "2"), ("sync", "."), ("sync", "2/COMPLETE"), ("sync", "2"),
        ("remove", "step_00000001"),
    ]  # fmt: skip
    for path in (tmp_path / "step_00000002").iterdir():
        assert disk.synced[path.name] == path.stat().st_size, path.name  # all of it, nothing left in a buffer


def test_a_step_that_is_there_already_is_replaced_and_never_half(tmp_path, monkeypatch):
    save(tmp_path, 2, *trained(), {"which": "first"}, keep=3)
    disk = Disk(tmp_path, monkeypatch)
    path = save(tmp_path, 2, *trained(1), {"which": "second"}, keep=3)
    assert disk.events[3:6] == [("sync", "new"), ("remove", "2"), ("rename", "2")]
    assert ck.load_state(path)["which"] == "second" and ck.complete_checkpoints(tmp_path) == [path]


def test_only_what_is_older_and_broken_is_cleared_away(tmp_path):
    """A later step without its marker may be another process's, or be worth a look."""
    for broken in ("step_00000001", "step_00000009"):
        (tmp_path / broken).mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "step_00000004").write_text("a file")
    assert save(tmp_path / "deep" / "er", 1, *trained(), {}, keep=1).exists()
    save(tmp_path, 3, *trained(), {}, keep=1)
    assert {p.name for p in tmp_path.iterdir()} == {"step_00000003", "step_00000009", "step_00000004", "notes", "deep"}


def test_checkpoints_come_oldest_first_however_long_their_numbers(tmp_path):
    paths = [save(tmp_path, step, *trained(), {}, keep=9) for step in (99_999_999, 7, 12)]
    (tmp_path / "step_123").mkdir()  # too short to be ours
    assert ck.complete_checkpoints(tmp_path) == [paths[1], paths[2], paths[0]]


@pytest.mark.parametrize(
    "marker",
    ["{}", "[]", "3", "null", '{"model.safetensors": 3}', '{"model.safetensors": [1, 2, 3]}', "not json"],
)
def test_a_marker_that_says_something_else_is_none(tmp_path, marker):
    path = save(tmp_path, 1, *trained(), {}, keep=1)
    (path / ck.MARKER).write_text(marker)
    assert ck.complete_checkpoints(tmp_path) == []


def test_a_marker_names_every_file_with_its_size(tmp_path):
    path = save(tmp_path, 1, *trained(), {}, keep=1)
    marker = json.loads((path / ck.MARKER).read_text())
    assert {name: size for name, (size, _) in marker.items()} == {
        name: (path / name).stat().st_size for name in ("model.safetensors", "optimizer.safetensors", "state.json")
    }
    for name in marker:
        changed = {**marker, name: [marker[name][0] + 1, marker[name][1]]}
        (path / ck.MARKER).write_text(json.dumps(changed))
        assert ck.complete_checkpoints(tmp_path) == []
        (path / ck.MARKER).write_text(json.dumps({k: v for k, v in marker.items() if k != name}))
        assert ck.complete_checkpoints(tmp_path) == []


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("place", [0, -1])
def test_any_flipped_byte_is_noticed(tmp_path, name, place):
    path = save(tmp_path, 1, *trained(), {"filler": "x" * (5 << 20)}, keep=1)
    assert ck.is_intact(path)
    data = bytearray((path / name).read_bytes())
    data[place] ^= 1
    (path / name).write_bytes(data)
    assert not ck.is_intact(path)


def test_what_differs_is_named_whichever_side_lacks_it(tmp_path):
    path = save(tmp_path, 1, *trained(), {}, keep=1)
    short = nn.Sequential(nn.Linear(3, 4))
    with pytest.raises(ValueError, match=r"1.bias is shape \[2\] there and absent here"):
        ck.load_checkpoint(path, short, torch.optim.AdamW(short.parameters()))
    long = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 1))
    with pytest.raises(ValueError, match=r"2.bias is absent there and shape \[1\] here"):
        ck.load_checkpoint(path, long, torch.optim.AdamW(long.parameters()))


def test_a_parameter_that_never_had_a_gradient_has_no_state(tmp_path):
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    taken = ck.snapshot(model, optimizer)
    kinds = {"exp_avg", "exp_avg_sq", "step"}
    assert set(taken.optimizer) == {f"{kind}/used.{part}" for kind in kinds for part in ("weight", "bias")}
    path = ck.write_checkpoint(tmp_path, 1, taken, {}, 1)
    fresh = torch.optim.AdamW(model.parameters())
    ck.load_checkpoint(path, model, fresh)
    assert set(fresh.state) == {model["used"].weight, model["used"].bias}
    for parameter, values in fresh.state.items():
        for kind, value in values.items():
            right = optimizer.state[parameter][kind]
            assert torch.equal(value, right) and value.shape == right.shape


def test_a_snapshot_that_nobody_keeps_is_empty(tmp_path):
    taken = ck.snapshot(*trained(), keep=False)
    assert taken.model == taken.optimizer == {}
    kept = ck.snapshot(*trained())
    assert set(kept.model) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert not any(tensor.requires_grad for tensor in kept.model.values())


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
@pytest.mark.parametrize("part", ["_write_tensors", "_write_text", "sync_path"])
def test_a_full_disk_is_one_sentence_and_leaves_the_last_checkpoint(tmp_path, monkeypatch, part, error):
    first = save(tmp_path, 1, *trained(), {}, keep=2)

    def fail(*arguments: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(ck, part, fail)
        with pytest.raises(
            ck.NotSaved, match=r"step 2 cannot be written to .* \(No space left on device\); the last"
        ) as it:
            save(tmp_path, 2, *trained(), {}, keep=2)
    assert str(first) in str(it.value) and "\n" not in str(it.value)
    assert list(tmp_path.iterdir()) == [first] and ck.is_intact(first)
    assert save(tmp_path, 2, *trained(), {}, keep=2).name == "step_00000002"


def test_a_first_save_on_a_full_disk_names_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(
        ck, "save_file", lambda *arguments: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(ck.NotSaved, match="there is none yet"):
        save(tmp_path, 1, *trained(), {}, keep=1)
    assert not list(tmp_path.iterdir())
