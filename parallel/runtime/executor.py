"""Runs one rank's program: buffers, kernels, messages. The same code drives real ranks and ranks in one process.

`Execution.steps()` is a generator that pauses where it would wait for another rank. A driver with real ranks never sees
a pause, since its transport waits; `parallel.api.run_loopback` takes turns between ranks at the pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.attention.rounds import Rounds, Stats
from kernels.merge.merge import merge_into, sink_gradient
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
    Step,
    Wait,
)  # fmt: skip
from parallel.plan.tokens import TokenSet
from parallel.runtime.bind import BoundPlan, Rows, WireField
from parallel.runtime.buffers import BufferPool
from parallel.runtime.comm import Parcel, Recorder, Transport

SUMS = ("partial", "grad_q", "grad_kv")
Trace = Callable[[str, Step], None]


@dataclass(frozen=True)
class Options:
    """What a layer adds to the plan: the logits' scale and cap, and a sink logit for each query head [H]."""

    scale: float
    softcap: float | None = None
    sink: Tensor | None = None


@dataclass
class Held:
    """A live buffer: its tensors by field, and the flat slab under them where there is one."""

    tensors: dict[str, Tensor]
    flat: Tensor | None = None
    slab: Tensor | None = None
    stats: Stats | None = None


@dataclass
class _Pending:
    handle: Any
    arriving: list[tuple[Message, Tensor, Tensor | None]]  # message, wire, its slab where it must be unpacked
    slabs: list[Tensor] = field(default_factory=list)


class Execution:
    """One run of one direction.

    Args:
        bound: the plan on this rank.
        given: inputs and saved buffers by name, each a dict of tensors by field.
    """

    def __init__(
        self,
        bound: BoundPlan,
        direction: str,
        given: dict[str, dict[str, Tensor]],
        options: Options,
        rounds: Rounds,
        transport: Transport,
        pool: BufferPool,
        recorder: Recorder | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.bound, self.program, self.options = bound, bound.programs[direction], options
        self.rounds, self.transport, self.pool, self.recorder, self.trace = rounds, transport, pool, recorder, trace
        self.held = {name: Held(tensors) for name, tensors in given.items()}
        self.pending: dict[tuple[str, int], _Pending] = {}
        self.direction = direction
        self.sink_grad: Tensor | None = None  # [H], of the rows and heads that this rank computes; ranks' parts add up

    def steps(self) -> Iterator[None]:
        """Do the program's steps; pauses where another rank must go first."""
        self.pool.reserve(self.program.slabs)
        for step in self.program.steps:
            if isinstance(step, Wait):
                waiting = self.pending[step.comm, step.batch]
                while not self.transport.ready(waiting.handle):
                    yield
            if self.trace:
                self.trace(type(step).__name__, step)
            _ACTIONS[type(step)](self, step)
        for name in self.program.results.values():
            self.get(name)

    def get(self, name: str) -> Held:
        """The buffer, reserved at its first use; sums start as zero, partial results as the identity of merging."""
        held = self.held.get(name)
        if held is None:
            held = self.held[name] = self._reserve(name, self.program.buffers[name])
        return held

    def _reserve(self, name: str, buffer: Buffer) -> Held:
        bound, shape = self.bound, self.bound.shape
        parts = bound.parts(buffer)
        size = parts[-1].stop
        slab = None
        if buffer.role == "temporary":
            slab = self.pool.take(buffer.bytes(shape))
            flat = slab[:size]
        else:
            flat = torch.empty(size, dtype=torch.uint8, device=bound.device)
        held = Held({part.name: _view(flat, part) for part in parts}, flat, slab)
        if buffer.kind in SUMS:
            for part in parts:
                held.tensors[part.name].fill_(-float("inf") if part.name == "lse" else 0)
            if buffer.role == "accumulator" and self.options.sink is not None:
                sink = self.options.sink[buffer.heads[0] : buffer.heads[1]]
                held.tensors["lse"].copy_(sink.detach()[:, None].expand_as(held.tensors["lse"]))
        return held

    def _piece(self, name: str, field_name: str, tokens: TokenSet, heads: Heads) -> tuple[Tensor, Rows]:
        """A field's heads as a view over all rows, and the rows."""
        buffer = self.program.buffers[name]
        tensor = self.get(name).tensors[field_name]
        first, stop = heads[0] - buffer.heads[0], heads[1] - buffer.heads[0]
        rows = self.bound.rows(buffer.tokens, tokens)
        return (tensor[first:stop] if field_name in ("lse", "delta") else tensor[:, first:stop]), rows

    def _read(self, name: str, field_name: str, tokens: TokenSet, heads: Heads) -> Tensor:
        view, rows = self._piece(name, field_name, tokens, heads)
        if field_name in ("lse", "delta"):
            return view[:, rows]
        return view[rows]

    def _write(self, name: str, field_name: str, tokens: TokenSet, heads: Heads, value: Tensor, add: bool) -> None:
        view, rows = self._piece(name, field_name, tokens, heads)
        dim = 1 if field_name in ("lse", "delta") else 0
        if isinstance(rows, slice):
            target = view.narrow(dim, rows.start, rows.stop - rows.start)
            target.add_(value) if add else target.copy_(value)
        elif add:
            view.index_add_(dim, rows, value.to(view.dtype))
        else:
            view.index_copy_(dim, rows, value.to(view.dtype))

    # messages

    def _whole(self, message: Message) -> Tensor | None:
        """The buffer's own bytes where the message is all of it, as it lies."""
        buffer, held = self.program.buffers[message.buffer], self.get(message.buffer)
        same = (message.kind, message.tokens, message.heads, message.exact) == (
            buffer.kind, buffer.tokens, buffer.heads, buffer.exact,
        )  # fmt: skip
        return held.flat if same and held.stats is None else None

    def _post(self, step: Post) -> None:
        waiting = _Pending(None, [])
        sends, recvs = [], []
        for message in step.sends:
            parts = self.bound.parts(message)
            wire = self._whole(message)
            if wire is None:
                slab = self._wire(message, parts)
                waiting.slabs.append(slab)
                wire = slab[: parts[-1].stop]
                for part in parts:
                    self._need_delta(message)
                    _view(wire, part).copy_(self._read(message.buffer, part.name, message.tokens, message.heads))
            parcel = Parcel(message.peer, wire, [(part.traffic, part.stop - part.first) for part in parts])
            if self.recorder:
                self.recorder.sent(self.bound.rank, parcel)
            sends.append(parcel)
        for message in step.recvs:
            parts = self.bound.parts(message)
            wire = self._whole(message)
            slab = None
            if wire is None:
                slab = self._wire(message, parts)
                wire = slab[: parts[-1].stop]
            waiting.arriving.append((message, wire, slab))
            recvs.append(Parcel(message.peer, wire, [(part.traffic, part.stop - part.first) for part in parts]))
        waiting.handle = self.transport.post(step.comm, sends, recvs)
        self.pending[step.comm, step.batch] = waiting

    def _wire(self, message: Message, parts: list[WireField]) -> Tensor:
        """A slab for a message, with room for all the tokens that its buffer may hold."""
        room = max(self.program.buffers[message.buffer].capacity, message.tokens.count)
        return self.pool.take(parts[-1].stop // message.tokens.count * room)

    def _need_delta(self, message: Message) -> None:
        """Backward's stats are kept in the kernels' own form; delta is written out where it travels."""
        held = self.get(message.buffer)
        if message.kind == "stats" and held.stats is not None and "delta" not in held.tensors:
            held.tensors["delta"] = held.stats.delta

    def _wait(self, step: Wait) -> None:
        waiting = self.pending.pop((step.comm, step.batch))
        self.transport.finish(waiting.handle)
        for message, wire, slab in waiting.arriving:
            if message.kind == "stats":  # what was derived from an earlier part of them is no longer true
                self.get(message.buffer).stats = None
            if slab is None:
                continue
            for part in self.bound.parts(message):
                self._write(message.buffer, part.name, message.tokens, message.heads, _view(wire, part), add=False)
            self.pool.give(slab)
        for slab in waiting.slabs:
            self.pool.give(slab)

    def _free(self, step: Free) -> None:
        held = self.held.pop(step.buffer, None)
        if held is not None and held.slab is not None:
            self.pool.give(held.slab)

    # computing

    def _block(self, step: Attend | AttendBackward) -> tuple[slice, slice, slice, slice, list[int]]:
        """Rows of queries and of keys, heads of the query and the key buffer, and each query head's key head there."""
        buffers, shape = self.program.buffers, self.bound.shape
        q, kv = buffers[step.q], buffers[step.kv]
        first, stop = shape.key_heads(step.heads)
        q_heads = slice(step.heads[0] - q.heads[0], step.heads[1] - q.heads[0])
        key_heads = slice(first - kv.heads[0], stop - kv.heads[0])
        head_map = [head // shape.group - first for head in range(*step.heads)]
        q_rows, k_rows = self.bound.run(q.tokens, step.q_tokens), self.bound.run(kv.tokens, step.k_tokens)
        return q_rows, k_rows, q_heads, key_heads, head_map

    def _attend(self, step: Attend) -> None:
        q_rows, k_rows, q_heads, key_heads, head_map = self._block(step)
        kv, into = self.get(step.kv).tensors, self.program.buffers[step.into]
        rows = self.bound.run(into.tokens, step.q_tokens)
        heads = slice(step.heads[0] - into.heads[0], step.heads[1] - into.heads[0])
        acc = self.get(step.into).tensors
        for mask in self.bound.masks(step.q_tokens, step.k_tokens):
            self.rounds.forward(
                self.get(step.q).tensors["q"][q_rows, q_heads],
                kv["k"][k_rows, key_heads],
                kv["v"][k_rows, key_heads],
                mask,
                acc["out"][rows, heads],
                acc["lse"][heads, rows],
                self.options.scale,
                self.options.softcap,
                head_map,
            )

    def _stats(self, step: MakeStats) -> None:
        acc, dout = self.get(step.partial).tensors, self.get(step.grad_out).tensors["dout"]
        made = self.rounds.stats(acc["out"], dout, acc["lse"])
        self.held[step.into] = Held({"lse": acc["lse"]}, stats=made)
        sink = self.options.sink
        if sink is not None:
            heads = slice(*self.program.buffers[step.partial].heads)
            self.sink_grad = torch.zeros_like(sink)
            self.sink_grad[heads] = sink_gradient(sink[heads], acc["lse"], made.delta)

    def _stats_of(self, step: AttendBackward) -> Stats:
        """The stats of the block's queries and heads."""
        buffer, held = self.program.buffers[step.stats], self.get(step.stats)
        if held.stats is None:  # they came from another rank
            grad = self.program.buffers[step.grad_out]
            dout = self.get(step.grad_out).tensors["dout"]
            assert grad.tokens == buffer.tokens and grad.heads == buffer.heads
            held.stats = self.rounds.stats_of(held.tensors["delta"], held.tensors["lse"], dout)
        heads = slice(step.heads[0] - buffer.heads[0], step.heads[1] - buffer.heads[0])
        return self.rounds.part(held.stats, self.bound.run(buffer.tokens, step.q_tokens), heads)

    def _attend_backward(self, step: AttendBackward) -> None:
        q_rows, k_rows, q_heads, key_heads, head_map = self._block(step)
        buffers, kv = self.program.buffers, self.get(step.kv).tensors
        into_q, into_kv, grad_out = buffers[step.into_q], buffers[step.into_kv], buffers[step.grad_out]
        first, stop = self.bound.shape.key_heads(step.heads)
        rows = self.bound.run(into_kv.tokens, step.k_tokens)
        heads = slice(first - into_kv.heads[0], stop - into_kv.heads[0])
        grads, stats = self.get(step.into_kv).tensors, self._stats_of(step)
        for mask in self.bound.masks(step.q_tokens, step.k_tokens):
            self.rounds.backward(
                self.get(step.q).tensors["q"][q_rows, q_heads],
                kv["k"][k_rows, key_heads],
                kv["v"][k_rows, key_heads],
                self._own(step.grad_out, grad_out, step, "dout"),
                stats,
                mask,
                self._own(step.into_q, into_q, step, "dq"),
                grads["dk"][rows, heads],
                grads["dv"][rows, heads],
                self.options.scale,
                self.options.softcap,
                head_map,
            )

    def _own(self, name: str, buffer: Buffer, step: AttendBackward, field_name: str) -> Tensor:
        """A field of the block's queries and heads, as a view."""
        rows = self.bound.run(buffer.tokens, step.q_tokens)
        return self.get(name).tensors[field_name][
            rows, step.heads[0] - buffer.heads[0] : step.heads[1] - buffer.heads[0]
        ]

    # moving within the rank

    def _copy(self, step: Copy) -> None:
        into = self.program.buffers[step.into]
        for part in self.bound.parts(into):
            value = self._read(step.source, part.name, step.tokens, step.heads)
            self._write(step.into, part.name, step.tokens, step.heads, value, add=False)
            if self.recorder:
                self.recorder.copied(self.bound.rank, part.traffic, value.numel() * part.dtype.itemsize)

    def _add(self, step: Add) -> None:
        for part in self.bound.parts(self.program.buffers[step.source]):
            value = self._read(step.source, part.name, step.tokens, step.heads)
            self._write(step.into, part.name, step.tokens, step.heads, value, add=True)

    def _merge(self, step: Merge) -> None:
        source = self.program.buffers[step.source]
        out, rows = self._piece(step.into, "out", source.tokens, source.heads)
        lse, _ = self._piece(step.into, "lse", source.tokens, source.heads)
        part = self.get(step.source).tensors
        if isinstance(rows, slice):
            merge_into(out[rows], lse[:, rows], part["out"], part["lse"])
            return
        some_out, some_lse = out[rows], lse[:, rows]
        merge_into(some_out, some_lse, part["out"], part["lse"])
        out.index_copy_(0, rows, some_out)
        lse.index_copy_(1, rows, some_lse)


def saved_buffers(run: Execution, dtype: torch.dtype) -> dict[str, dict[str, Tensor]]:
    """What backward needs of a forward run: the queries and keys it attended, out in the model's dtype, and lse."""
    buffers = run.bound.programs["backward"].buffers
    kept = {name: run.get(name).tensors for name, buffer in buffers.items() if buffer.kept}
    for name in run.bound.programs["backward"].accumulators:
        kept[name] = {**kept[name], "out": kept[name]["out"].to(dtype)}
    return kept


def _view(flat: Tensor, part: WireField) -> Tensor:
    return flat[part.first : part.stop].view(part.dtype).view(part.shape)


_ACTIONS: dict[type, Callable[[Execution, Any], None]] = {
    Post: Execution._post,
    Wait: Execution._wait,
    Attend: Execution._attend,
    MakeStats: Execution._stats,
    AttendBackward: Execution._attend_backward,
    Merge: Execution._merge,
    Add: Execution._add,
    Copy: Execution._copy,
    Free: Execution._free,
}
