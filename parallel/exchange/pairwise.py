"""Rounds of direct messages between pairs: keys move to queries, or queries to keys and partial results back.

The messages of a round are one batch, posted before the round before it is computed. What a rank computed for another
goes back in a batch whose number the schedule gives. Batches are posted in the order of their numbers, each as soon as
what it carries is there, but never more than one round ahead: two rounds' keys are held at a time.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from parallel.exchange.lane import Lane
from parallel.plan.ir import Message, Wait
from parallel.plan.tokens import TokenSet
from parallel.plan.writer import Writer

Sides = tuple[list[Message], list[Message]]


@dataclass(frozen=True)
class Edge:
    """A block of attention between two members: `moves` says which side travels to the other.

    `q_tokens` of member `queries` and `k_tokens` of member `keys` are those that see something there, and so what is
    sent; the side that stays offers all its tokens.
    """

    queries: int
    keys: int
    moves: Literal["keys", "queries"]
    q_tokens: TokenSet
    k_tokens: TokenSet

    @property
    def sender(self) -> int:
        return self.keys if self.moves == "keys" else self.queries

    @property
    def receiver(self) -> int:
        return self.queries if self.moves == "keys" else self.keys

    @property
    def tokens(self) -> TokenSet:
        """What travels."""
        return self.k_tokens if self.moves == "keys" else self.q_tokens


@dataclass(frozen=True)
class Schedule:
    """Rounds, counted from 1, and the batches of each direction.

    Attributes:
        rounds: the edges of each round.
        fetches: direction -> the batch of each round's messages, increasing from 1.
        returns: direction -> (queries, keys) -> the batch in which a block's result goes back, after the batch of the
            round after it; forward, only edges whose queries move have one.
    """

    rounds: Sequence[Sequence[Edge]]
    fetches: dict[str, Sequence[int]]
    returns: dict[str, dict[tuple[int, int], int]]

    @cached_property
    def by_member(self) -> dict[int, list[tuple[int, Edge]]]:
        """Each member's edges with their rounds."""
        found: dict[int, list[tuple[int, Edge]]] = defaultdict(list)
        for number, edges in enumerate(self.rounds, 1):
            for edge in edges:
                found[edge.queries].append((number, edge))
                found[edge.keys].append((number, edge))
        return found

    def last_batch(self, direction: str) -> int:
        return max([0, *self.fetches[direction], *self.returns[direction].values()])


def straight(rounds: Sequence[Sequence[Edge]]) -> Schedule:
    """Every result goes back with the messages of a later round, as soon as it can."""
    last, numbers = len(rounds) + 1, range(1, len(rounds) + 1)
    returns: dict[str, dict[tuple[int, int], int]] = {"forward": {}, "backward": {}}
    for number, edges in enumerate(rounds, 1):
        for edge in edges:
            returns["backward"][edge.queries, edge.keys] = min(number + 2, last)
            if edge.moves == "queries":
                returns["forward"][edge.queries, edge.keys] = min(number + 2, last)
    return Schedule(rounds, {"forward": numbers, "backward": numbers}, returns)


class _Member:
    """One member's share of a schedule in one direction, by round and by batch."""

    def __init__(self, w: Writer, lane: Lane, schedule: Schedule, direction: str) -> None:
        self.w, self.lane, self.direction = w, lane, direction
        self.fetches, self.last = list(schedule.fetches[direction]), schedule.last_batch(direction)
        self.round_of = {batch: number for number, batch in enumerate(self.fetches, 1)}
        self.posted = 0
        self.pending: dict[int, Wait | None] = {}
        self.coming: dict[int, list[Edge]] = defaultdict(list)  # computed here
        self.going: dict[int, list[Edge]] = defaultdict(list)
        self.back: dict[int, list[tuple[int, Edge]]] = defaultdict(list)  # batch -> (round, edge)
        returns = schedule.returns[direction]
        for number, edge in schedule.by_member.get(lane.me, []):
            (self.coming if edge.receiver == lane.me else self.going)[number].append(edge)
            batch = returns.get((edge.queries, edge.keys))
            if batch is not None:
                self.back[batch].append((number, edge))

    def run(self) -> None:
        """Own block first, while the first round's messages travel; then round by round."""
        rounds, ends = len(self.fetches), [*self.fetches, self.last + 1, self.last + 1]
        if rounds:
            self.post_up_to(ends[0], 0)
        if self.direction == "forward":
            self.lane.attend_own(self.w)
        else:
            self.lane.attend_own_backward(self.w)
        for number in range(1, rounds + 1):
            self.wait_up_to(ends[number - 1])
            self.post_up_to(min(ends[number], self.last), number - 1)
            for edge in self.coming[number]:
                self.compute(number, edge)
            self.post_up_to(ends[number + 1] - 1, number)
        self.wait_up_to(self.last)

    def post_up_to(self, batch: int, computed: int) -> None:
        """Post batches in order up to `batch`, or to the first that carries a result of a round after `computed`."""
        while self.posted < batch:
            ours = [r for r, edge in self.back[self.posted + 1] if edge.receiver == self.lane.me]
            if any(r > computed for r in ours):
                return
            self.posted += 1
            self.pending[self.posted] = self.post(self.posted)

    def wait_up_to(self, batch: int) -> None:
        for number in sorted(n for n in self.pending if n <= batch):
            self.w.wait(self.pending.pop(number))
            self.settle(number)

    def name(self, what: str, number: int, edge: Edge) -> str:
        if edge.receiver == self.lane.me:
            return f"{what}{number}.{edge.sender}"
        return f"{what}{number}.from{edge.receiver}"

    def declare(self, kind: str, number: int, edge: Edge) -> str:
        lane = self.lane
        heads = lane.key_heads if kind in ("kv", "grad_kv") else lane.heads
        exact = kind in ("stats", "partial", "grad_q", "grad_kv")
        return self.w.buffer(self.name(kind, number, edge), kind, edge.tokens, heads, exact, capacity=lane.room)  # pyright: ignore[reportArgumentType]

    def kinds(self, edge: Edge) -> tuple[str, ...]:
        """The kinds of buffers that go from the sender to the receiver."""
        if edge.moves == "keys":
            return ("kv",)
        return ("q",) if self.direction == "forward" else ("q", "grad_out", "stats")

    def result(self, edge: Edge) -> str:
        """The kind of what goes back."""
        if self.direction == "forward":
            return "partial"
        return "grad_kv" if edge.moves == "keys" else "grad_q"

    def post(self, batch: int) -> Wait | None:
        sends, recvs, lane = [], [], self.lane
        number = self.round_of.get(batch, 0)
        for edge in self.going[number]:
            for kind in self.kinds(edge):
                sends.append(lane.message(edge.receiver, kind, lane.names[kind], edge.tokens, exact=kind == "stats"))
        for edge in self.coming[number]:
            for kind in self.kinds(edge):
                name = self.declare(kind, number, edge)
                recvs.append(lane.message(edge.sender, kind, name, edge.tokens, exact=kind == "stats"))
        for computed, edge in self.back[batch]:
            kind = self.result(edge)
            if edge.receiver == lane.me:
                sends.append(lane.message(edge.sender, kind, self.name(kind, computed, edge), edge.tokens, exact=True))
            else:
                name = self.declare(kind, computed, edge)
                recvs.append(lane.message(edge.receiver, kind, name, edge.tokens, exact=True))
        return self.w.post(batch, lane.comm, sends, recvs)

    def settle(self, batch: int) -> None:
        """After a batch: merge or add what came back, in the order of ranks, and let go of what was sent."""
        for computed, edge in sorted(self.back[batch], key=lambda item: item[1].receiver):
            kind = self.result(edge)
            name = self.name(kind, computed, edge)
            if edge.sender == self.lane.me:
                if kind == "partial":
                    self.w.merge(name, self.lane.names["acc"])
                else:
                    self.w.add(name, self.lane.names[kind])
            self.w.free(name)

    def compute(self, number: int, edge: Edge) -> None:
        w, lane, n = self.w, self.lane, self.lane.names
        held = {kind: self.name(kind, number, edge) for kind in self.kinds(edge)}
        q_tokens, k_tokens = (lane.mine, edge.k_tokens) if edge.moves == "keys" else (edge.q_tokens, lane.mine)
        if self.direction == "forward":
            into = n["acc"] if edge.moves == "keys" else self.declare("partial", number, edge)
            w.attend(held.get("q", n["q"]), held.get("kv", n["kv"]), into, q_tokens, k_tokens, lane.heads)
        else:
            kind = self.result(edge)
            lane.backward(w, q_tokens, k_tokens, None, **held, **{kind: self.declare(kind, number, edge)})
        w.free(*held.values())


def pairwise_forward(w: Writer, lane: Lane, schedule: Schedule) -> None:
    """The forward steps of member `lane.me`."""
    _Member(w, lane, schedule, "forward").run()


def pairwise_backward(w: Writer, lane: Lane, schedule: Schedule) -> None:
    """The backward steps of the same rounds: what moved moves again, and its gradients go back in fp32."""
    _Member(w, lane, schedule, "backward").run()
