"""A Hugging Face checkpoint as it lies in a folder: config.json and safetensors, read by their headers. No torch.

Nothing here unpickles: a folder that holds only pickled weights is refused.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SAMPLE = 4096  # bytes hashed at the beginning, the middle and the end of each tensor


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or is not the model it should be: one sentence that names what is wrong."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, and its safetensors dtype ("F32", "BF16", ...)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointFolder:
    """What a checkpoint says of itself before any weight is read.

    `content_hash` covers each tensor's name, dtype, shape and three samples of its values, so that it tells two
    fine-tunes of one model apart within a second, wherever they lie and however they are sharded; a change of a few
    values between the samples it does not see. config.json takes no part: what it says enters the model's fields.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]
    content_hash: str


def open_folder(path: Path) -> CheckpointFolder:
    """Read config.json and the headers of all weights in `path`.

    Raises:
        CheckpointError: no folder, no config.json, no safetensors, a damaged file, or an index that the files belie.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"model.path={path} is no folder on this machine; give one with {CONFIG} and safetensors, as "
            f"`hf download NAME --local-dir DIR` leaves it."
        )
    config = read_json_object(path / CONFIG)
    tensors: dict[str, StoredTensor] = {}
    digests: dict[str, str] = {}
    for file in _weight_files(path):
        for name, stored, digest in _read_header(file):
            if name in tensors:
                raise CheckpointError(f"tensor {name} lies both in {tensors[name].file} and in {file}; keep one.")
            tensors[name], digests[name] = stored, digest
    _check_index(path, tensors)
    content = json.dumps(sorted(digests.items()))
    return CheckpointFolder(path, config, tensors, hashlib.sha256(content.encode()).hexdigest()[:16])


def read_json_object(file: Path) -> dict[str, Any]:
    """A JSON object. CheckpointError if the file is absent or holds something else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror or error}).") from error
    except (ValueError, RecursionError) as error:  # nested too deep
        raise CheckpointError(f"{file} is no JSON ({error}).") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, where a JSON object is needed.")
    return value


def shorten(names: list[str], shown: int = 4) -> str:
    """A list for a sentence: the first few names, and how many more."""
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest


def _weight_files(path: Path) -> list[Path]:
    """The file of weights, or those that the index names; as in transformers, a single file goes before an index."""
    if (path / SINGLE).exists():
        return [path / SINGLE]
    if (path / INDEX).exists():
        files = sorted(set(_weight_map(path).values()))
        outside = [name for name in files if Path(name).name != name]
        if outside:
            raise CheckpointError(f"{path / INDEX} points outside its folder ({shorten(outside)}).")
        absent = [name for name in files if not (path / name).is_file()]
        if absent:
            raise CheckpointError(f"{path / INDEX} names files that are not there: {shorten(absent)}.")
        return [path / name for name in files]
    pickled = sorted(file.name for pattern in PICKLED for file in path.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{path} holds its weights only as pickles ({shorten(pickled)}), which can run code and are never read "
            f"here; convert them to safetensors, as transformers' save_pretrained writes them."
        )
    raise CheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}.")


def _weight_map(path: Path) -> dict[str, str]:
    found = read_json_object(path / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise CheckpointError(f"{path / INDEX} has no weight_map from tensors to files.")
    return found


def _check_index(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    if (path / SINGLE).exists():
        return
    weight_map = _weight_map(path)
    told = {(name, file) for name, file in weight_map.items()}
    found = {(name, stored.file.name) for name, stored in tensors.items()}
    if told != found:
        wrong = [f"{name} ({file})" for name, file in sorted(told ^ found)]
        raise CheckpointError(f"{path / INDEX} and the files that it names disagree about {shorten(wrong)}.")


def _read_header(file: Path) -> list[tuple[str, StoredTensor, str]]:
    """Each tensor's name, its place, and a digest of its header and samples."""
    try:
        with safe_open(file, framework="np"):  # checks lengths, offsets and dtypes against the file's size
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or no safetensors file ({error}).") from error
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        found = []
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            digest = hashlib.sha256(f"{entry['dtype']}{entry['shape']}".encode())
            for sample in _samples(handle, 8 + length + start, stop - start):
                digest.update(sample)
            found.append((name, StoredTensor(file, entry["dtype"], tuple(entry["shape"])), digest.hexdigest()))
    return found


def _samples(handle: BinaryIO, start: int, size: int) -> list[bytes]:
    samples = []
    for offset in (0, max(0, size // 2 - SAMPLE // 2), max(0, size - SAMPLE)):
        handle.seek(start + offset)
        samples.append(handle.read(min(SAMPLE, size)))
    return samples
