"""A plan: every rank's programs with what they were made from; counted, named by a hash, written as JSON."""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.mask_spec import MaskSpec
from parallel.plan.ir import (
    CLASSES,
    Attend,
    AttendBackward,
    AttentionShape,
    Copy,
    Message,
    Post,
    Program,
    token_bytes,
)  # fmt: skip
from parallel.plan.placement import Placement
from parallel.plan.serial import plan_from_json, plan_to_json
from parallel.plan.visibility import Visibility

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, eq=False)
class Plan:
    """The schedule of one mask over one placement.

    Attributes:
        axes: the strategy's axes, as plain data.
        forward, backward: one Program per cp rank; None for ranks that were not asked for.
        sends_only_needed: the exchange claims that no key or query travels to a rank that does not need it.
    """

    axes: dict[str, Any]
    placement: Placement
    shape: AttentionShape
    mask: MaskSpec
    forward: tuple[Program | None, ...]
    backward: tuple[Program | None, ...]
    sends_only_needed: bool

    @property
    def ranks(self) -> list[int]:
        """The cp ranks whose steps the plan holds."""
        return [rank for rank, program in enumerate(self.forward) if program is not None]

    @property
    def size(self) -> int:
        """All cp ranks."""
        return len(self.forward)

    @cached_property
    def sight(self) -> Visibility:
        return Visibility(self.placement.layout, self.mask)

    def programs(self, direction: str) -> list[Program]:
        """The programs of one direction, in order of ranks."""
        return [program for program in getattr(self, direction) if program is not None]

    @cached_property
    def work(self) -> NDArray[np.float64]:
        """[ranks]: allowed (query, key) pairs that each rank computes, a head's pair counting 1 / H."""
        return np.array([self.work_of(program) for program in self.programs("forward")]) / self.shape.H

    def work_of(self, program: Program) -> int:
        """Allowed pairs x query heads that a program computes."""
        steps = (step for step in program.steps if isinstance(step, Attend | AttendBackward))
        return sum(self.sight.pairs(s.q_tokens, s.k_tokens) * (s.heads[1] - s.heads[0]) for s in steps)

    @cached_property
    def bytes(self) -> dict[str, NDArray[np.int64]]:
        """Bytes of forward and backward by class of traffic, [sender, receiver]; the diagonal is copied on a rank."""
        forward, backward = (self.bytes_of(direction) for direction in DIRECTIONS)
        return {traffic: forward[traffic] + backward[traffic] for traffic in CLASSES}

    def bytes_of(self, direction: str) -> dict[str, NDArray[np.int64]]:
        """`bytes` of one direction."""
        total = {traffic: np.zeros((self.size, self.size), np.int64) for traffic in CLASSES}
        for program in self.programs(direction):
            for step in program.steps:
                if isinstance(step, Post):
                    for message in step.sends:
                        for traffic, size in message_bytes(message, self.shape):
                            total[traffic][program.rank, message.peer] += size
                elif isinstance(step, Copy):
                    for traffic, size in copy_bytes(step, program, self.shape):
                        total[traffic][program.rank, program.rank] += size
        return total

    @cached_property
    def rounds(self) -> dict[str, int]:
        """Most batches that a rank takes part in, for each direction."""
        return {
            direction: max(
                (sum(isinstance(step, Post) for step in p.steps) for p in self.programs(direction)), default=0
            )
            for direction in DIRECTIONS
        }

    def peak_buffer_bytes(self, rank: int) -> int:
        """Most bytes of temporary buffers that `rank` holds at once, in either direction."""
        return max(_peak(getattr(self, direction)[rank], self.shape) for direction in DIRECTIONS)

    @cached_property
    def hash(self) -> str:
        """32 hex digits, equal on all ranks whatever rows they planned; changes with the documents and every axis."""
        digest = hashlib.blake2b(digest_size=16)
        layout = self.placement.layout.hash
        what = [
            self.axes,
            layout,
            asdict(self.placement.mesh),
            asdict(self.shape),
            asdict(self.mask),
            self.placement.split,
            self.placement.groups,
        ]
        digest.update(json.dumps(what, sort_keys=True).encode())
        for unit in self.placement.units:
            digest.update(unit.key + b";")
        return digest.hexdigest()

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` reads it back."""
        return plan_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read `to_json`'s text. ValueError where it is no plan, or one of another format."""
        return plan_from_json(text, cls)


def message_bytes(message: Message, shape: AttentionShape) -> list[tuple[str, int]]:
    """(class of traffic, bytes) of a message."""
    each = token_bytes(message.kind, message.heads, message.exact, shape)
    return [(traffic, message.tokens.count * size) for traffic, size in each]


def copy_bytes(step: Copy, program: Program, shape: AttentionShape) -> list[tuple[str, int]]:
    """(class of traffic, bytes) that a copy writes."""
    into = program.buffers[step.into]
    each = token_bytes(into.kind, step.heads, into.exact, shape)
    return [(traffic, step.tokens.count * size) for traffic, size in each]


def _peak(program: Program, shape: AttentionShape) -> int:
    held: dict[str, int] = {}
    peak = 0
    for step in program.steps:
        for name in touched(step):
            buffer = program.buffers[name]
            if buffer.role == "temporary" and name not in held:
                held[name] = buffer.bytes(shape)
        peak = max(peak, sum(held.values()))
        if hasattr(step, "buffer"):
            held.pop(step.buffer, None)  # pyright: ignore[reportAttributeAccessIssue]
    return peak


def touched(step: Any) -> list[str]:
    """The buffers that a step names."""
    if isinstance(step, Post):
        return [message.buffer for message in (*step.sends, *step.recvs)]
    names = ("q", "kv", "into", "partial", "grad_out", "stats", "into_q", "into_kv", "source", "buffer")
    return [getattr(step, name) for name in names if hasattr(step, name)]
