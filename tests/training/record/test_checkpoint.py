"""A checkpoint is complete or ignored, whatever moment the process dies at."""

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
