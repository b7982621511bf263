"""What a timed job on real ranks needs of the others: to start together, the slower one's seconds, swapped bytes.

A job makes a `TimedRanks` and runs on ranks of a default process group, as `tests.ranks.pool.RankPool` gives it one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from parallel.plan.mesh import MeshSpec
from parallel.runtime.comm import Parcel, TorchTransport, gather_uneven
from parallel.runtime.groups import Groups, default_place


class Seconds(NamedTuple):
    """By the clock, and of the processor: without waits, and without what neighbours on a machine take."""

    wall: float
    processor: float


class TimedRanks:
    """All ranks of the default group, as one cp group.

    Attributes:
        rank, world: this rank, and how many there are.
    """

    def __init__(self) -> None:
        self.rank, self.world = default_place()
        self.groups = Groups(MeshSpec(cp_outer=self.world, node_size=self.world), self.rank)

    def slowest(self, value: float) -> float:
        """The largest of every rank's `value`; all ranks wait for one another here."""
        mine = torch.tensor([value], dtype=torch.float64)
        return max(float(part) for part in gather_uneven(mine, [1] * self.world, self.groups.get("cp")))

    def timed(self, call: Callable[[], object]) -> Seconds:
        """Of `call`, which all ranks make at once, on the rank that takes longest; the same on every rank."""
        self.slowest(0.0)
        wall, processor = time.perf_counter(), time.process_time()
        call()
        processor, wall = time.process_time() - processor, time.perf_counter() - wall
        return Seconds(self.slowest(wall), self.slowest(processor))

    def swap(self, size: int) -> Callable[[], None]:
        """A call in which ranks 0 and 1 send each other `size` bytes, as a schedule's round does."""
        transport, peer = TorchTransport(self.groups, self.rank), 1 - self.rank
        sends, recvs = ([Parcel(peer, wire, [("kv", size)])] for wire in torch.zeros(2, size, dtype=torch.uint8))
        return lambda: transport.finish(transport.post("cp", sends, recvs))
