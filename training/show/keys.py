"""Every key of the configuration with its type, default, unit and meaning: from the dataclasses and their comments."""

import ast
import dataclasses
import enum
import inspect
import textwrap
import types
import typing
from typing import Any, NamedTuple

from data.config import DataConfig, MixPart
from models.config import ModelConfig
from parallel.sharding.planner import Planner
from parallel.strategy import Strategy
from training.config import Config, OptimConfig, RunConfig, WandbConfig

SECTIONS: dict[str, type] = {
    "": Config,
    "model": ModelConfig,
    "data": DataConfig,
    "data.sources[i]": MixPart,
    "optim": OptimConfig,
    "strategy": Strategy,
    "strategy.planner": Planner,
    "run": RunConfig,
    "wandb": WandbConfig,
}
ABOUT = {
    "": "Of the run as a whole.",
    "model": "The decoder. A preset of conf/model gives the sizes.",
    "data": "Documents, how they are packed into rows, and what is held out.",
    "data.sources[i]": "One source of a mixture, in the list `data.sources`. It also has the source keys of `data`.",
    "optim": "The optimiser and its learning rate.",
    "strategy": "How ranks share a sequence. A preset of conf/strategy sets the first axes.",
    "strategy.planner": "How sharding=whole_document searches for a plan.",
    "run": "How long a run lasts, where its files lie, how often it evaluates and saves.",
    "wandb": "Tracking in Weights & Biases. Metrics always go to metrics.jsonl as well.",
}
# what a number counts; a ratio or a count of nothing in particular has the unit 1
UNITS: dict[str, str] = {
    "nproc": "ranks",
    "model.vocab_size": "token ids", "model.layers": "layers", "model.hidden": "channels", "model.heads": "heads",
    "model.kv_heads": "heads", "model.head_dim": "channels", "model.ffn": "channels", "model.max_positions": "tokens",
    "model.norm_eps": "1", "model.rope_theta": "1", "model.rope_factor": "1", "model.rope_original_positions": "tokens",
    "model.window": "tokens", "model.chunk": "tokens", "model.prefix": "tokens", "model.first": "tokens",
    "model.softcap": "logit", "model.softmax_scale": "1", "model.init_std": "1",
    "data.seq_len": "tokens", "data.rows": "rows", "data.lookahead": "documents", "data.eval_fraction": "1",
    "data.eval_rows": "rows", "data.sources[i].weight": "1",
    "optim.lr": "1", "optim.adamw_lr": "1", "optim.betas": "1", "optim.eps": "1", "optim.momentum": "1",
    "optim.beta2_decay": "1", "optim.clip_update": "1", "optim.weight_decay": "1", "optim.adamw_weight_decay": "1",
    "optim.clip_norm": "1", "optim.warmup_steps": "steps", "optim.decay_steps": "steps", "optim.min_lr_ratio": "1",
    "strategy.head_slices": "slices", "strategy.batch_groups": "groups", "strategy.pp": "ranks",
    "strategy.dp": "ranks", "strategy.cp_outer": "ranks", "strategy.cp_inner": "ranks", "strategy.tp": "ranks",
    "strategy.node_size": "ranks", "strategy.buffer_bytes": "bytes", "strategy.planner.ratio": "1",
    "run.lengths": "tokens", "run.steps": "steps", "run.stop_at": "steps", "run.accumulate": "micro-batches",
    "run.seed": "1", "run.eval_every": "steps", "run.save_every": "steps", "run.keep": "checkpoints",
    "run.log_every": "steps", "run.timeout_s": "seconds",
}  # fmt: skip
NUMBERS = (int, float)


class Key(NamedTuple):
    """One key. `default` is None where a preset must give it; `choices` are those of an enumeration."""

    name: str
    kind: str
    default: str | None
    unit: str
    meaning: str
    choices: tuple[str, ...]


def keys_of(section: str) -> list[Key]:
    """The keys of a section of SECTIONS, in the order in which its dataclass lists them, nested sections left out.

    Raises:
        ValueError: a key without a comment, or a number without a unit.
    """
    schema = SECTIONS[section]
    inherited = {f.name for f in dataclasses.fields(schema.__mro__[1])} if schema is MixPart else set()
    said, found = comments(schema), []
    for field in dataclasses.fields(schema):
        name = f"{section}.{field.name}" if section else field.name
        if name in SECTIONS or field.name in inherited:
            continue
        hint = typing.get_type_hints(schema)[field.name]
        kinds = _kinds(hint)
        if field.name not in said:
            raise ValueError(f"{name} has no comment; say in {schema.__module__} what it means")
        if any(kind in NUMBERS for kind in kinds) and name not in UNITS:
            raise ValueError(f"{name} is a number without a unit; give it one in UNITS")
        choices = tuple(str(member.value) for kind in kinds if issubclass(kind, enum.Enum) for member in kind)
        kind = ("list of " if "list[" in str(hint) else "") + _shown_kind(kinds, choices)
        found.append(Key(name, kind, _default(field), UNITS.get(name, ""), said[field.name], choices))
    return found


def comments(schema: type) -> dict[str, str]:
    """Each field's comment: behind it, and on the lines after it that hold nothing else."""
    found: dict[str, str] = {}
    for each in reversed([c for c in schema.__mro__ if dataclasses.is_dataclass(c)]):
        source = textwrap.dedent(inspect.getsource(each))
        lines, tree = source.splitlines(), ast.parse(source).body[0]
        assert isinstance(tree, ast.ClassDef)
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                at = node.end_lineno or node.lineno
                parts = [lines[at - 1][node.end_col_offset or 0 :]]
                while at < len(lines) and lines[at].lstrip().startswith("#"):
                    parts.append(lines[at])
                    at += 1
                words = [part.strip().removeprefix("#").strip() for part in parts]
                if any(words):
                    found[node.target.id] = " ".join(words).strip()
    return found


def _kinds(hint: Any) -> list[type]:
    """The plain types in a hint, None and containers left out."""
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        return [] if hint is type(None) else [hint]
    return [kind for part in typing.get_args(hint) for kind in _kinds(part)]


def _shown_kind(kinds: list[type], choices: tuple[str, ...]) -> str:
    names = {bool: "true or false", int: "integer", float: "number", str: "text"}
    return ", ".join(choices) or " or ".join(dict.fromkeys(names.get(kind, "section") for kind in kinds))


def _default(field: dataclasses.Field) -> str | None:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return None
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value.value if isinstance(value, enum.Enum) else value)


def key_tables() -> str:
    """Markdown: a table for each section."""
    parts: list[str] = []
    for section, about in ABOUT.items():
        title = f"`{section}`" if section else "Top level"
        parts += [f"### {title}", "", about, "", "| key | takes | default | unit | meaning |", "|---|---|---|---|---|"]
        for key in keys_of(section):
            default = "of the preset" if key.default is None else f"`{key.default}`" if key.default else "empty"
            cells = (f"`{key.name}`", key.kind, default, key.unit, key.meaning)
            parts.append(f"| {' | '.join(cell.replace('<', '&lt;').replace('|', '&#124;') for cell in cells)} |")
        parts.append("")
    return "\n".join(parts[:-1])
