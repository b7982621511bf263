"""Write a run's model as a Hugging Face checkpoint: config.json and safetensors, which transformers loads.

python -m training.export RUN                            the newest complete checkpoint of a run's folder, fp32
python -m training.export RUN --step 100 --dtype bf16 --out my-model --shard-gb 2

Of a run that started from a checkpoint and read its tokenizer, the tokenizer's files and special tokens are taken from
there as they are.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from safetensors import SafetensorError, safe_open

from data.tokenizers.tokenizer import ByteTokenizer
from models.config import ModelConfig
from models.flops import parameter_count
from models.hf.files import CONFIG, read_json_object
from models.hf.fit import fitting_architecture, write_config
from models.hf.weights import check_written, split_shards, write_json, write_weights
from models.parameters import parameter_shapes
from training.config import ConfigError
from training.record.checkpoint import complete_checkpoints, is_intact, load_state, sync_path

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
CARRIED = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class RunCheckpoint:
    """A run's checkpoint: its folder, step, model and the plain configuration of the run."""

    checkpoint: Path
    step: int
    model: ModelConfig
    config: dict[str, Any]


def export_run(
    run: Path,
    step: int | None = None,
    out: Path | None = None,
    dtype: str = "fp32",
    shard_gb: float = 5.0,
    console: Console | None = None,
) -> Path:
    """Write the model of `run` at `step` (None: the newest complete checkpoint) to `out`, and return where it lies.

    The folder appears whole or not at all. `out` defaults to `<run>/export/step_<n>-<dtype>`; one that holds anything
    is refused. `shard_gb` is in 1e9 bytes.

    Raises:
        ConfigError: no such run or step, a damaged checkpoint, or a target that is taken.
        CheckpointError: no architecture of transformers computes this model; says what is unfit.
    """
    console = console or Console(soft_wrap=True)
    if not 0 < shard_gb < float("inf"):
        raise ConfigError(f"--shard-gb {shard_gb} must be above 0, and finite.")
    source = find_source(run, step, console)
    architecture = fitting_architecture(source.model)
    target = (out or run / "export" / f"step_{source.step:08d}-{dtype}").absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already and holds something; give another --out.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _writing(target) as temporary:
        _write(temporary, source, architecture, DTYPES[dtype], int(shard_gb * 1e9), console)
        for path in (*temporary.iterdir(), temporary):
            sync_path(path)
        os.rename(temporary, target)
    count = parameter_count(source.model).total
    console.print(
        f"step {source.step} as {architecture}, {count:,} parameters in {dtype}: {target}",
        highlight=False,
        markup=False,
    )
    return target


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[Path]:
    """An empty folder beside `target`, held against another export; gone at the end unless it became `target`."""
    temporary = target.with_name(f".writing-{target.name}")
    temporary.mkdir(exist_ok=True)
    held = os.open(temporary, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another export is writing {target}; wait for it, or give another --out.") from None
        try:
            for path in temporary.iterdir():  # of an export that was killed
                path.unlink()
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    finally:
        os.close(held)


def find_source(run: Path, step: int | None, console: Console) -> RunCheckpoint:
    """The checkpoint that is to be exported, checked against its checksums.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    found = complete_checkpoints(run / "checkpoints")
    if step is not None:
        steps = [int(path.name.removeprefix("step_")) for path in found]
        found = [path for path, number in zip(found, steps) if number == step]
        if not found:
            kept = ", ".join(str(number) for number in steps) or "none"
            raise ConfigError(f"{run} has no complete checkpoint of step {step}; complete ones: {kept}.")
    while found and not is_intact(found[-1]):
        damaged = found.pop()
        console.print(f"{damaged} is damaged (a checksum differs); it is passed over", highlight=False, markup=False)
    if not found:
        raise ConfigError(f"{run} is no run folder with a complete checkpoint in {run / 'checkpoints'}.")
    state = load_state(found[-1])
    return RunCheckpoint(found[-1], state["step"], model_from_plain(state["config"]["model"]), state["config"])


def model_from_plain(plain: dict[str, Any]) -> ModelConfig:
    """The model section of a run's plain configuration, typed again. ConfigError if this version cannot read it."""
    try:
        made = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), plain))
    except OmegaConfBaseException as error:
        raise ConfigError(f"the run's model cannot be read by this version: {str(error).splitlines()[0]}.") from error
    assert isinstance(made, ModelConfig)
    return made


def _write(
    folder: Path, source: RunCheckpoint, architecture: str, dtype: torch.dtype, shard_bytes: int, console: Console
) -> None:
    special, carried, note = _tokenizer(source)
    write_json(folder / CONFIG, write_config(source.model, str(dtype).removeprefix("torch."), special))
    shards = split_shards(architecture, source.model, dtype, shard_bytes)
    with safe_open(source.checkpoint / "model.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
        if shapes != parameter_shapes(source.model):
            raise ConfigError(f"{source.checkpoint} does not hold the tensors of the model in its state.json.")
        written = iter(shards)

        def say() -> None:
            console.print(f"wrote {next(written).name}", highlight=False, markup=False)

        write_weights(folder, shards, dtype, file.get_tensor, say)
    for path in carried:
        shutil.copyfile(path, folder / path.name)
    check_written(folder, source.model)
    (folder / "README.md").write_text(_card(source, architecture, note), encoding="utf-8")
    console.print(note, highlight=False, markup=False)


def _tokenizer(source: RunCheckpoint) -> tuple[dict[str, Any], list[Path], str]:
    """Special tokens' ids, files to copy, and a sentence that says where the tokenizer is."""
    data = source.config["data"]
    name = data["tokenizer"]
    if source.model.path and data.get("tokenizer_sha256"):
        start = Path(source.model.path)
        if not (start / CONFIG).is_file():
            return {}, [], f"{start.name}, where training started, is gone: add its tokenizer's files to this folder."
        if not reads_like(start, data):
            note = f"No tokenizer files are written: the run read {name}, and {start.name} has another tokenizer."
            return {}, [], note
        carried = [start / file for file in CARRIED if (start / file).is_file()]
        raw = read_json_object(start / CONFIG)
        names = ", ".join(path.name for path in carried) or "none, as there were none"
        note = f"Files of the tokenizer and of generation, from {start.name}, where training started: {names}."
        return {key: raw.get(key) for key in SPECIAL}, carried, note
    bytes_alone = name == "byte" and source.model.vocab_size == ByteTokenizer.vocab_size
    special = {"bos_token_id": ByteTokenizer.bos, "eos_token_id": ByteTokenizer.eos} if bytes_alone else {}
    meaning = " Ids 0 to 255 are bytes of UTF-8, 256 begins a document, 257 ends it." if name == "byte" else ""
    return special, [], f"No tokenizer files are written: the run's tokenizer is longfold's {name}.{meaning}"


def reads_like(start: Path, data: dict[str, Any]) -> bool:
    """Whether the tokenizer in `start` is the one that the run read, by content: however its path was spelled, and
    where only vocab.json and merges.txt lie there, also by the vocabulary and merges of the file that was read."""
    wanted = data["tokenizer_sha256"]
    whole = start / "tokenizer.json"
    files = [whole, *(start / place / "tokenizer.model" for place in ("", "original")), *start.glob("*.tiktoken")]
    if any(_sha256(path) == wanted for path in files if path.is_file()):
        return True
    read = Path(data["tokenizer"]).expanduser()
    read = read / "tokenizer.json" if read.is_dir() else read
    parts = [start / "vocab.json", start / "merges.txt"]
    if whole.is_file() or not all(path.is_file() for path in (*parts, read)) or _sha256(read) != wanted:
        return False
    return _vocabulary(read) == (json.loads(parts[0].read_bytes()), _merges(parts[1].read_text("utf-8").splitlines()))


def _vocabulary(file: Path) -> tuple[Any, Any]:
    """The vocabulary and merges of a tokenizers JSON file; (None, None) of any other."""
    try:
        model = json.loads(file.read_bytes())["model"]
        return model["vocab"], _merges(model["merges"])
    except (ValueError, KeyError, TypeError):
        return None, None


def _merges(lines: list[Any]) -> list[tuple[str, ...]]:
    """Merges as pairs; files hold them as such, or as lines."""
    pairs = [tuple(line.split(" ")) if isinstance(line, str) else tuple(line) for line in lines]
    return [pair for pair in pairs if len(pair) == 2 and pair[0] != "#version:"]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _card(source: RunCheckpoint, architecture: str, note: str) -> str:
    data, run = source.config["data"], source.config["run"]
    return (
        f"# {run['name']}\n\n"
        f"A {architecture} model of {parameter_count(source.model).total:,} parameters, trained by longfold for "
        f"{source.step} of {run['steps']} steps on {data['source']}, {data['rows']} rows of {data['seq_len']} tokens a "
        f"step.\n\n{note}\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; a failure is one sentence."""
    parser = argparse.ArgumentParser(prog="python -m training.export", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--step", type=int, help="of this checkpoint instead of the newest complete one")
    parser.add_argument("--out", type=Path, help="a folder that is empty or absent; RUN/export/step_<n>-<dtype>")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32", help="of the weights written (fp32)")
    parser.add_argument("--shard-gb", type=float, default=5.0, help="largest file, in 1e9 bytes (5)")
    given = parser.parse_args(arguments)
    try:
        export_run(given.run, given.step, given.out, given.dtype, given.shard_gb)
    except (ValueError, OSError, SafetensorError) as error:  # the last: a full disk
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
