"""Transports: how a batch of messages gets from rank to rank, and the recorder that counts every byte on the way.

`TorchTransport` is torch.distributed. `LoopbackTransport` joins ranks of one process; its adversaries hold a schedule
to the rules of real networks:

- strict: batches of a communicator complete in order, a batch only when all its members are posted on both sides;
  what is sent and received must agree in size; no empty, self or non-contiguous message; no communicator that was not
  there at the start.
- late: the strict rules, and also: what is received is NaN until its wait, and what is sent is read at the last moment
  that is allowed, so a buffer that is read early or changed early gives wrong numbers.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.plan.ir import CLASSES
from parallel.plan.mesh import LINKS, MeshSpec
from parallel.runtime.groups import Groups


@dataclass
class Parcel:
    """A wire (flat uint8) to or from a cp rank, and its bytes by class of traffic."""

    peer: int
    wire: Tensor
    classes: Sequence[tuple[str, int]]


class Recorder:
    """Bytes sent, by (class of traffic, sender, receiver); copies on a rank count from it to itself."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[str, int, int], int] = defaultdict(int)

    def sent(self, rank: int, parcel: Parcel) -> None:
        """Count what a parcel really holds. ValueError where its classes do not add up to its wire."""
        if sum(size for _, size in parcel.classes) != parcel.wire.numel():
            raise ValueError(f"a wire of {parcel.wire.numel()} bytes is declared as {list(parcel.classes)}")
        for traffic, size in parcel.classes:
            self.bytes[traffic, rank, parcel.peer] += size

    def copied(self, rank: int, traffic: str, size: int) -> None:
        """Count what a rank moves within itself for an exchange."""
        self.bytes[traffic, rank, rank] += size

    def by_link(self, mesh: MeshSpec, ranks: Sequence[int]) -> dict[str, int]:
        """`{"kv/intra": bytes, ...}` for every class and link; `ranks` are the world ranks of the cp ranks."""
        total = {f"{traffic}/{link}": 0 for traffic in CLASSES for link in LINKS}
        for (traffic, a, b), size in self.bytes.items():
            total[f"{traffic}/{mesh.link(ranks[a], ranks[b])}"] += size
        return total


class Transport(Protocol):
    """Moves batches for one rank. A batch may be asked whether it could be finished without waiting."""

    rank: int

    def post(self, comm: str, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Any:
        """Start a batch; its handle."""
        ...

    def ready(self, handle: Any) -> bool:
        """Whether `finish` would return at once; True where that cannot be known."""
        ...

    def finish(self, handle: Any) -> None:
        """Wait until what is received has arrived and what is sent may change."""
        ...


class TorchTransport:
    """Batched point-to-point messages of torch.distributed, on the process group of each communicator."""

    def __init__(self, groups: Groups, rank: int) -> None:
        self.groups, self.world = groups, groups.cp_ranks
        self.rank = rank

    def post(self, comm: str, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> list[dist.Work]:
        group = self.groups.get(comm)
        operations = [dist.P2POp(dist.isend, p.wire, self.world[p.peer], group) for p in sends]
        operations += [dist.P2POp(dist.irecv, p.wire, self.world[p.peer], group) for p in recvs]
        return dist.batch_isend_irecv(operations)

    def ready(self, handle: list[dist.Work]) -> bool:
        return True

    def finish(self, handle: list[dist.Work]) -> None:
        for work in handle:
            work.wait()


@dataclass
class _Batch:
    """A posted batch of one rank on one communicator."""

    rank: int
    comm: str
    sends: Sequence[Parcel]
    recvs: Sequence[Parcel]
    copies: list[Tensor | None] = field(default_factory=list)  # what was sent, once it is fixed
    sent_at: list[tuple[int, int]] = field(default_factory=list)  # (peer, how many went to that peer before)
    due: list[tuple[int, int]] = field(default_factory=list)
    done: bool = False


class Loopback:
    """The wires between ranks of one process. `rules` is plain, strict or late."""

    def __init__(self, size: int, rules: str = "plain", comms: Iterable[str] = ("cp", "cp_inner", "cp_outer")) -> None:
        if rules not in ("plain", "strict", "late"):
            raise ValueError(f"rules={rules!r}; choose plain, strict or late")
        self.size, self.rules, self.comms = size, rules, frozenset(comms)
        self.sent: dict[tuple[str, int, int], list[tuple[_Batch, int]]] = defaultdict(list)
        self.awaited: dict[tuple[str, int, int], list[tuple[_Batch, int]]] = defaultdict(list)
        self.queues: dict[tuple[str, int], list[_Batch]] = defaultdict(list)

    def transport(self, rank: int) -> "LoopbackTransport":
        return LoopbackTransport(self, rank)

    def check_empty(self) -> None:
        """Raise ValueError if something was posted and never finished."""
        left = [batch for queue in self.queues.values() for batch in queue if not batch.done]
        if left:
            raise ValueError(f"rank {left[0].rank} left a batch on {left[0].comm} unfinished")


class LoopbackTransport:
    """One rank's end of a Loopback."""

    def __init__(self, net: Loopback, rank: int) -> None:
        self.net, self.rank = net, rank

    def post(self, comm: str, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> _Batch:
        net = self.net
        batch = _Batch(self.rank, comm, sends, recvs)
        if net.rules != "plain":
            self._check(comm, [*sends, *recvs])
        for number, parcel in enumerate(sends):
            key = (comm, self.rank, parcel.peer)
            batch.sent_at.append((parcel.peer, len(net.sent[key])))
            net.sent[key].append((batch, number))
            batch.copies.append(None if net.rules == "late" else parcel.wire.clone())
        for number, parcel in enumerate(recvs):
            key = (comm, parcel.peer, self.rank)
            batch.due.append((parcel.peer, len(net.awaited[key])))
            net.awaited[key].append((batch, number))
            if net.rules == "late":
                parcel.wire.fill_(255)  # all ones: NaN in every float format
        net.queues[comm, self.rank].append(batch)
        return batch

    def _check(self, comm: str, parcels: list[Parcel]) -> None:
        if comm not in self.net.comms:
            raise ValueError(f"communicator {comm!r} was not there at the start ({', '.join(sorted(self.net.comms))})")
        for parcel in parcels:
            if parcel.peer == self.rank:
                raise ValueError(f"rank {self.rank} sends to itself; copy instead")
            if parcel.wire.numel() == 0 or not parcel.wire.is_contiguous() or parcel.wire.dtype != torch.uint8:
                raise ValueError(
                    f"rank {self.rank}: an empty or non-contiguous message, or no bytes, for rank {parcel.peer}"
                )

    def ready(self, handle: _Batch) -> bool:
        if self.net.rules != "plain":
            for earlier in self.net.queues[handle.comm, self.rank]:
                if earlier is handle:
                    break
                if not earlier.done and not self._matched(earlier):
                    return False
            return self._matched(handle)
        return all(len(self.net.sent[handle.comm, peer, self.rank]) > number for peer, number in handle.due)

    def _matched(self, batch: _Batch) -> bool:
        sent, awaited = self.net.sent, self.net.awaited
        return all(len(sent[batch.comm, peer, batch.rank]) > n for peer, n in batch.due) and all(
            len(awaited[batch.comm, batch.rank, peer]) > n for peer, n in batch.sent_at
        )

    def finish(self, handle: _Batch) -> None:
        for number in range(len(handle.sends)):
            self._fix(handle, number)
        for parcel, (peer, n) in zip(handle.recvs, handle.due):
            source, number = self.net.sent[handle.comm, peer, self.rank][n]
            wire = self._fix(source, number)
            if wire.numel() != parcel.wire.numel():
                raise ValueError(
                    f"rank {peer} sent {wire.numel()} bytes on {handle.comm}, and rank {self.rank} expects "
                    f"{parcel.wire.numel()}"
                )
            parcel.wire.copy_(wire)
        handle.done = True

    def _fix(self, batch: _Batch, number: int) -> Tensor:
        """What was sent, read now if it was not before."""
        copy = batch.copies[number]
        if copy is None:
            copy = batch.copies[number] = batch.sends[number].wire.clone()
        return copy


def gather_uneven(x: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Every rank's `x[count, ...]`, in the order of the group's ranks. A group of one (None) communicates nothing."""
    if group is None:
        return [x]
    width = max(counts)
    padded = x.new_zeros(width, *x.shape[1:])
    padded[: x.shape[0]] = x
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return [part[:count] for part, count in zip(parts, counts)]
