"""A plan taken apart, so that a test can break one thing in it and put it together again."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from kernels.mask_spec import MaskSpec
from parallel.plan.ir import AttentionShape, Buffer, Message, Post, Program, Step
from parallel.plan.layout import PackedLayout
from parallel.plan.plan import Plan
from parallel.plan.tokens import TokenSet
from parallel.strategy import load_strategy

Broken = dict[str, tuple[str, Callable[[], Plan]]]  # name -> (what verify says, how the plan is made)
FORWARD, BACKWARD = "forward", "backward"
HEADS, KEYS = (0, 4), (0, 2)


class Draft:
    """A preset's plan over `ranks` ranks, in bf16, whose programs may be changed before `plan()`."""

    def __init__(self, name: str = "zigzag_ring", ranks: int = 2, lengths: tuple[int, ...] = (8,), **more: Any) -> None:
        row_length, Hkv = more.pop("row_length", None), more.pop("Hkv", 2)
        strategy = load_strategy(name, dp=1, **more)
        layout = PackedLayout.from_lengths(list(lengths), row_length=row_length)
        placement = strategy.shard(layout, strategy.mesh(ranks, 4, Hkv))
        self.base = strategy.plan(placement, AttentionShape(4, Hkv, 8, 8, "bf16"), MaskSpec())
        self.programs = {d: [copy.deepcopy(p) for p in self.base.programs(d)] for d in ("forward", "backward")}
        self.changes: dict[str, Any] = {}

    def program(self, direction: str, rank: int) -> Program:
        return self.programs[direction][rank]

    def steps(self, direction: str, rank: int) -> list[Step]:
        return self.programs[direction][rank].steps

    def at(self, direction: str, rank: int, kind: type, number: int = 0) -> int:
        """Where the program's step number `number` of `kind` stands."""
        return [i for i, s in enumerate(self.steps(direction, rank)) if isinstance(s, kind)][number]

    def step(self, direction: str, rank: int, kind: type, number: int = 0, **new: Any) -> "Draft":
        """Change fields of a step."""
        at, steps = self.at(direction, rank, kind, number), self.steps(direction, rank)
        steps[at] = steps[at]._replace(**new)
        return self

    def drop(self, direction: str, rank: int, kind: type, number: int = 0) -> Step:
        return self.steps(direction, rank).pop(self.at(direction, rank, kind, number))

    def move(self, direction: str, rank: int, source: int, to: int) -> "Draft":
        """A step to another place."""
        steps = self.steps(direction, rank)
        steps.insert(to, steps.pop(source))
        return self

    def add(self, direction: str, rank: int, *steps: Step, at: int | None = None) -> "Draft":
        """More steps: at the end, or before step `at`."""
        found = self.steps(direction, rank)
        found[len(found) if at is None else at : len(found) if at is None else at] = steps
        return self

    def buffer(self, direction: str, rank: int, name: str, **new: Any) -> "Draft":
        """Change fields of a buffer, or declare one."""
        buffers = self.program(direction, rank).buffers
        buffers[name] = buffers[name]._replace(**new) if name in buffers else Buffer(**new)
        return self

    def spare(self, direction: str, rank: int, name: str, like: str, **new: Any) -> "Draft":
        """Declare a temporary like another buffer."""
        buffers = self.program(direction, rank).buffers
        buffers[name] = buffers[like]._replace(**{"role": "temporary", **new})
        return self

    def message(
        self, direction: str, rank: int, side: str, post: int = 0, number: int = 0, **new: Any
    ) -> "Draft":  # fmt: skip
        """Change fields of a message: `side` is sends or recvs."""
        at = self.at(direction, rank, Post, post)
        step = self.steps(direction, rank)[at]
        assert isinstance(step, Post)
        messages = list(getattr(step, side))
        messages[number] = messages[number]._replace(**new)
        self.steps(direction, rank)[at] = step._replace(**{side: tuple(messages)})
        return self

    def every_message(self, direction: str, kinds: tuple[str, ...], **new: Any) -> "Draft":
        """Change all messages of `kinds`, on both sides."""

        def changed(messages: tuple[Message, ...]) -> tuple[Message, ...]:
            return tuple(m._replace(**new) if m.kind in kinds else m for m in messages)

        for program in self.programs[direction]:
            program.steps = [
                s._replace(sends=changed(s.sends), recvs=changed(s.recvs)) if isinstance(s, Post) else s
                for s in program.steps
            ]
        return self

    def plan(self) -> Plan:
        made = {direction: tuple(programs) for direction, programs in self.programs.items()}
        return dataclasses.replace(self.base, **made, **self.changes)


def tokens(*ranges: tuple[int, int]) -> TokenSet:
    return TokenSet.of(*ranges)


ZERO, ONE = tokens((0, 2), (6, 8)), tokens((2, 6))  # what ranks 0 and 1 of `ring()` hold


def ring(ranks: int = 2) -> Draft:
    return Draft("zigzag_ring", ranks, (8 if ranks == 2 else 16,))


def twice(direction: str, rank: int, kind: type, number: int = 0) -> Plan:
    """A step done again at once."""
    draft = ring()
    at = draft.at(direction, rank, kind, number)
    return draft.add(direction, rank, draft.steps(direction, rank)[at], at=at).plan()
