"""Proof of a plan before it runs: nothing here trusts the code that wrote it.

`verify(plan)` raises PlanError with the first broken rule:

- every allowed (query, key) pair is computed exactly once for every query head, and its result reaches the owner of the
  query exactly once; backward likewise, for dq at the query's owner and for dk, dv at the key's;
- sends match receives; two ranks post the batches that they share on a communicator in one order, and a batch completes
  only when all its members are posted and those before it are done; nothing is sent to oneself, nothing is empty: and
  still every rank reaches its end;
- a buffer is written before it is read, is not touched while a batch holds it, and temporaries are freed once
  (`memory.py`); it is what it is said to be (`declared.py`);
- sums travel exact, and are rounded only when a rank's share, or the whole, is complete (`contributions.py`);
- what the exchange claims: no key or query travels to a rank that does not need it.

Pairs are checked in closed form on ranges: memory grows with the tokens, never with the pairs. docs/proof.md lists the
rules with the plans that break them.
"""

from collections import defaultdict
from functools import partial

import numpy as np

from parallel.plan.ir import (
    Add,
    Attend,
    AttendBackward,
    Copy,
    Kind,
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
from parallel.proof.contributions import Contributions
from parallel.proof.coverage import Block, counted, coverage_fault, covered, in_one_piece, restrict, sink_fault
from parallel.proof.declared import check_declared
from parallel.proof.memory import LSE, Content, Held, Memory, PlanError

__all__ = ["PlanError", "verify"]

COMMS = ("cp", "cp_inner", "cp_outer")
GRADIENTS: tuple[Kind, ...] = ("grad_q", "grad_kv")
Key = tuple[str, int]  # a batch: communicator, number


def verify(plan: Plan) -> None:
    """Raise PlanError, naming rank, step and rule, unless the plan is right. All ranks must have been planned.

    Raises:
        ValueError: a plan of some ranks only.
    """
    if len(plan.ranks) != plan.size:
        raise ValueError(f"the plan holds {len(plan.ranks)} of {plan.size} ranks; plan all of them to verify it")
    _check_placement(plan)
    left: list[dict[str, Content] | None] = [None] * plan.size
    for direction in DIRECTIONS:
        for rank, program in enumerate(plan.programs(direction)):
            if program.rank != rank:
                raise PlanError(f"{direction}: the program in place {rank} is rank {program.rank}'s")
            check_declared(plan, direction, program, left[rank])
        machine = _Machine(plan, direction, left)
        machine.run()
        if direction == "forward":
            _check_results(plan, machine, "out", of_queries=True)
        else:
            _check_results(plan, machine, "grad_q", of_queries=True)
            _check_results(plan, machine, "grad_kv", of_queries=False)
        left = [memory.content for memory in machine.memories]


def _check_placement(plan: Plan) -> None:
    """Every token of the batch belongs to one rank."""
    owners = counted(list(plan.placement.sets), plan.placement.layout.total_tokens)
    if (owners != 1).any():
        token = int((owners != 1).argmax())
        raise PlanError(f"the placement gives token {token} to {owners[token]} ranks; each belongs to one")


class _Machine:
    """Runs all ranks' steps on symbols, under the strict transport's rules."""

    def __init__(self, plan: Plan, direction: str, left: list[dict[str, Content] | None]) -> None:
        self.plan, self.direction, self.programs = plan, direction, plan.programs(direction)
        self.at = [0] * plan.size
        self.memories = [
            Memory(program, direction, partial(self.fail, rank), left[rank])
            for rank, program in enumerate(self.programs)
        ]
        self.contributions = Contributions(plan, direction)
        self.posted: list[dict[Key, Post]] = [{} for _ in self.programs]
        self.to_post = [{(s.comm, s.batch) for s in p.steps if isinstance(s, Post)} for p in self.programs]
        self.order: list[dict[str, list[int]]] = [defaultdict(list) for _ in self.programs]
        # rank: (communicator, peer): the batches that hold messages between the two, with their places
        self.shared: list[dict[tuple[str, int], dict[int, int]]] = [defaultdict(dict) for _ in self.programs]
        self.done: list[set[Key]] = [set() for _ in self.programs]
        self.sent: dict[tuple[Key, int, int], list[Held]] = {}  # batch, sender, number of its message: what it carries

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
                raise self.fail(rank, "never completes: ranks wait for each other")
            left = set(self.posted[rank]) - self.done[rank]
            if left:
                raise self.fail(rank, f"batch {min(left)} is never waited for")
            self.memories[rank].check_end()

    def _step(self, rank: int, step: Step) -> bool:
        """Do the step; False where it has to wait."""
        memory = self.memories[rank]
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
            self._copy(rank, step)
        elif isinstance(step, Add | Merge) and step.source == step.into:
            raise self.fail(rank, f"{step.source} is added to itself")
        elif isinstance(step, Add):
            kind = memory.buffer(step.source, *GRADIENTS).kind
            memory.buffer(step.into, kind)
            self._sum(memory, step.source, step.into, step.tokens, step.heads)
        elif isinstance(step, Merge):
            memory.buffer(step.into, "partial")
            source = memory.buffer(step.source, "partial")
            self._sum(memory, step.source, step.into, source.tokens, source.heads)
        else:
            memory.free(step.buffer)
        return True

    # computing

    def _attend(self, rank: int, step: Attend) -> None:
        memory = self.memories[rank]
        block = self._block(rank, step)
        self._lies_together(memory, step.into, step.q_tokens, "partial")
        memory.add_to(step.into, step.q_tokens, step.heads, [(block, step.q_tokens, step.heads)])

    def _attend_backward(self, rank: int, step: AttendBackward) -> None:
        memory, key_heads = self.memories[rank], self.plan.shape.key_heads(step.heads)
        block = self._block(rank, step)
        grad_out, stats = memory.buffer(step.grad_out, "grad_out"), memory.buffer(step.stats, "stats")
        if (grad_out.tokens, grad_out.heads) != (stats.tokens, stats.heads):
            raise self.fail(rank, f"{step.grad_out} and {step.stats} hold different tokens or heads")
        for name in (step.grad_out, step.stats):
            self._lies_together(memory, name, step.q_tokens)
            memory.read(name, step.q_tokens, step.heads)
        self._lies_together(memory, step.into_q, step.q_tokens, "grad_q")
        memory.add_to(step.into_q, step.q_tokens, step.heads, [(block, step.q_tokens, step.heads)])
        self._lies_together(memory, step.into_kv, step.k_tokens, "grad_kv")
        memory.add_to(step.into_kv, step.k_tokens, key_heads, [(block, step.k_tokens, key_heads)])

    def _block(self, rank: int, step: Attend | AttendBackward) -> Block:
        memory = self.memories[rank]
        for side, tokens in (("queries", step.q_tokens), ("keys", step.k_tokens)):
            if not tokens.ascending:
                raise self.fail(rank, f"attention needs {side} in the sequence's order")
        memory.read(step.q, step.q_tokens, step.heads)
        memory.read(step.kv, step.k_tokens, self.plan.shape.key_heads(step.heads))
        self._lies_together(memory, step.q, step.q_tokens, "q")
        self._lies_together(memory, step.kv, step.k_tokens, "kv")
        return Block(step.q_tokens, step.k_tokens, step.heads, rank, self.at[rank])

    def _lies_together(self, memory: Memory, name: str, tokens: TokenSet, *kinds: Kind) -> None:
        if tokens.count and not in_one_piece(tokens, memory.buffer(name, *kinds).tokens):
            raise memory.fail(f"{tokens} do not lie in one piece in {name}, where attention reads or writes them")

    def _stats(self, rank: int, step: MakeStats) -> None:
        memory = self.memories[rank]
        buffer, into = memory.buffer(step.partial, "partial"), memory.buffer(step.into, "stats")
        grad_out = memory.buffer(step.grad_out, "grad_out")
        if not (buffer.tokens, buffer.heads) == (grad_out.tokens, grad_out.heads) == (into.tokens, into.heads):
            raise self.fail(rank, f"stats of {step.partial} need a dout and room for the same tokens and heads")
        if not buffer.kept:
            raise self.fail(rank, f"stats of {step.partial}, which is not what forward finished")
        memory.read(step.grad_out, buffer.tokens, buffer.heads)
        memory.put(step.into, buffer.tokens, buffer.heads, [])

    # moving within a rank

    def _sum(self, memory: Memory, source: str, into: str, tokens: TokenSet, heads: tuple[int, int]) -> None:
        held = memory.read(source, tokens, heads)
        memory.add_to(into, tokens, heads, restrict(held.blocks, tokens, heads))

    def _copy(self, rank: int, step: Copy) -> None:
        memory = self.memories[rank]
        source, into = memory.buffer(step.source), memory.buffer(step.into)
        if into.kind != source.kind and (source.kind, into.kind) != ("partial", "out"):
            raise self.fail(rank, f"{step.source} holds {source.kind}, which cannot be copied as {into.kind}")
        if source.kind == "stats":
            raise self.fail(rank, f"{step.source} holds stats, which stay as they were made; make them again instead")
        held = memory.read(step.source, step.tokens, step.heads)
        blocks = restrict(held.blocks, step.tokens, step.heads)
        fault = self.contributions.rounding_fault(
            (source.kind, source.exact), (into.kind, into.exact), step.tokens, step.heads, blocks
        )
        if fault:
            raise self.fail(rank, f"the copy into {step.into} would round {fault}")
        memory.put(step.into, step.tokens, step.heads, blocks)

    # messages

    def _post(self, rank: int, step: Post) -> None:
        key, memory = (step.comm, step.batch), self.memories[rank]
        if step.comm not in COMMS:
            raise self.fail(rank, f"communicator {step.comm} is not there; use one of {', '.join(COMMS)}")
        if key in self.posted[rank]:
            raise self.fail(rank, f"batch {step.batch} is posted twice on {step.comm}")
        if not step.sends and not step.recvs:
            raise self.fail(rank, f"batch {step.batch} holds no message")
        for number, message in enumerate(step.sends):
            self._check_message(rank, message)
            buffer = memory.buffer(message.buffer)
            if not {f.name for f in fields_of(message.kind)} <= {f.name for f in fields_of(buffer.kind)}:
                raise self.fail(rank, f"{message.buffer} holds no {message.kind} to send")
            held = memory.read(message.buffer, message.tokens, message.heads)
            blocks = restrict(held.blocks, message.tokens, message.heads)
            fault = self.contributions.rounding_fault(
                (buffer.kind, buffer.exact), (message.kind, message.exact), message.tokens, message.heads, blocks
            )
            if fault:
                raise self.fail(rank, f"the message to rank {message.peer} would round {fault}")
            held.sending.append((message.tokens, message.heads))
            self.sent[key, rank, number] = blocks
        for message in step.recvs:
            self._check_message(rank, message)
            memory.buffer(message.buffer, message.kind)
            held = memory.write(message.buffer, message.tokens, message.heads)
            held.receiving.append((message.tokens, message.heads))
        self.posted[rank][key] = step
        self.order[rank][step.comm].append(step.batch)
        for peer in _peers(step):
            shared = self.shared[rank][step.comm, peer]
            shared[step.batch] = len(shared)

    def _check_message(self, rank: int, message: Message) -> None:
        if not 0 <= message.peer < self.plan.size:
            raise self.fail(rank, f"a message to or from rank {message.peer} of {self.plan.size}")
        if message.peer == rank:
            raise self.fail(rank, "a message to or from itself; a rank copies to itself")
        if message.tokens.count == 0 or message.heads[1] <= message.heads[0]:
            raise self.fail(rank, f"an empty message to or from rank {message.peer}")
        if message.kind in LSE and not message.exact:
            raise self.fail(rank, f"a message of {message.kind} carries log-sum-exps and must be exact")

    def _wait(self, rank: int, step: Wait) -> bool:
        key = (step.comm, step.batch)
        mine = self.posted[rank].get(key)
        if mine is None:
            raise self.fail(rank, f"batch {step.batch} on {step.comm} was not posted")
        if key in self.done[rank]:
            raise self.fail(rank, f"batch {step.batch} on {step.comm} was waited for before")
        for earlier in self.order[rank][step.comm]:
            if earlier == step.batch:
                break
            if (step.comm, earlier) not in self.done[rank] and not self._complete(rank, (step.comm, earlier)):
                return False
        if not self._complete(rank, key):
            return False
        self.done[rank].add(key)
        for message in mine.sends:
            self.memories[rank].content[message.buffer].sending.remove((message.tokens, message.heads))
        for number, message in enumerate(mine.recvs):
            self._receive(rank, key, number, message)
        return True

    def _complete(self, rank: int, key: Key) -> bool:
        """Whether every peer has posted the same batch, with what matches this rank's messages in order."""
        mine = self.posted[rank][key]
        for peer in _peers(mine):
            if key not in self.to_post[peer]:
                raise self.fail(rank, f"rank {peer} never posts batch {key[1]} on {key[0]}")
            other = self.posted[peer].get(key)
            if other is None:
                return False
            place, there = self.shared[rank][key[0], peer], self.shared[peer][key[0], rank]
            if key[1] in there and place[key[1]] != there[key[1]]:
                raise self.fail(rank, f"rank {peer} posts batch {key[1]} in another order of those that the two share")
            self._match(rank, key, rank, peer, mine, other)
            self._match(rank, key, peer, rank, other, mine)
        return True

    def _match(self, rank: int, key: Key, sender: int, receiver: int, post: Post, other: Post) -> None:
        """What one rank sends to another in a batch is what that one receives."""
        out = [m for m in post.sends if m.peer == receiver]
        back = [m for m in other.recvs if m.peer == sender]
        what = f"rank {sender} sends rank {receiver} in batch {key[1]}"
        if len(out) != len(back):
            raise self.fail(rank, f"{what} {len(out)} messages, and {len(back)} are received")
        for a, b in zip(out, back):
            if a.kind != b.kind:
                raise self.fail(rank, f"{what} {a.kind}, and {b.kind} is received")
            if a.tokens != b.tokens:
                raise self.fail(rank, f"{what} {a.kind} of {a.tokens}, and {b.tokens} is received")
            if a.heads != b.heads:
                raise self.fail(rank, f"{what} {a.kind} of heads {a.heads}, and heads {b.heads} are received")
            if a.exact != b.exact:
                raise self.fail(rank, f"{what} {a.kind} with exact={a.exact}, and it is received with {b.exact}")

    def _receive(self, rank: int, key: Key, number: int, message: Message) -> None:
        memory, post = self.memories[rank], self.posted[message.peer][key]
        before = sum(m.peer == message.peer for m in self.posted[rank][key].recvs[:number])
        to_me = [i for i, m in enumerate(post.sends) if m.peer == rank]
        blocks = self.sent[key, message.peer, to_me[before]]
        buffer = memory.buffer(message.buffer)
        fault = self.contributions.rounding_fault(
            (message.kind, message.exact), (buffer.kind, buffer.exact), message.tokens, message.heads, blocks
        )
        if fault:
            raise self.fail(rank, f"what rank {message.peer} sends into {message.buffer} would round {fault}")
        memory.content[message.buffer].receiving.remove((message.tokens, message.heads))
        memory.put(message.buffer, message.tokens, message.heads, blocks)
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


def _peers(post: Post) -> set[int]:
    return {message.peer for message in (*post.sends, *post.recvs)}


def _short(step: Step | str) -> str:
    if isinstance(step, str):
        return step
    names = ("batch", "comm", "buffer", "source", "into", "q", "kv", "into_q", "into_kv")
    shown = [f"{n}={getattr(step, n)}" for n in names if hasattr(step, n)]
    return f"{type(step).__name__} {' '.join(shown)}"


def _check_results(plan: Plan, machine: _Machine, what: str, of_queries: bool) -> None:
    """Every owner's result holds each allowed pair of its tokens exactly once, for each head."""
    for program in machine.programs:
        _check_result(plan, machine, program, what, of_queries)


def _check_result(plan: Plan, machine: _Machine, program: Program, what: str, of_queries: bool) -> None:
    own, name = plan.placement.sets[program.rank], program.results[what]
    buffer, content = program.buffers[name], machine.memories[program.rank].content[name]
    where = f"{machine.direction}, rank {program.rank}, {what}"
    full = (0, plan.shape.H if of_queries else plan.shape.Hkv)
    if buffer.tokens != own or buffer.heads != full:
        raise PlanError(f"{where}: {name} covers {buffer.tokens} x {buffer.heads}, not {own} x {full}")
    if own.count and not covered(own, full, content.written):
        raise PlanError(f"{where}: {name} is not written everywhere")
    fault = coverage_fault(plan.sight, own, full, content.blocks, of_queries, plan.shape.group)
    if what == "out" and fault is None:
        fault = sink_fault(own, full, content.blocks, plan.placement.layout.total_tokens)
    if fault:
        raise PlanError(f"{where}: {fault}")
