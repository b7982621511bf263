"""Checkpoints that are complete or ignored.

A checkpoint is a folder `step_<n>` of safetensors and JSON, written to a temporary name, synced, renamed, and only then
marked complete; a kill at any moment leaves the previous one usable. Nothing is pickled. Tensors are whole whatever the
number of ranks and however they share the weights, so any number of ranks can go on from it.
"""

import json
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parallel.weights.data_parallel import placed_like, whole

MARKER = "COMPLETE"
FILES = {"model.safetensors", "optimizer.safetensors", "state.json"}


class NotSaved(OSError):
    """A checkpoint that could not be written, in one sentence."""


def why_not(error: Exception) -> str:
    """The system's reason in a few words, whichever library met it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    known = re.search(r"\b(No space left on device|[A-Z][a-z]+(?: [a-z]+)+)(?= ?\(os error)", str(error))
    return known[1] if known else str(error).splitlines()[0]


@dataclass(frozen=True)
class Snapshot:
    """The whole tensors of a model and its optimiser, by name."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, keep: bool = True) -> Snapshot:
    """Every tensor whole; sharded ones are gathered one by one onto the CPU of ranks that `keep` them: a collective."""

    def gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():
            full = whole(tensor)
            if keep:
                found[name] = full if full is tensor else full.cpu()
        return found

    return Snapshot(gathered(_own_tensors(model)), gathered(_optimizer_tensors(model, optimizer)))


def write_checkpoint(folder: Path, step: int, tensors: Snapshot, state: dict[str, Any], keep: int) -> Path:
    """Write `folder/step_<step>` and drop all but the newest `keep` complete checkpoints.

    Args:
        state: what else a resumed run needs, JSON-able (data position, counters, configuration).

    Returns:
        The checkpoint's path.

    Raises:
        NotSaved: the disk is full, or cannot be written; what was written is gone, earlier checkpoints stay.
    """
    target, temporary = folder / f"step_{step:08d}", folder / f".writing_step_{step:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".writing_step_*"):
            shutil.rmtree(leftover)
        temporary.mkdir()
        _write_tensors(temporary / "model.safetensors", tensors.model)
        _write_tensors(temporary / "optimizer.safetensors", tensors.optimizer)
        _write_text(temporary / "state.json", json.dumps({"step": step, **state}, indent=1))
        marker = {p.name: [p.stat().st_size, _checksum(p)] for p in sorted(temporary.iterdir())}
        sync_path(temporary)
    except (OSError, SafetensorError) as error:  # a full disk is either
        shutil.rmtree(temporary, ignore_errors=True)
        kept = complete_checkpoints(folder)
        last = f"the last complete one is {kept[-1]}" if kept else "there is none yet"
        raise NotSaved(
            f"the checkpoint of step {step} cannot be written to {folder} ({why_not(error)}); {last}. Make room, "
            "and the same command goes on from there."
        ) from error
    if target.exists():
        _remove(target)
    os.rename(temporary, target)
    sync_path(folder)
    _write_text(target / MARKER, json.dumps(marker))
    sync_path(target)
    for old in complete_checkpoints(folder)[:-keep]:
        _remove(old)
    for broken in _steps(folder):
        if broken.name < target.name and not (broken / MARKER).exists():
            shutil.rmtree(broken)
    return target


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints whose marker is there and whose files have the sizes it names, oldest first."""
    return [p for p in _steps(folder) if _is_complete(p)]


def is_intact(checkpoint: Path) -> bool:
    """Whether every file of a complete checkpoint still has the checksum that its marker names; reads all of it."""
    marker = json.loads((checkpoint / MARKER).read_text())
    return all(_checksum(checkpoint / name) == checksum for name, (_, checksum) in marker.items())


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint, `step` included."""
    return json.loads((checkpoint / "state.json").read_text())


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read weights and optimiser state back, bit for bit; each rank of a sharded model takes its shards.

    Raises:
        ValueError: the tensors there are not this model's; names the first that differs.
    """
    found = load_file(checkpoint / "model.safetensors")
    _check_same(
        checkpoint,
        {k: tuple(v.shape) for k, v in found.items()},
        {k: tuple(v.shape) for k, v in _own_tensors(model).items()},
    )
    with torch.no_grad():
        for name, tensor in _own_tensors(model).items():
            tensor.copy_(placed_like(found[name], tensor))
    states: dict[str, dict[str, Tensor]] = {}
    with safe_open(checkpoint / "optimizer.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - not a dict
            kind, name = key.split("/", 1)
            states.setdefault(name, {})[kind] = file.get_tensor(key)
    for name, parameter in model.named_parameters():
        if name in states:  # a parameter that never had a gradient has no state
            optimizer.state[parameter] = {
                k: placed_like(v, parameter) if v.shape == parameter.shape else v.to(parameter.device)
                for k, v in states[name].items()
            }


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    # a tied weight is one tensor under two names: keep the first, as safetensors refuses shared memory
    own: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            own[name] = tensor.detach()
    return own


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    named: dict[Tensor, str] = {p: n for n, p in model.named_parameters()}
    return {f"{kind}/{named[p]}": t for p, values in optimizer.state.items() for kind, t in values.items()}


def _check_same(checkpoint: Path, found: dict[str, tuple], wanted: dict[str, tuple]) -> None:
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            there = f"shape {list(found[name])}" if name in found else "absent"
            here = f"shape {list(wanted[name])}" if name in wanted else "absent"
            raise ValueError(f"{checkpoint} is a checkpoint of another model: {name} is {there} there and {here} here.")


def _steps(folder: Path) -> list[Path]:
    """Folders named like a checkpoint, by step; a copy under another name is none."""
    return sorted(p for p in folder.glob("step_*") if re.fullmatch(r"step_\d{8,}", p.name) and p.is_dir())


def _is_complete(path: Path) -> bool:
    try:
        marker = json.loads((path / MARKER).read_text())
        return set(marker) == FILES and all((path / n).stat().st_size == size for n, (size, _) in marker.items())
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({k: v.contiguous() for k, v in tensors.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(checkpoint: Path) -> None:
    # the marker goes first, so that a kill halfway leaves nothing that looks complete
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)
