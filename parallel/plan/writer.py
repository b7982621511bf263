"""Writes one rank's program: declares buffers on the way and leaves out whatever is empty."""

from collections.abc import Iterable

from parallel.plan.ir import (
    Add,
    Attend,
    AttendBackward,
    Buffer,
    Copy,
    Free,
    Heads,
    Kind,
    MakeStats,
    Merge,
    Message,
    Post,
    Program,
    Role,
    Wait,
)  # fmt: skip
from parallel.plan.tokens import TokenSet


class Writer:
    """Appends steps to a Program. Messages and blocks without tokens or heads are dropped, on both sides alike."""

    def __init__(self, rank: int) -> None:
        self.program = Program(rank)

    def buffer(
        self,
        name: str,
        kind: Kind,
        tokens: TokenSet,
        heads: Heads,
        exact: bool = False,
        role: Role = "temporary",
        capacity: int | None = None,
    ) -> str:
        """Declare a buffer, once. `capacity` is its tokens by default."""
        assert name not in self.program.buffers, f"buffer {name} is declared twice"
        room = tokens.count if capacity is None else capacity
        self.program.buffers[name] = Buffer(kind, tokens, heads, exact, role, room)
        return name

    def post(self, batch: int, comm: str, sends: Iterable[Message], recvs: Iterable[Message]) -> Wait | None:
        """Start a batch; None where it holds no message."""
        some_sends = tuple([m for m in sends if m.tokens.count and m.heads[1] > m.heads[0]])
        some_recvs = tuple([m for m in recvs if m.tokens.count and m.heads[1] > m.heads[0]])
        if not some_sends and not some_recvs:
            return None
        self.program.steps.append(Post(batch, comm, some_sends, some_recvs))
        return Wait(batch, comm)

    def wait(self, *pending: Wait | None) -> None:
        """Finish batches, in order."""
        self.program.steps.extend(wait for wait in pending if wait is not None)

    def attend(self, q: str, kv: str, into: str, q_tokens: TokenSet, k_tokens: TokenSet, heads: Heads) -> None:
        if q_tokens.count and _holds(k_tokens, heads):
            self.program.steps.append(Attend(q, kv, into, q_tokens, k_tokens, heads))

    def attend_backward(
        self,
        q: str, kv: str, grad_out: str, stats: str, into_q: str, into_kv: str,
        q_tokens: TokenSet, k_tokens: TokenSet, heads: Heads,
    ) -> None:  # fmt: skip
        if q_tokens.count and _holds(k_tokens, heads):
            self.program.steps.append(
                AttendBackward(q, kv, grad_out, stats, into_q, into_kv, q_tokens, k_tokens, heads)
            )

    def stats(self, partial: str, grad_out: str, into: str) -> None:
        if self._has(partial):
            self.program.steps.append(MakeStats(partial, grad_out, into))

    def merge(self, source: str, into: str) -> None:
        if self._has(source):
            self.program.steps.append(Merge(source, into))

    def add(self, source: str, into: str, tokens: TokenSet | None = None) -> None:
        """Add `source` into `into`: all of it, or some of its tokens."""
        held = self.program.buffers[source]
        tokens = held.tokens if tokens is None else tokens
        if _holds(tokens, held.heads):
            self.program.steps.append(Add(source, into, tokens, held.heads))

    def copy(self, source: str, into: str, tokens: TokenSet, heads: Heads) -> None:
        if _holds(tokens, heads):
            self.program.steps.append(Copy(source, into, tokens, heads))

    def free(self, *names: str) -> None:
        """Mark temporaries as done."""
        self.program.steps.extend(Free(name) for name in names if self._has(name))

    def result(self, what: str, name: str) -> None:
        self.program.results[what] = name

    def _has(self, name: str) -> bool:
        buffer = self.program.buffers[name]
        return _holds(buffer.tokens, buffer.heads)


def _holds(tokens: TokenSet, heads: Heads) -> bool:
    return tokens.count > 0 and heads[1] > heads[0]
