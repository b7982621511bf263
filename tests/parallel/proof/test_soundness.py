"""What verify accepts is right: plans changed at random, and those that still pass are run.

A change is refused, or it is harmless: then every rank runs to its end under the strictest transport, out of poisoned
buffers, and out, lse and the gradients are those of dense attention.
"""

import dataclasses
import random
from typing import Any

import pytest

from parallel.plan.ir import Free, Post
from parallel.plan.tokens import TokenSet
from parallel.proof.verify import PlanError, verify
from parallel.runtime.loopback import run_loopback
from tests.parallel import cases as rig
from tests.parallel.proof.drafts import BACKWARD, FORWARD, Draft

BASES = {
    "ring": lambda: Draft("zigzag_ring", 3, (7, 1, 11), row_length=21),
    "striped": lambda: Draft("striped_ring", 2, (9, 4)),
    "double": lambda: Draft("double_ring", 4, (16,), cp_inner=2),
    "helper": lambda: Draft("distflash", 3, (5, 10)),
    "gather": lambda: Draft("llama3", 3, (12,), head_slices=1),
    "per document": lambda: Draft("per_document", 3, (8, 7, 9)),
    "heads": lambda: Draft("ulysses", 2, (7,), row_length=8),
    "shared heads": lambda: Draft("ulysses", 4, (8,), Hkv=1),
    "both": lambda: Draft("usp", 4, (16,), cp_inner=2),
    "needed": lambda: Draft("hsap", 4, (9, 3, 8), cp_inner=1),
}
CHOICES = {
    "heads": [(0, 1), (1, 2), (0, 2), (2, 4), (0, 3), (0, 4), (1, 4), (0, 5)],
    "role": ["input", "saved", "accumulator", "result", "temporary"],
    "kind": ["q", "kv", "out", "partial", "grad_out", "stats", "grad_q", "grad_kv"],
    "comm": ["cp", "cp_inner", "cp_outer"],
}


class Vandal:
    """Changes one thing after the other in a draft, and remembers what."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self.name = self.rng.choice(sorted(BASES))
        self.draft = BASES[self.name]()
        self.draft.base = dataclasses.replace(
            self.draft.base, shape=dataclasses.replace(self.draft.base.shape, dtype="fp64")
        )
        self.done: list[str] = []
        for _ in range(self.rng.choice([1, 1, 1, 2])):
            self.change(self.rng.choice([FORWARD, BACKWARD]), self.rng.randrange(self.draft.base.size))

    def change(self, direction: str, rank: int) -> None:
        steps, rng = self.draft.steps(direction, rank), self.rng
        at, what = rng.randrange(len(steps)), rng.randrange(10)
        where = f"{direction} rank {rank} step {at}"
        if what == 0:
            self.done.append(f"{where}: {steps.pop(at)} lost")
        elif what == 1:
            to = rng.randint(0, len(steps))
            steps.insert(to, steps[at])
            self.done.append(f"{where}: {steps[to]} again at {to}")
        elif what in (2, 3):
            to = rng.randint(max(0, at - 3), min(len(steps) - 1, at + 3))
            steps.insert(to, steps.pop(at))
            self.done.append(f"{where}: {steps[to]} moved to {to}")
        elif what == 4:
            buffers = self.draft.program(direction, rank).buffers
            name = rng.choice(sorted(buffers))
            buffers[name] = self.edited(direction, rank, buffers[name], f"{direction} rank {rank} buffer {name}")
        elif isinstance(steps[at], Post):
            self.message(direction, rank, at, where)
        else:
            steps[at] = self.edited(direction, rank, steps[at], f"{where} {steps[at]}")

    def edited(self, direction: str, rank: int, thing: Any, where: str) -> Any:
        """A step, message or buffer with another value in one of its fields."""
        name = self.rng.choice(thing._fields)
        new = self.other(direction, rank, name, getattr(thing, name))
        self.done.append(f"{where}: {name} {getattr(thing, name)} -> {new}")
        return thing._replace(**{name: new})

    def other(self, direction: str, rank: int, name: str, value: Any) -> Any:
        if isinstance(value, TokenSet):
            known = [b.tokens for p in self.draft.programs[direction] for b in p.buffers.values()]
            known += [value.cut(1, value.count), value.cut(0, value.count - 1), TokenSet.concatenate([value, value])]
            return self.rng.choice(known)
        if name in CHOICES:
            return self.rng.choice(CHOICES[name])
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return value + self.rng.choice([-1, 1])
        return self.rng.choice(sorted(self.draft.program(direction, rank).buffers))

    def message(self, direction: str, rank: int, at: int, where: str) -> None:
        """One side of a message, or both alike."""
        step: Any = self.draft.steps(direction, rank)[at]
        side = self.rng.choice([s for s in ("sends", "recvs") if getattr(step, s)])
        number = self.rng.randrange(len(getattr(step, side)))
        old = getattr(step, side)[number]
        new = self.edited(direction, rank, old, f"{where} {side} {number}")
        self.put(direction, rank, at, side, number, new)
        if new.buffer == old.buffer and new.peer == old.peer and self.rng.random() < 0.5:
            self.done.append("on both sides")
            back = "recvs" if side == "sends" else "sends"
            nth = [i for i, m in enumerate(getattr(step, side)) if m.peer == old.peer].index(number)
            for place, found in enumerate(self.draft.steps(direction, old.peer)):
                if isinstance(found, Post) and found[:2] == step[:2]:
                    there = [i for i, m in enumerate(getattr(found, back)) if m.peer == rank][nth : nth + 1]
                    for i in there:
                        mine = getattr(found, back)[i]
                        self.put(direction, old.peer, place, back, i, new._replace(peer=mine.peer, buffer=mine.buffer))

    def put(self, direction: str, rank: int, at: int, side: str, number: int, message: Any) -> None:
        post: Any = self.draft.steps(direction, rank)[at]
        messages = list(getattr(post, side))
        messages[number] = message
        self.draft.steps(direction, rank)[at] = post._replace(**{side: tuple(messages)})


def check(seed: str) -> bool:
    """Whether a changed plan was accepted; what is accepted must run and be right."""
    vandal = Vandal(seed)
    plan = vandal.draft.plan()
    try:
        verify(plan)
    except PlanError:
        return False
    try:
        inputs = rig.tensors(plan.shape, plan.placement.layout.total_tokens)
        result = run_loopback(plan, *inputs, rules="late", poison=True, backend="reference")
        rig.compare(result, rig.dense(plan.placement.layout, plan.mask, inputs, None, None))
        rig.check_bytes(plan, result)
    except Exception as error:
        raise AssertionError(
            f"{seed}: {vandal.name} passes and is wrong, {type(error).__name__} {error}: {'; '.join(vandal.done)}"
        ) from error
    return True


@pytest.mark.parametrize("seed", range(4))
def test_what_is_accepted_is_right(seed: int):
    accepted = sum(check(f"{seed}.{number}") for number in range(150))
    assert 5 < accepted < 75


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(100, 110))
def test_much_that_is_accepted_is_right(seed: int):
    for number in range(3000):
        check(f"{seed}.{number}")


def test_the_bases_are_right():
    for make in BASES.values():
        plan = make().plan()
        verify(plan)
        assert any(isinstance(step, Free) for p in plan.backward if p for step in p.steps)
