"""The ranks of a run as the loop sees them: they meet, compare configurations, decide together and part.

team = join(config, place)
losses = team.gather([loss, ...])          # [world, n], the same on every rank
path = team.first_decides(choose_folder)   # rank 0 does it; its answer, or its refusal, is everybody's
"""

import contextlib
import datetime
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from jaxtyping import Float64
from torch import Tensor
from torch.distributed import distributed_c10d

from parallel.runtime.groups import Groups
from training.config import Config, ConfigError, to_plain
from training.outcome import PeerLost
from training.place import Place
from training.record.hardware import pick_device

T = TypeVar("T")
PATIENCE = 20  # times run.timeout_s, where ranks may lawfully wait long: meeting, evaluating, saving


class Team:
    """The ranks of a run. A team of one talks to nobody, and needs no process group.

    Attributes:
        rank, world: this rank's number, and how many there are.
        mesh: who sits where (`parallel.plan.mesh.MeshSpec`).
        groups: the process groups of its axes; gradients are summed over "dp_cp".
        device: where this rank computes.
    """

    def __init__(self, config: Config, rank: int = 0, world: int = 1, device: torch.device | None = None) -> None:
        """Raises ConfigError, on every rank, where the strategy does not fit `world` or configurations differ."""
        self.rank, self.world = rank, world
        self.device = device or pick_device(config.run.device)
        self._timeout = datetime.timedelta(seconds=config.run.timeout_s)
        if world > 1:
            self._compare(config)
        self.mesh = config.check_ranks(world)
        self.groups = Groups(self.mesh, rank, self.device)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0

    def gather(self, values: Sequence[float]) -> Float64[Tensor, "world n"]:
        """Every rank's `values`, as many on each: one small collective."""
        mine = torch.tensor(values, dtype=torch.float64, device="cpu")
        if self.world == 1:
            return mine[None]
        every = torch.empty(self.world * mine.numel(), dtype=torch.float64, device="cpu")
        dist.all_gather_single(every, mine)
        return every.view(self.world, -1)

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's picklable `value`."""
        if self.world == 1:
            return [value]
        every: list[Any] = [None] * self.world
        dist.all_gather_object(every, value)
        return every

    def first_decides(self, make: Callable[[], T]) -> T:
        """What `make()` returns on rank 0, where alone it runs; what it raises there is raised on every rank."""
        if self.world == 1:
            return make()
        value, error = _attempt(make) if self.first else (None, None)
        box: list[Any] = [(value, None if error is None else _portable(error))]
        dist.broadcast_object_list(box, src=0)
        if error is not None:
            raise error
        value, error = box[0]
        if error is not None:
            raise error
        return cast(T, value)

    def together(self, make: Callable[[], T]) -> T:
        """This rank's `make()`; where it raised on any rank, the lowest such rank's error is raised on all."""
        if self.world == 1:
            return make()
        value, error = _attempt(make)
        errors = self.gather_objects(None if error is None else _portable(error))
        if error is not None:
            raise error
        for found in errors:
            if found is not None:
                raise found
        return cast(T, value)

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Collectives wait PATIENCE times as long: ranks may differ by the time of an evaluation or of a save."""
        self._wait_up_to(self._timeout * PATIENCE)
        try:
            yield
        finally:
            self._wait_up_to(self._timeout)

    def _wait_up_to(self, timeout: datetime.timedelta) -> None:
        if self.world > 1:
            for group in list(distributed_c10d._world.pg_map):
                distributed_c10d._set_pg_timeout(timeout, group)

    def _compare(self, config: Config) -> None:
        """Under a launcher each rank composes for itself: keys that differ would make ranks wait for each other."""
        every = self.gather_objects(to_plain(config))
        for rank, other in enumerate(every):
            lines = list(_differing(every[0], other))
            if lines:
                raise ConfigError(
                    f"rank {rank} composed another configuration than rank 0 ({'; '.join(lines[:4])}); give every "
                    f"rank the same command line and the same conf/."
                )


def join(config: Config, place: Place, device: torch.device) -> Team:
    """Meet the other ranks at `place.address` and compare configurations.

    Raises:
        ConfigError: they differ, or do not fit the number of ranks; on every rank.
    """
    if place.world > 1:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=place.address,
            rank=place.rank,
            world_size=place.world,
            timeout=datetime.timedelta(seconds=config.run.timeout_s) * PATIENCE,
        )
    team = Team(config, place.rank, place.world, device)
    team._wait_up_to(team._timeout)
    return team


def part() -> None:
    """Leave the other ranks in good order; nobody may need this rank any more."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_peers_failure(error: BaseException | None) -> bool:
    """Whether `error` says that another rank is gone or silent, here or anywhere in the chain that led to it."""
    while error is not None:
        text = str(error)
        if isinstance(error, (PeerLost, dist.DistError)) or "gloo/" in text or "NCCL" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def _attempt(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:
        return None, error


def _portable(error: Exception) -> Exception:
    """`error` as it can travel: itself, or its text where its class does not survive pickling."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _differing(first: dict, other: dict, prefix: str = "") -> Iterator[str]:
    for key in sorted(first.keys() | other.keys()):
        a, b = first.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _differing(a, b, f"{prefix}{key}.")
        elif a != b:
            yield f"{prefix}{key} is {b!r} there, {a!r} on rank 0"
