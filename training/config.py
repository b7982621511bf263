"""The typed configuration of a run: what Hydra composes, checked before anything starts.

Every key has a type, so a misspelt key or a wrong type dies in a second and names itself. `Config` is plain data once
composed; nothing below reads Hydra.
"""

import dataclasses
import enum
import hashlib
import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from data.config import DataConfig
from data.sources.table import open_tokenizer
from models.config import ModelConfig
from parallel.plan.mesh import MeshSpec
from parallel.strategy import Strategy
from training.optim.kinds import OPTIMIZERS

MOST_RANKS = 4096  # of one plan


class ConfigError(ValueError):
    """A configuration that cannot run, in one sentence with the numbers and a way out."""


class LrSchedule(enum.Enum):
    cosine = "cosine"
    wsd = "wsd"


class AdjustLr(enum.Enum):
    original = "original"
    match_rms_adamw = "match_rms_adamw"


class Task(enum.Enum):
    train = "train"
    plan = "plan"
    explain = "explain"


class Precision(enum.Enum):
    fp32 = "fp32"
    bf16 = "bf16"


class Resume(enum.Enum):
    auto = "auto"
    must = "must"
    never = "never"


class NonFinite(enum.Enum):
    stop = "stop"
    skip = "skip"


class WandbMode(enum.Enum):
    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass
class OptimConfig:
    """The optimiser and its learning-rate schedule."""

    name: str = "adamw"  # a name in training.optim.kinds.OPTIMIZERS: adamw, muon, adafactor
    lr: float = 4e-3  # peak learning rate
    adamw_lr: float | None = None  # muon: that of what AdamW updates; null: lr
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # adamw, muon's AdamW: shares kept of the averages
    # of gradients and of their squares
    eps: float = 1e-8  # adamw, muon's AdamW: added to the root of the average of squares
    momentum: float = 0.95  # muon: share of the old average that is kept
    adjust_lr: AdjustLr = AdjustLr.match_rms_adamw  # muon: the rate of a matrix by its shape, so that updates are as
    # large as AdamW's and share its rate (arXiv 2502.16982); original: times sqrt(max(1, rows / columns))
    beta2_decay: float = -0.8  # adafactor: the average of squares forgets by step ** this
    clip_update: float = 1.0  # adafactor: root mean square, 1 or more, to which an update is cut
    weight_decay: float = 0.1  # on matrices only; never on norms, biases, sinks or embeddings
    adamw_weight_decay: float | None = None  # muon: that of the head, which AdamW updates; null: weight_decay
    clip_norm: float | None = 1.0  # global gradient norm; null: no clipping
    schedule: LrSchedule = LrSchedule.cosine  # cosine: warm up, then half a cosine; wsd: warm up, stay, decay linearly
    warmup_steps: int = 20  # steps of linear warmup from 0 to the peak
    decay_steps: int = 0  # wsd: length of the final decay, in steps
    min_lr_ratio: float = 0.1  # where the decay ends, as a share of the peak

    def validate(self, steps: int) -> None:
        """Raise ConfigError for values that no run could use, or that the optimiser does not read."""
        if self.name not in OPTIMIZERS:
            raise ConfigError(f"optim.name={self.name!r} is unknown; choose one of {', '.join(OPTIMIZERS)}.")
        self._check_read()
        for key in ("lr", "adamw_lr"):
            if getattr(self, key) is not None and not 0 < getattr(self, key) < math.inf:
                raise ConfigError(f"optim.{key}={getattr(self, key)} must be a finite number above 0.")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError(f"optim.betas={list(self.betas)} must be two numbers in [0, 1).")
        if not 0 < self.eps < math.inf:
            raise ConfigError(f"optim.eps={self.eps} must be a finite number above 0.")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optim.momentum={self.momentum} must lie in [0, 1).")
        if not -math.inf < self.beta2_decay < 0:
            raise ConfigError(f"optim.beta2_decay={self.beta2_decay} must be a finite number below 0.")
        if not 1 <= self.clip_update < math.inf:
            raise ConfigError(f"optim.clip_update={self.clip_update} must be a finite number of 1 or more.")
        for key in ("weight_decay", "adamw_weight_decay"):
            if getattr(self, key) is not None and not 0 <= getattr(self, key) < math.inf:
                raise ConfigError(f"optim.{key}={getattr(self, key)} must be a finite number of 0 or more.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"optim.clip_norm={self.clip_norm} must be above 0; null turns clipping off.")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(f"optim.min_lr_ratio={self.min_lr_ratio} must lie in [0, 1].")
        if self.warmup_steps < 0 or self.decay_steps < 0:
            raise ConfigError(
                f"optim.warmup_steps={self.warmup_steps} and optim.decay_steps={self.decay_steps} must be 0 or more."
            )
        if self.schedule is LrSchedule.cosine and self.decay_steps:
            raise ConfigError(
                f"optim.decay_steps={self.decay_steps} belongs to optim.schedule=wsd; with cosine it would be ignored."
            )
        if self.schedule is LrSchedule.wsd and self.warmup_steps + self.decay_steps > steps:
            raise ConfigError(
                f"optim.warmup_steps={self.warmup_steps} and optim.decay_steps={self.decay_steps} exceed "
                f"run.steps={steps}; shorten them or train longer."
            )

    def _check_read(self) -> None:
        usual = OptimConfig()
        for key in dict.fromkeys(key for kind in OPTIMIZERS.values() for key in kind.keys):
            value = getattr(self, key)
            if value != getattr(usual, key) and key not in OPTIMIZERS[self.name].keys:
                able = [name for name, kind in OPTIMIZERS.items() if key in kind.keys]
                shown = value.value if isinstance(value, enum.Enum) else value
                raise ConfigError(
                    f"optim.{key}={shown} is set, but optim.name={self.name} reads no {key}; use "
                    f"optim={' or '.join(able)}, or leave optim.{key} out."
                )


@dataclass
class RunConfig:
    """One run: how long, where to, how often to look and to save."""

    task: Task = Task.train  # plan: prove, print and draw the first batch's schedule; explain: what would be refused
    lengths: list[int] | None = None  # task=plan: lengths of documents to plan instead of the first batch, in one row
    name: str = "run"  # the run folder is named <name>-<hash of the configuration>
    steps: int = 200  # optimiser steps: the schedule's horizon
    stop_at: int | None = None  # end this invocation after this step, saving; the schedule does not change
    accumulate: int = 1  # micro-batches per optimiser step; divides data.rows
    seed: int = 0  # of initial weights and of the order of documents; 0 or more
    device: str = "auto"  # auto: cuda when there is one, else cpu
    precision: Precision = Precision.fp32  # bf16: autocast; weights, gradients and optimiser stay fp32
    nonfinite: NonFinite = NonFinite.stop  # a NaN or infinite loss or gradient: stop, or skip the step and count it
    dir: str | None = None  # the run folder; null: runs/<name>-<hash>
    resume: Resume = Resume.auto  # auto: the newest complete checkpoint if any; must: fail without one; never: anew
    eval_every: int = 100  # steps between evaluations; the last step always evaluates; 0: only the last
    save_every: int = 100  # steps between checkpoints; the last step always saves; 0: only the last
    keep: int = 2  # checkpoints kept
    log_every: int = 10  # steps between printed lines where the output is no terminal
    timeout_s: int = 45  # how long a rank waits for the others; 20 times as long to meet, to evaluate and to save

    def validate(self, rows: int) -> None:
        """Raise ConfigError for values that no run could use."""
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ConfigError(f"run.name={self.name!r} must be a plain folder name.")
        for key, least in (
            ("steps", 1),
            ("accumulate", 1),
            ("keep", 1),
            ("log_every", 1),
            ("eval_every", 0),
            ("save_every", 0),
            ("seed", 0),
            ("timeout_s", 1),
        ):
            if getattr(self, key) < least:
                raise ConfigError(f"run.{key}={getattr(self, key)} must be {least} or more.")
        if self.stop_at is not None and not 1 <= self.stop_at <= self.steps:
            raise ConfigError(f"run.stop_at={self.stop_at} must lie between 1 and run.steps={self.steps}.")
        if self.lengths is not None and self.task is not Task.plan:
            raise ConfigError(
                f"run.lengths={list(self.lengths)} are documents that run=plan draws, and this is "
                f"run.task={self.task.value}; leave them out, or use run=plan."
            )
        if self.lengths is not None and min(self.lengths, default=0) < 1:
            raise ConfigError(
                f"run.lengths={list(self.lengths)} must list documents of 1 token or more; null plans the first batch."
            )
        if rows % self.accumulate:
            raise ConfigError(
                f"run.accumulate={self.accumulate} does not divide data.rows={rows}; choose a divisor of {rows}."
            )


WANDB_VARIABLES = {
    "project": "WANDB_PROJECT", "entity": "WANDB_ENTITY", "group": "WANDB_RUN_GROUP", "tags": "WANDB_TAGS",
    "name": "WANDB_NAME", "id": "WANDB_RUN_ID", "dir": "WANDB_DIR",
}  # fmt: skip
WANDB_MODES = {
    "": WandbMode.auto, "online": WandbMode.online, "run": WandbMode.online, "offline": WandbMode.offline,
    "dryrun": WandbMode.offline, "disabled": WandbMode.disabled,
}  # fmt: skip


@dataclass
class WandbConfig:
    """Where the run is tracked. Metrics always go to metrics.jsonl as well."""

    # What is null (of mode: auto) is taken from the environment, as W&B names it, and only then from what stands here.
    mode: WandbMode = WandbMode.auto  # auto: WANDB_DISABLED, WANDB_MODE, else online with a key, offline without
    project: str | None = None  # null: WANDB_PROJECT, else longfold
    entity: str | None = None  # null: WANDB_ENTITY, else the key's
    group: str | None = None  # null: WANDB_RUN_GROUP, else that of the sweep
    tags: list[str] | None = None  # null: WANDB_TAGS; the strategy's label is one of them in any case
    name: str | None = None  # null: WANDB_NAME, else the run folder's
    id: str | None = None  # null: WANDB_RUN_ID, else the run folder's own
    dir: str | None = None  # null: WANDB_DIR, else the run folder

    def settle(self, environment: Mapping[str, str]) -> None:
        """Fill what is left open from the environment's variables, and check all of it.

        Raises:
            ConfigError: what W&B would refuse only when the run begins.
        """
        sources: dict[str, str] = {}
        if self.mode is WandbMode.auto:
            self._settle_mode(environment)
        for key, variable in WANDB_VARIABLES.items():
            if getattr(self, key) is None and environment.get(variable):
                text = environment[variable]
                setattr(self, key, [part.strip() for part in text.split(",")] if key == "tags" else text)
                sources[key] = f"the environment's {variable}="
        shown = {key: sources.get(key, f"wandb.{key}=") + str(getattr(self, key)) for key in WANDB_VARIABLES}
        for key, most in (("project", 128), ("id", 128)):
            value = getattr(self, key)
            if value is not None and (set(value) & set("/\\#?%:") or not 0 < len(value.strip()) <= most):
                raise ConfigError(
                    f"{shown[key]}: W&B takes 1 to {most} characters, and none of / \\ # ? % :; choose another."
                )
        bad = next((tag for tag in self.tags or [] if not 0 < len(tag) <= 64), None)
        if bad is not None:
            raise ConfigError(
                f"{shown['tags']}: W&B takes tags of 1 to 64 characters, and {bad!r} has {len(bad)}; shorten it."
            )
        if self.mode is not WandbMode.disabled and importlib.util.find_spec("wandb") is None:
            raise ConfigError(
                f"wandb.mode={self.mode.value} needs the package wandb, which is not installed; pip install wandb, or "
                f"use wandb.mode=disabled (metrics are in metrics.jsonl all the same)."
            )

    def _settle_mode(self, environment: Mapping[str, str]) -> None:
        if environment.get("WANDB_DISABLED", "").lower() not in ("", "0", "false", "no", "off"):
            self.mode = WandbMode.disabled
            return
        named = environment.get("WANDB_MODE", "").lower()
        if named not in WANDB_MODES:
            raise ConfigError(
                f"the environment's WANDB_MODE={named} is none of {', '.join(filter(None, WANDB_MODES))}; unset it, or "
                f"set wandb.mode."
            )
        self.mode = WANDB_MODES[named]


@dataclass
class Config:
    """A whole run."""

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    strategy: Strategy = field(default_factory=Strategy)
    run: RunConfig = field(default_factory=RunConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    nproc: int | None = None  # ranks to start here; null: the ranks given by the launcher, else 1

    def validate(self) -> None:
        """Check every part and what the parts ask of each other; raise ConfigError (a ValueError) with one sentence."""
        self.model.validate()
        self.data.validate()
        self.run.validate(self.data.rows)
        self.optim.validate(self.run.steps)
        self.strategy.validate()
        if self.nproc is not None and not 1 <= self.nproc <= MOST_RANKS:
            raise ConfigError(
                f"nproc={self.nproc} must lie in 1 to {MOST_RANKS}; null: the ranks that a launcher gives, else 1."
            )
        tokenizer = open_tokenizer(self.data)
        self.data.tokenizer_sha256 = tokenizer.identity.get(
            "sha256"
        )  # part of the hash, as the file's name says little
        ids = tokenizer.vocab_size
        if ids > self.model.vocab_size:
            raise ConfigError(
                f"the {self.data.tokenizer} tokenizer has {ids} ids and model.vocab_size={self.model.vocab_size}: a "
                f"token id would lie beyond the vocabulary; set model.vocab_size={ids} or more."
            )
        if self.model.prefix is not None and self.model.prefix >= self.data.seq_len:
            raise ConfigError(
                f"model.prefix={self.model.prefix} leaves nothing to predict in rows of data.seq_len="
                f"{self.data.seq_len}; use a shorter prefix, or longer rows."
            )
        if self.data.seq_len > self.model.max_positions:
            raise ConfigError(
                f"data.seq_len={self.data.seq_len} exceeds model.max_positions={self.model.max_positions}, the longest "
                f"document of this model; set one of them to the other."
            )

    def check_ranks(self, world: int) -> MeshSpec:
        """The mesh on `world` ranks. ConfigError where the strategy, the model or the rows do not fit it."""
        try:
            mesh = self.strategy.mesh(world, self.model.heads, self.model.kv_heads)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.strategy.weights == "fully_sharded" and world > 1 and not OPTIMIZERS[self.optim.name].sharded:
            able = " or ".join(name for name, kind in OPTIMIZERS.items() if kind.sharded)
            raise ConfigError(
                f"optim.name={self.optim.name} cannot update the shards that strategy.weights=fully_sharded gives "
                f"{world} ranks; use optim={able}, or strategy.weights=replicated."
            )
        parts = mesh.dp * self.run.accumulate
        if self.data.rows % parts:
            raise ConfigError(
                f"data.rows={self.data.rows} do not split over dp={mesh.dp} replicas x run.accumulate="
                f"{self.run.accumulate} micro-batches; make data.rows a multiple of {parts}, or use fewer of either."
            )
        try:
            self.strategy.check_rows(mesh, self.data.rows // parts, self.model.heads)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return mesh


# Keys that do not change what is computed at a step: they take no part in the hash. What changes a step by rounding
# only (strategy, model.attention, model.recompute, model.compile) does: such runs are compared, so each has its own
# folder, and a run goes on with the arithmetic that it began with, to the bit.
UNHASHED = {
    "nproc": None,
    "wandb": None,
    "model": {"path"},  # content_hash says what lies there
    "run": {
        "task", "lengths", "stop_at", "dir", "resume", "nonfinite", "eval_every", "save_every", "keep", "log_every",
        "timeout_s",
    },
}  # fmt: skip


def to_plain(config: Config) -> dict:
    """The configuration as JSON-able nested dicts, enums by value."""

    def plain(value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return value.value
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value

    return plain(dataclasses.asdict(config))


def hashed_part(plain: dict) -> dict:
    """What the hash covers: `plain` (see `to_plain`) without UNHASHED."""
    kept = {}
    for section, values in plain.items():
        left_out = UNHASHED.get(section, set())
        if left_out is not None:
            kept[section] = {k: v for k, v in values.items() if k not in left_out}
    # null fills these axes with 1, so both spellings are one computation
    kept["strategy"] |= {axis: kept["strategy"][axis] or 1 for axis in ("pp", "dp", "tp")}
    return kept


def config_hash(config: Config) -> str:
    """Eight hex digits that name the computation, equal on every machine."""
    text = json.dumps(hashed_part(to_plain(config)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def differences(old: dict, new: dict) -> list[str]:
    """The hashed keys in which two plain configurations differ, as 'model.heads: 4 there, 8 here'."""
    old, new = hashed_part(old), hashed_part(new)
    lines = []
    for section in sorted(old.keys() | new.keys()):
        a, b = old.get(section, {}), new.get(section, {})
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                lines.append(f"{section}.{key}: {a.get(key)!r} there, {b.get(key)!r} here")
    return lines
