"""Rounds of direct messages between pairs: keys move to queries, or queries to keys and partial results back.

One batch a round. The transfer of the next round is posted before a round is computed; what a rank computed for another
goes back two rounds later, with that round's batch, so a batch never waits for a computation of its own round.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from parallel.exchange.lane import Lane
from parallel.plan.ir import Message
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


Rounds = Sequence[Sequence[Edge]]


class _Member:
    """One member's share of the rounds."""

    def __init__(self, lane: Lane, rounds: Rounds) -> None:
        self.lane = lane
        self.rounds = [[e for e in edges if lane.me in (e.queries, e.keys)] for edges in rounds]

    def edges(self, number: int) -> list[Edge]:
        """The edges of round `number`, counted from 1; none outside the rounds."""
        return self.rounds[number - 1] if 1 <= number <= len(self.rounds) else []

    def name(self, what: str, number: int, edge: Edge) -> str:
        other = edge.queries if edge.keys == self.lane.me else edge.keys
        return f"{what}{number}.{other}"

    def out(self, number: int) -> Iterable[Edge]:
        return (e for e in self.edges(number) if e.sender == self.lane.me)

    def into(self, number: int) -> Iterable[Edge]:
        return (e for e in self.edges(number) if e.receiver == self.lane.me)


def pairwise_forward(w: Writer, lane: Lane, rounds: Rounds) -> None:
    """The forward steps of member `lane.me`, its own block first, while the first round's messages travel."""
    member = _Member(lane, rounds)
    pending = w.post(1, lane.comm, *_fetch(w, member, 1, backward=False))
    lane.attend_own(w)
    for number in range(1, len(rounds) + 3):
        w.wait(pending)
        for edge in member.out(number - 2):
            if edge.moves == "queries":
                w.merge(member.name("partial", number - 2, edge), lane.names["acc"])
                w.free(member.name("partial", number - 2, edge))
        for edge in member.into(number - 2):
            if edge.moves == "queries":
                w.free(member.name("partial", number - 2, edge))
        sends, recvs = _fetch(w, member, number + 1, backward=False)
        back, home = _partials(w, member, number - 1)
        pending = w.post(number + 1, lane.comm, sends + back, recvs + home)
        for edge in member.into(number):
            _attend(w, member, number, edge)


def pairwise_backward(w: Writer, lane: Lane, rounds: Rounds) -> None:
    """The backward steps of the same rounds: what moved moves again, and its gradients go back in fp32."""
    member = _Member(lane, rounds)
    pending = w.post(1, lane.comm, *_fetch(w, member, 1, backward=True))
    lane.attend_own_backward(w)
    for number in range(1, len(rounds) + 3):
        w.wait(pending)
        for edge in member.out(number - 2):
            what = "grad_kv" if edge.moves == "keys" else "grad_q"
            w.add(member.name(what, number - 2, edge), lane.names[what])
            w.free(member.name(what, number - 2, edge))
        for edge in member.into(number - 2):
            w.free(member.name("grad_kv" if edge.moves == "keys" else "grad_q", number - 2, edge))
        sends, recvs = _fetch(w, member, number + 1, backward=True)
        back, home = _gradients(w, member, number - 1)
        pending = w.post(number + 1, lane.comm, sends + back, recvs + home)
        for edge in member.into(number):
            _attend_backward(w, member, number, edge)


def _travelling(edge: Edge, backward: bool) -> tuple[str, ...]:
    """The kinds of buffers that go from the sender to the receiver."""
    if edge.moves == "keys":
        return ("kv",)
    return ("q", "grad_out", "stats") if backward else ("q",)


def _fetch(w: Writer, member: _Member, number: int, backward: bool) -> Sides:
    lane, sends, recvs = member.lane, [], []
    for edge in member.out(number):
        tokens = edge.k_tokens if edge.moves == "keys" else edge.q_tokens
        for kind in _travelling(edge, backward):
            sends.append(lane.message(edge.receiver, kind, lane.names[kind], tokens, exact=kind == "stats"))
    for edge in member.into(number):
        tokens = edge.k_tokens if edge.moves == "keys" else edge.q_tokens
        for kind in _travelling(edge, backward):
            name = _declare(w, member, kind, number, edge, tokens)
            recvs.append(lane.message(edge.sender, kind, name, tokens, exact=kind == "stats"))
    return sends, recvs


def _declare(w: Writer, member: _Member, kind: str, number: int, edge: Edge, tokens: TokenSet) -> str:
    lane = member.lane
    heads = lane.key_heads if kind in ("kv", "grad_kv") else lane.heads
    exact = kind in ("stats", "partial", "grad_q", "grad_kv")
    capacity = lane.sets[edge.sender].count
    return w.buffer(member.name(kind, number, edge), kind, tokens, heads, exact, capacity=capacity)  # pyright: ignore[reportArgumentType]


def _partials(w: Writer, member: _Member, number: int) -> Sides:
    """Partial results of round `number` on their way back to their queries."""
    return _back(w, member, number, {"queries": "partial"})


def _gradients(w: Writer, member: _Member, number: int) -> Sides:
    return _back(w, member, number, {"keys": "grad_kv", "queries": "grad_q"})


def _back(w: Writer, member: _Member, number: int, kinds: dict[str, str]) -> Sides:
    lane, sends, recvs = member.lane, [], []
    for edge in member.edges(number):
        if edge.moves not in kinds:
            continue
        kind = kinds[edge.moves]
        tokens = edge.k_tokens if edge.moves == "keys" else edge.q_tokens
        if edge.receiver == lane.me:
            sends.append(lane.message(edge.sender, kind, member.name(kind, number, edge), tokens, exact=True))
        else:
            name = _declare(w, member, kind, number, edge, tokens)
            recvs.append(lane.message(edge.receiver, kind, name, tokens, exact=True))
    return sends, recvs


def _attend(w: Writer, member: _Member, number: int, edge: Edge) -> None:
    lane = member.lane
    if edge.moves == "keys":
        held = member.name("kv", number, edge)
        w.attend(lane.names["q"], held, lane.names["acc"], lane.mine, edge.k_tokens, lane.heads)
        w.free(held)
        return
    held = member.name("q", number, edge)
    partial = _declare(w, member, "partial", number, edge, edge.q_tokens)
    w.attend(held, lane.names["kv"], partial, edge.q_tokens, lane.mine, lane.heads)
    w.free(held)


def _attend_backward(w: Writer, member: _Member, number: int, edge: Edge) -> None:
    lane = member.lane
    if edge.moves == "keys":
        held = member.name("kv", number, edge)
        grad = _declare(w, member, "grad_kv", number, edge, edge.k_tokens)
        lane.backward(w, lane.mine, edge.k_tokens, kv=held, grad_kv=grad)
        w.free(held)
        return
    q, grad_out, stats = (member.name(kind, number, edge) for kind in ("q", "grad_out", "stats"))
    grad = _declare(w, member, "grad_q", number, edge, edge.q_tokens)
    lane.backward(w, edge.q_tokens, lane.mine, q=q, grad_out=grad_out, stats=stats, grad_q=grad)
    w.free(q, grad_out, stats)
