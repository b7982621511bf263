"""Which ranks a run has: those that torchrun or Slurm gives, or `nproc` started here. Alone reads the environment.

python train.py nproc=4 ...                                          four ranks on this machine
torchrun --nnodes 2 --nproc-per-node 8 ... train.py ...              the ranks that torchrun started
srun --nodes 2 --ntasks-per-node 8 python train.py ...               the ranks that Slurm started

No torch here: a launcher's parent only watches, and what cannot run is refused before a process starts.
"""

import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from training.config import Config, ConfigError, Task
from training.outcome import Outcome
from training.place import Place


def launch(config: Config) -> Outcome:
    """Check `config` against the ranks at hand and train on them; ConfigError before any work or process starts."""
    config.validate()
    given = given_place(os.environ)
    if config.run.task is not Task.train:
        if given is not None:
            raise ConfigError(
                f"run.task={config.run.task.value} starts no ranks; leave the launcher out, and set nproc."
            )
        return look(config)
    config.wandb.settle(os.environ)
    if given is not None and config.nproc is not None and config.nproc != given.world:
        raise ConfigError(
            f"nproc={config.nproc}, and the launcher gives {given.world} ranks (WORLD_SIZE, or Slurm's step); leave "
            f"nproc out."
        )
    place = given or Place()
    ranks = place.world if given else config.nproc or 1
    if given is None and ranks > (most := max(64, 4 * (os.cpu_count() or 1))):
        raise ConfigError(
            f"nproc={ranks} would start {ranks} processes on this machine of {os.cpu_count()} cores; use nproc={most} "
            f"or fewer, torchrun or Slurm on more machines, or run=plan to look at the schedule alone."
        )
    config.check_ranks(ranks)
    check_compiler(config, os.environ)
    if ranks > place.world:
        from training.start.supervise import run_local_ranks

        return run_local_ranks(config, ranks, local_environment(os.environ, ranks))
    from training.start.rank import run_rank  # loads torch

    return run_rank(config, place)


def refuse_sweep() -> None:
    """ConfigError where a launcher gave this process its ranks: a sweep's second job would meet the first one's group,
    and each rank would name the sweep's folder by its own clock."""
    given = given_place(os.environ)
    if given is not None and given.world > 1:
        raise ConfigError(
            f"-m runs one job after the other, and the launcher gives the {given.world} ranks of one job; start each "
            f"with its own torchrun or srun, or leave the launcher out and set nproc={given.world}."
        )


def group_sweep(config: Config, name: str) -> None:
    """Group a sweep's jobs in W&B under `name`, unless the user or the environment names a group."""
    if config.wandb.group is None and not os.environ.get("WANDB_RUN_GROUP"):
        config.wandb.group = name


def check_compiler(config: Config, environment: Mapping[str, str]) -> None:
    """ConfigError where model.compile=true would find no C++ compiler, which it needs on a CPU."""
    compiler = environment.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if config.model.compile and not config.run.device.startswith("cuda") and shutil.which(compiler) is None:
        raise ConfigError(
            f"model.compile=true needs a C++ compiler on a CPU, and {compiler} is not on the PATH; install it, name "
            f"another in CXX, or leave model.compile out (run.device=cuda needs none)."
        )


def look(config: Config) -> Outcome:
    """Print and draw what `config` would do on `nproc` ranks (run=plan), or what it would be refused (run=explain)."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    if config.run.task is Task.plan:
        from training.show.plan_view import show_plan  # loads matplotlib

        return show_plan(config, console)
    from training.show.explain import show_refusals

    show_refusals(config, console)
    return Outcome(0, None, Path())


def given_place(environment: Mapping[str, str]) -> Place | None:
    """This process's place among ranks that torchrun or Slurm started; None where nobody did.

    A Slurm step of one task gives no ranks: it may well be a shell that is to start its own.

    Raises:
        ConfigError: variables that do not make sense.
    """
    if "WORLD_SIZE" in environment:
        rank, world, local = (_number(environment, key) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return _checked(Place(rank, world, local, "env://"), "RANK and WORLD_SIZE")
    step = "SLURM_STEP_ID" in environment or "SLURM_STEP_NUM_TASKS" in environment  # a batch script alone is no step
    key = next((k for k in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if step and k in environment), None)
    if key is None or _number(environment, key) == 1:
        return None
    rank, world, local = (_number(environment, k) for k in ("SLURM_PROCID", key, "SLURM_LOCALID"))
    host = environment.get("MASTER_ADDR") or first_host(_nodes(environment))
    port = environment.get("MASTER_PORT") or str(20000 + _number(environment, "SLURM_JOB_ID") % 10000)
    return _checked(Place(rank, world, local, f"tcp://{host}:{port}"), f"SLURM_PROCID and {key}")


def first_host(nodes: str) -> str:
    """The first host of Slurm's list of nodes: 'gpu[003-007,9],login1' -> 'gpu003', 'a[1-2]b[3-4]' -> 'a1b3'."""
    numbers = r"\[\s*(\w+)(?:-\w+)?(?:/\d+)?(?:,\s*\w+(?:-\w+)?(?:/\d+)?)*\s*\]"
    found = re.match(rf"\s*((?:[\w.-]|{numbers})+)\s*(?:,|$)", nodes)
    if not found:
        raise ConfigError(f"Slurm's list of nodes {nodes!r} cannot be read; set MASTER_ADDR to the first node's name.")
    return re.sub(numbers, r"\1", found[1])


def local_environment(environment: Mapping[str, str], ranks: int) -> dict[str, str]:
    """What ranks on this machine get: gloo kept on the loopback interface, cores shared out instead of fought over."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    return {"GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": threads, **environment}


def _nodes(environment: Mapping[str, str]) -> str:
    for key in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if key in environment:
            return environment[key]
    raise ConfigError("Slurm names no nodes (SLURM_STEP_NODELIST); set MASTER_ADDR to the first node's name.")


def _number(environment: Mapping[str, str], key: str) -> int:
    text = environment.get(key)
    if text is None:
        raise ConfigError(f"a launcher's variables are set, but {key} is not; set it, or unset the others.")
    if not text.isdecimal():
        raise ConfigError(f"the environment gives {key}={text!r}, which is no count of ranks; unset it.")
    return int(text)


def _checked(place: Place, keys: str) -> Place:
    if not 0 <= place.rank < place.world:
        raise ConfigError(f"the environment gives rank {place.rank} of {place.world} ({keys}); unset them.")
    return place
