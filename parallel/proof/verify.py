"""Proof of a plan before it runs: nothing here trusts the code that wrote it.

`verify(plan)` raises PlanError with the first broken rule:

- every allowed (query, key) pair is computed exactly once for every query head, and its result reaches the owner of the
  query exactly once; backward likewise, for dq at the query's owner and for dk, dv at the key's;
- sends match receives, in order; a batch completes only when all its members are posted, batches of a communicator
  complete in order, nothing is sent to oneself, nothing is empty: and still every rank reaches its end;
- a buffer is written before it is read, is not touched while a batch holds it, and temporaries are freed once;
- what the exchange claims: no key or query travels to a rank that does not need it.

Pairs are checked in closed form on ranges: memory grows with the tokens, never with the pairs.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from parallel.plan.ir import (
    Add,
    Attend,
    AttendBackward,
    Buffer,
    Copy,
    Free,
    Heads,
    MakeStats,
    Merge,
    Message,
    Post,
    Program,
    Step,
    Wait,
    fields_of,
)  # fmt: skip
from parallel.plan.plan import DIRECTIONS, Plan
from parallel.plan.tokens import TokenSet
from parallel.proof.coverage import Block, coverage_fault, covered, meets, restrict


class PlanError(ValueError):
    """A plan that must not run."""


@dataclass
class _Content:
    """What a buffer holds: which of its tokens x heads were written, and for sums, which blocks went in."""

    written: list[tuple[TokenSet, Heads]] = field(default_factory=list)
    blocks: list[tuple[Block, TokenSet, Heads]] = field(default_factory=list)  # block, restricted to tokens x heads
    sending: list[tuple[TokenSet, Heads]] = field(default_factory=list)
    receiving: list[tuple[TokenSet, Heads]] = field(default_factory=list)
    freed: bool = False


SUMS = ("partial", "out", "grad_q", "grad_kv")


def verify(plan: Plan) -> None:
    """Raise PlanError, naming rank, step and rule, unless the plan is right. All ranks must have been planned.

    Raises:
        ValueError: a plan of some ranks only.
    """
    if len(plan.ranks) != plan.size:
        raise ValueError(f"the plan holds {len(plan.ranks)} of {plan.size} ranks; plan all of them to verify it")
    for direction in DIRECTIONS:
        programs = plan.programs(direction)
        machine = _Machine(plan, direction, programs)
        machine.run()
        if direction == "forward":
            _check_results(plan, machine, "out", of_queries=True)
        else:
            _check_results(plan, machine, "grad_q", of_queries=True)
            _check_results(plan, machine, "grad_kv", of_queries=False)


class _Machine:
    """Runs all ranks' steps on symbols, under the strict transport's rules."""

    def __init__(self, plan: Plan, direction: str, programs: list[Program]) -> None:
        self.plan, self.direction, self.programs = plan, direction, programs
        self.at = [0] * plan.size
        self.content: list[dict[str, _Content]] = [{} for _ in programs]
        self.posted: list[dict[tuple[str, int], Post]] = [{} for _ in programs]
        self.order: list[dict[str, list[int]]] = [defaultdict(list) for _ in programs]
        self.done: list[set[tuple[str, int]]] = [set() for _ in programs]
        self.snapshots: dict[tuple[str, int, int, int, int], tuple[Message, _Content]] = {}
        for program in programs:
            for name, buffer in program.buffers.items():
                held = buffer.role == "input" or (direction == "backward" and buffer.role == "saved")
                self.content[program.rank][name] = _Content([(buffer.tokens, buffer.heads)] if held else [])

    def fail(self, rank: int, rule: str) -> PlanError:
        program = self.programs[rank]
        at = self.at[rank]
        step = program.steps[at] if at < len(program.steps) else "the end"
        return PlanError(f"{self.direction}, rank {rank}, step {at} ({_short(step)}): {rule}")

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(self.programs):
                while self.at[rank] < len(program.steps) and self._step(rank, program.steps[self.at[rank]]):
                    self.at[rank] += 1
                    moved = True
        for rank, program in enumerate(self.programs):
            if self.at[rank] < len(program.steps):
                raise self.fail(rank, "never completes: a deadlock, or a message that its peer does not post")
            self._check_end(rank, program)

    def _check_end(self, rank: int, program: Program) -> None:
        left = {key for key in self.posted[rank]} - self.done[rank]
        if left:
            raise self.fail(rank, f"batch {sorted(left)[0]} is never waited for")
        for name, content in self.content[rank].items():
            buffer = program.buffers[name]
            if buffer.role == "temporary" and content.written and not content.freed:
                raise self.fail(rank, f"temporary buffer {name} is never freed")

    def _step(self, rank: int, step: Step) -> bool:
        """Do the step; False where it has to wait."""
        if isinstance(step, Wait):
            return self._wait(rank, step)
        if isinstance(step, Post):
            self._post(rank, step)
        elif isinstance(step, Attend):
            self._attend(rank, step)
        elif isinstance(step, AttendBackward):
            self._attend_backward(rank, step)
        elif isinstance(step, MakeStats):
            self._stats(rank, step)
        elif isinstance(step, Copy):
            self._move(rank, step.source, step.into, step.tokens, step.heads, add=False)
        elif isinstance(step, Add):
            self._move(rank, step.source, step.into, step.tokens, step.heads, add=True)
        elif isinstance(step, Merge):
            source = self._buffer(rank, step.source)
            self._move(rank, step.source, step.into, source.tokens, source.heads, add=True)
        else:
            self._free(rank, step)
        return True

    # buffers

    def _buffer(self, rank: int, name: str) -> Buffer:
        if name not in self.programs[rank].buffers:
            raise self.fail(rank, f"buffer {name} is not declared")
        return self.programs[rank].buffers[name]

    def _read(self, rank: int, name: str, tokens: TokenSet, heads: Heads) -> _Content:
        buffer, content = self._buffer(rank, name), self.content[rank][name]
        if content.freed or meets(tokens, heads, content.receiving):
            raise self.fail(rank, f"{name} is read {'after it was freed' if content.freed else 'while it is received'}")
        self._within(rank, name, buffer, tokens, heads)
        if not covered(tokens, heads, content.written):
            raise self.fail(rank, f"{name} is read where nothing was written")
        return content

    def _write(self, rank: int, name: str, tokens: TokenSet, heads: Heads) -> _Content:
        buffer, content = self._buffer(rank, name), self.content[rank][name]
        if content.freed or meets(tokens, heads, content.sending) or meets(tokens, heads, content.receiving):
            why = "after it was freed" if content.freed else "while a batch holds it"
            raise self.fail(rank, f"{name} is written {why}")
        if buffer.role == "input" or (self.direction == "backward" and buffer.role == "saved"):
            raise self.fail(rank, f"{name} is an input and must not be written")
        self._within(rank, name, buffer, tokens, heads)
        return content

    def _within(self, rank: int, name: str, buffer: Buffer, tokens: TokenSet, heads: Heads) -> None:
        inside = buffer.heads[0] <= heads[0] < heads[1] <= buffer.heads[1]
        if not inside or not covered(tokens, heads, [(buffer.tokens, buffer.heads)]):
            raise self.fail(rank, f"{name} does not hold {tokens} x heads {heads}")

    def _free(self, rank: int, step: Free) -> None:
        content = self.content[rank].get(step.buffer)
        buffer = self._buffer(rank, step.buffer)
        if content is None or content.freed or content.sending or content.receiving or buffer.role != "temporary":
            raise self.fail(rank, f"{step.buffer} is freed twice, while a batch holds it, or is no temporary")
        content.freed = True

    # computing

    def _attend(self, rank: int, step: Attend) -> None:
        block = self._block(rank, step)
        content = self._write(rank, step.into, step.q_tokens, step.heads)
        self._fill_sums(rank, step.into)
        content.blocks.append((block, step.q_tokens, step.heads))

    def _attend_backward(self, rank: int, step: AttendBackward) -> None:
        block = self._block(rank, step)
        for name in (step.grad_out, step.stats):
            self._read(rank, name, step.q_tokens, step.heads)
        key_heads = self.plan.shape.key_heads(step.heads)
        for name, tokens, heads in ((step.into_q, step.q_tokens, step.heads), (step.into_kv, step.k_tokens, key_heads)):
            content = self._write(rank, name, tokens, heads)
            self._fill_sums(rank, name)
            content.blocks.append((block, tokens, heads))

    def _block(self, rank: int, step: Attend | AttendBackward) -> Block:
        if not (step.q_tokens.ascending and step.k_tokens.ascending):
            raise self.fail(rank, "attention needs tokens in the sequence's order")
        self._read(rank, step.q, step.q_tokens, step.heads)
        self._read(rank, step.kv, step.k_tokens, self.plan.shape.key_heads(step.heads))
        return Block(step.q_tokens, step.k_tokens, step.heads)

    def _stats(self, rank: int, step: MakeStats) -> None:
        buffer = self._buffer(rank, step.partial)
        self._read(rank, step.partial, buffer.tokens, buffer.heads)
        self._read(rank, step.grad_out, buffer.tokens, buffer.heads)
        self._write(rank, step.into, buffer.tokens, buffer.heads).written.append((buffer.tokens, buffer.heads))

    def _fill_sums(self, rank: int, name: str) -> None:
        """A sum starts as zero (or the identity of merging), all of it, at its first use."""
        buffer, content = self.programs[rank].buffers[name], self.content[rank][name]
        if not content.written:
            content.written.append((buffer.tokens, buffer.heads))

    def _move(self, rank: int, source: str, into: str, tokens: TokenSet, heads: Heads, add: bool) -> None:
        if self._buffer(rank, source).kind in SUMS:
            self._touch_sum(rank, source)
        held = self._read(rank, source, tokens, heads)
        content = self._write(rank, into, tokens, heads)
        if add:
            self._fill_sums(rank, into)
        elif (
            self._buffer(rank, source).exact
            and not self._buffer(rank, into).exact
            and self._buffer(rank, into).kind == "kv"
        ):
            raise self.fail(rank, f"{source} would be rounded on its way into {into}")
        else:
            content.written.append((tokens, heads))
        content.blocks += restrict(held.blocks, tokens, heads)

    def _touch_sum(self, rank: int, name: str) -> None:
        if self.programs[rank].buffers[name].role != "input":
            self._fill_sums(rank, name)

    # messages

    def _post(self, rank: int, step: Post) -> None:
        key = (step.comm, step.batch)
        if key in self.posted[rank]:
            raise self.fail(rank, f"batch {step.batch} is posted twice on {step.comm}")
        for message in step.sends:
            self._check_message(rank, message)
            if self._buffer(rank, message.buffer).kind in SUMS:
                self._touch_sum(rank, message.buffer)
            self._read(rank, message.buffer, message.tokens, message.heads).sending.append(
                (message.tokens, message.heads)
            )
        for message in step.recvs:
            self._check_message(rank, message)
            held = self._write(rank, message.buffer, message.tokens, message.heads)
            held.receiving.append((message.tokens, message.heads))
        self.posted[rank][key] = step
        self.order[rank][step.comm].append(step.batch)

    def _check_message(self, rank: int, message: Message) -> None:
        if message.peer == rank or not 0 <= message.peer < self.plan.size:
            raise self.fail(rank, f"a message to or from rank {message.peer}; a rank copies to itself")
        if message.tokens.count == 0 or message.heads[1] <= message.heads[0]:
            raise self.fail(rank, f"an empty message to or from rank {message.peer}")
        kinds = {f.name for f in fields_of(self._buffer(rank, message.buffer).kind)}
        if not {f.name for f in fields_of(message.kind)} <= kinds:
            raise self.fail(rank, f"{message.buffer} holds no {message.kind}")

    def _wait(self, rank: int, step: Wait) -> bool:
        key = (step.comm, step.batch)
        mine = self.posted[rank].get(key)
        if mine is None or key in self.done[rank]:
            raise self.fail(rank, f"batch {step.batch} on {step.comm} was not posted, or was waited for before")
        for earlier in self.order[rank][step.comm]:
            if earlier == step.batch:
                break
            if (step.comm, earlier) not in self.done[rank] and not self._complete(rank, (step.comm, earlier)):
                return False
        if not self._complete(rank, key):
            return False
        self.done[rank].add(key)
        for message in mine.sends:
            self._snapshot(rank, key, message, mine)
            self.content[rank][message.buffer].sending.remove((message.tokens, message.heads))
        for number, message in enumerate(mine.recvs):
            self._receive(rank, key, number, message)
        return True

    def _complete(self, rank: int, key: tuple[str, int]) -> bool:
        """Whether every peer has posted the same batch, with what matches this rank's messages in order."""
        mine = self.posted[rank][key]
        for peer in {message.peer for message in (*mine.sends, *mine.recvs)}:
            other = self.posted[peer].get(key)
            if other is None:
                return False
            for a, b, sender in ((mine.sends, other.recvs, rank), (other.sends, mine.recvs, peer)):
                out = [m for m in a if m.peer == (peer if sender == rank else rank)]
                back = [m for m in b if m.peer == sender]
                if [_wire(m) for m in out] != [_wire(m) for m in back]:
                    raise self.fail(rank, f"what rank {sender} sends in batch {key[1]} is not what its peer receives")
        return True

    def _snapshot(self, rank: int, key: tuple[str, int], message: Message, post: Post) -> None:
        number = [m for m in post.sends if m.peer == message.peer].index(message)
        where = (*key, rank, message.peer, number)
        if where not in self.snapshots:
            held = self.content[rank][message.buffer]
            copied = _Content(blocks=restrict(held.blocks, message.tokens, message.heads))
            self.snapshots[where] = (message, copied)

    def _receive(self, rank: int, key: tuple[str, int], number: int, message: Message) -> None:
        peer_post = self.posted[message.peer][key]
        before = sum(m.peer == message.peer for m in self.posted[rank][key].recvs[:number])
        sent = [m for m in peer_post.sends if m.peer == rank][before]
        self._snapshot(message.peer, key, sent, peer_post)
        _, held = self.snapshots[(*key, message.peer, rank, before)]
        content = self.content[rank][message.buffer]
        content.receiving.remove((message.tokens, message.heads))
        content.written.append((message.tokens, message.heads))
        content.blocks += held.blocks
        if self.plan.sends_only_needed and message.kind in ("kv", "q"):
            self._check_needed(rank, key[0], message)

    def _check_needed(self, rank: int, comm: str, message: Message) -> None:
        if comm == "cp_inner" and self.plan.placement.split > 1:
            return
        steps = [s for s in self.programs[rank].steps if isinstance(s, Attend | AttendBackward)]
        side = "kv" if message.kind == "kv" else "q"
        users = [s for s in steps if getattr(s, side) == message.buffer]
        sight = self.plan.sight
        seen = np.zeros(self.plan.placement.layout.total_tokens, bool)
        for s in users:
            spans = sight.reach(s.q_tokens) if side == "kv" else sight.reach(s.k_tokens, as_queries=False)
            for first, stop in spans.tolist():
                seen[first:stop] = True
        if not seen[message.tokens.expand()].all():
            raise self.fail(rank, f"{message.kind} from rank {message.peer} holds tokens that nothing here needs")


def _wire(message: Message) -> tuple[str, bytes, Heads, bool]:
    return message.kind, message.tokens.key, message.heads, message.exact


def _short(step: Step | str) -> str:
    if isinstance(step, str):
        return step
    names = ("batch", "comm", "buffer", "source", "into", "q", "kv", "into_q", "into_kv")
    shown = [f"{n}={getattr(step, n)}" for n in names if hasattr(step, n)]
    return f"{type(step).__name__} {' '.join(shown)}"


def _check_results(plan: Plan, machine: _Machine, what: str, of_queries: bool) -> None:
    """Every owner's result holds each allowed pair of its tokens exactly once, for each head."""
    sight = plan.sight
    for program in machine.programs:
        own = plan.placement.sets[program.rank]
        name = program.results[what]
        buffer, content = program.buffers[name], machine.content[program.rank][name]
        full = (0, plan.shape.H if of_queries else plan.shape.Hkv)
        if buffer.tokens != own or buffer.heads != full:
            raise PlanError(f"rank {program.rank}: {what} covers {buffer.tokens} x {buffer.heads}, not {own} x {full}")
        fault = coverage_fault(sight, own, full, content.blocks, of_queries, plan.shape.group)
        if fault:
            raise PlanError(f"{machine.direction}, rank {program.rank}, {what}: {fault}")
