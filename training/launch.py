"""From a composed configuration to a run on the ranks at hand. The one place that reads the environment."""

import os

from rich.console import Console

from kernels.api import BACKENDS
from training.config import Config, ConfigError
from training.loop import Outcome, train


def check_ranks(config: Config) -> None:
    """Raise ConfigError when the launcher or `nproc` gives more ranks than this version trains on, which is one."""
    text = os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"the environment gives {text!r} ranks (WORLD_SIZE or SLURM_STEP_NUM_TASKS); unset it.")
    given = int(text)
    if config.nproc is not None and config.nproc != given and given != 1:
        raise ConfigError(f"nproc={config.nproc}, and the launcher gives {given} ranks; leave nproc out.")
    ranks = max(given, config.nproc or 1)
    if ranks != 1 or (config.nproc is not None and config.nproc < 1):
        asked = ranks if config.nproc is None else config.nproc
        raise ConfigError(f"{asked} ranks were asked for, and this version trains in one process; use nproc=1.")


def launch(config: Config) -> Outcome:
    """Validate `config` and train; raises ConfigError before any work starts."""
    config.validate()
    check_ranks(config)
    if config.model.attention not in ("auto", *BACKENDS):
        raise ConfigError(
            f"model.attention={config.model.attention!r} is no attention backend; choose auto or "
            f"{' or '.join(BACKENDS)}."
        )
    console = Console(soft_wrap=True)
    return train(config, console)
