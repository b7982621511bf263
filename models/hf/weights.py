"""Weights of Hugging Face checkpoints: into a decoder, and into a folder. Tensor by tensor, never unpickled."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.config import ModelConfig
from models.decoder import Decoder
from models.hf.config import read_config
from models.hf.files import CONFIG, INDEX, SINGLE, CheckpointError, CheckpointFolder, open_folder
from models.hf.names import StackedTensor, pieces, stored_head, stored_pieces
from models.initialise import Distribute, in_full

BYTES = {torch.bfloat16: 2, torch.float32: 4}


@torch.no_grad()
def read_weights(decoder: Decoder, path: Path, place: Distribute = in_full) -> None:
    """Fill a decoder in place with the weights of the checkpoint in `path`, in its dtype whatever the files hold.

    Files are mapped and read one tensor at a time: beside the decoder, the largest tensor is held.

    Args:
        decoder: of the checkpoint's shapes; what changes none of them (windows, rotary base) may differ from it.
        place: which part of a whole value a parameter holds.

    Raises:
        CheckpointError: the checkpoint is not this model's, or another than when `config.content_hash` was taken.
    """
    config, folder = decoder.config, open_folder(path)
    if config.content_hash not in (None, folder.content_hash):
        raise CheckpointError(
            f"{path} holds other weights (content {folder.content_hash}) than when the run was configured "
            f"({config.content_hash}); leave it as it is while a run starts."
        )
    architecture, _ = read_config(folder.config)
    stored = stored_pieces(folder, architecture, config)
    parameters = dict(decoder.named_parameters())
    with _opened(folder) as read:
        for name, piece in stored.items():
            value = read(name)
            parts = (value.t() if piece.transposed else value).split(piece.rows)
            for ours, part in zip(piece.ours, parts):
                parameters[ours].copy_(place(part, parameters[ours]))
        embedding = next(name for name, piece in stored.items() if piece.ours == ("embed_tokens.weight",))
        if stored_head(folder, config) and not torch.equal(read("lm_head.weight"), read(embedding)):
            raise CheckpointError(
                f"{path} stores lm_head.weight with other values than the embedding, though its config.json ties the "
                f"two (tie_word_embeddings); set that to false, or drop lm_head.weight."
            )


@contextlib.contextmanager
def _opened(folder: CheckpointFolder) -> Iterator[Callable[[str], Tensor]]:
    """A function that reads a tensor by its name; each file is mapped once."""
    with contextlib.ExitStack() as stack:
        files = {
            path: stack.enter_context(safe_open(path, framework="pt"))
            for path in {stored.file for stored in folder.tensors.values()}
        }
        yield lambda name: files[folder.tensors[name].file].get_tensor(name)


@dataclass(frozen=True)
class WeightFile:
    """A file of weights to be written, and what goes into it."""

    name: str
    pieces: tuple[StackedTensor, ...]


def split_shards(architecture: str, config: ModelConfig, dtype: torch.dtype, shard_bytes: int) -> list[WeightFile]:
    """The model's tensors in order, in files of at most `shard_bytes`; a larger tensor has a file to itself."""
    groups: list[list[StackedTensor]] = [[]]
    room = shard_bytes
    for piece in pieces(architecture, config):
        size = _numel(piece) * BYTES[dtype]
        if groups[-1] and size > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(piece)
        room -= size
    count = len(groups)
    if count == 1:
        return [WeightFile(SINGLE, tuple(groups[0]))]
    return [
        WeightFile(f"model-{number:05d}-of-{count:05d}.safetensors", tuple(group))
        for number, group in enumerate(groups, 1)
    ]


@torch.no_grad()
def write_weights(
    folder: Path, shards: list[WeightFile], dtype: torch.dtype, read: Callable[[str], Tensor], done: Callable[[], None]
) -> None:
    """Write `shards` into `folder`, with an index where there are several; one shard is held at a time.

    Args:
        read: a parameter of ours by name, whole.
        done: called after each shard.
    """
    weight_map: dict[str, str] = {}
    total = 0
    for shard in shards:
        tensors = {}
        for piece in shard.pieces:
            value = torch.cat([read(name).to(dtype) for name in piece.ours])
            tensors[piece.theirs] = (value.t() if piece.transposed else value).contiguous()
            weight_map[piece.theirs] = shard.name
            total += _numel(piece) * BYTES[dtype]
        save_file(tensors, folder / shard.name, metadata={"format": "pt"})  # transformers asks for the format
        done()
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(file: Path, value: dict[str, Any]) -> None:
    """A JSON file as transformers writes it."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def check_written(folder: Path, config: ModelConfig) -> None:
    """Read a written folder's config.json and headers back, and compare them with `config`.

    Raises:
        CheckpointError: they say anything else.
    """
    written = open_folder(folder)
    architecture, found = read_config(written.config)
    stored_pieces(written, architecture, config)
    ours = [config.layer_windows(), config.scale(), config.rope_theta, config.rope_factor, config.norm_eps]
    theirs = [found.layer_windows(), found.scale(), found.rope_theta, found.rope_factor, found.norm_eps]
    if ours != theirs or found.tied_embeddings != config.tied_embeddings:
        raise CheckpointError(f"{folder / CONFIG} says {theirs}, where the model has {ours}.")


def _numel(piece: StackedTensor) -> int:
    return int(torch.Size(piece.shape).numel())
