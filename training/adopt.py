"""`model=hf model.path=DIR`: a checkpoint's config.json completes the composed configuration, before anything starts.

Names, shapes and dtypes of all its tensors are checked here, by the files' headers; weights are read by the ranks.
"""

from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from models.config import ModelConfig, Positions
from models.hf.config import read_config
from models.hf.files import CheckpointFolder, open_folder
from models.hf.names import stored_pieces
from training.config import ConfigError
from training.screen import is_left_open

# What a checkpoint gives: the keys that conf/model/hf.yaml leaves open, as ${checkpoint:key}. What a user sets, be it
# null, takes the place of that mark, so that it is known.
GIVEN = {
    "vocab_size", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "max_positions", "positions",
    "rope_theta", "rope_factor", "rope_original_positions", "norm", "norm_eps", "mlp", "activation", "bias", "qkv_bias",
    "qk_norm", "window", "sink", "softmax_scale", "init_std", "tied_embeddings",
}  # fmt: skip
# Of these, what may be set otherwise, as no tensor depends on it: a longer context, another window.
FREE = {
    "max_positions", "rope_theta", "rope_factor", "rope_original_positions", "norm_eps", "window", "softmax_scale",
    "init_std",
}  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def adopt_checkpoint(composed: DictConfig) -> None:
    """Complete `composed.model` in place from the checkpoint that `model.path` names; nothing without one.

    Raises:
        ConfigError: model=hf without a path, a path without model=hf, or an override that contradicts the checkpoint.
        CheckpointError: what the checkpoint lacks, or what the decoder does; see `models.hf.files`.
    """
    model, path = composed.model, composed.model.path
    left_open = {key for key in GIVEN if is_left_open(model, key)}
    if path is None:
        if left_open:
            raise ConfigError(
                "model=hf takes the model from a checkpoint; give its folder, with config.json and safetensors, as "
                "model.path=DIR."
            )
        return
    if not left_open:
        raise ConfigError(
            f"model.path={path} gives every size of the model, and so does the preset; use model=hf with it, or leave "
            f"it out to start from random weights."
        )
    folder = open_folder(Path(path).expanduser().absolute())
    architecture, found = read_config(folder.config)
    for key in left_open:
        model[key] = getattr(found, key)
    given = {key: model[key] for key in GIVEN - left_open}  # now that a ${model...} among them can be followed
    _refuse_contradictions(given, found, folder)
    _refuse_bytes(composed.data, folder.path)
    stored_pieces(folder, architecture, found)
    model.path, model.content_hash = str(folder.path), folder.content_hash


def _refuse_contradictions(given: dict[str, Any], found: ModelConfig, folder: CheckpointFolder) -> None:
    fixed = GIVEN - FREE
    if found.positions is Positions.learned:
        fixed = fixed | {"max_positions"}  # the size of a table
    wrong = [
        f"model.{key}={_plain(given[key])}, not {_plain(getattr(found, key))}"
        for key in sorted(given.keys() & fixed)
        if given[key] != getattr(found, key)
    ]
    if wrong:
        raise ConfigError(
            f"{'; '.join(wrong)}: the weights in {folder.path} are of another shape; leave such keys out. Free to "
            f"choose are {', '.join(f'model.{key}' for key in sorted(FREE - fixed))} and what no checkpoint knows."
        )


def _refuse_bytes(data: DictConfig, folder: Path) -> None:
    """A checkpoint with a tokenizer was not trained on bytes, and byte ids are words of its vocabulary."""
    files = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if files and data.tokenizer == "byte" and data.source != "synthetic":
        raise ConfigError(
            f"data.tokenizer=byte feeds ids of bytes to weights that know those of {folder / files[0]}; set "
            f"data.tokenizer to a folder with tokenizer.json ({folder}) or to a tiktoken rank file."
        )


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value
