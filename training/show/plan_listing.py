"""A plan's steps in words, for reading small plans."""

from parallel.plan.ir import (
    Add,
    Attend,
    AttendBackward,
    Copy,
    Free,
    MakeStats,
    Merge,
    Message,
    Post,
    Step,
    Wait,
)  # fmt: skip
from parallel.plan.plan import Plan
from parallel.plan.tokens import TokenSet


def list_steps(plan: Plan, rank: int, direction: str) -> list[str]:
    """One line for each step of `rank`.

    Raises:
        ValueError: a direction that is not forward or backward, or a rank that was not planned.
    """
    program = getattr(plan, direction)[rank] if direction in ("forward", "backward") else None
    if program is None:
        raise ValueError(f"the plan holds no {direction} steps of rank {rank}; it holds ranks {plan.ranks}")
    return [line for step in program.steps for line in _lines(step)]


def ranges(tokens: TokenSet) -> str:
    """'0:3 9:12', and '1:9:2' for every second token."""
    return " ".join(f"{a}:{b}" + (f":{c}" if c > 1 else "") for a, b, c in tokens.ranges.tolist())


def _lines(step: Step) -> list[str]:
    if isinstance(step, Post):
        sends = [f"send to rank {m.peer}: {_message(m)} out of {m.buffer}" for m in step.sends]
        recvs = [f"receive from rank {m.peer}: {_message(m)} into {m.buffer}" for m in step.recvs]
        return [f"post batch {step.batch} on {step.comm}", *(f"    {line}" for line in sends + recvs)]
    if isinstance(step, Wait):
        return [f"wait for batch {step.batch} on {step.comm}"]
    if isinstance(step, Attend):
        return [f"attend {step.q} [{ranges(step.q_tokens)}] over {step.kv} [{ranges(step.k_tokens)}] into {step.into}"]
    if isinstance(step, AttendBackward):
        where = f"{step.q} [{ranges(step.q_tokens)}] over {step.kv} [{ranges(step.k_tokens)}]"
        return [f"attend backward {where} into {step.into_q} and {step.into_kv}"]
    if isinstance(step, MakeStats):
        return [f"stats of {step.partial} and {step.grad_out} into {step.into}"]
    if isinstance(step, Add | Copy):
        verb = "add" if isinstance(step, Add) else "copy"
        return [f"{verb} {step.source} [{ranges(step.tokens)}] into {step.into}"]
    if isinstance(step, Merge):
        return [f"merge {step.source} into {step.into}"]
    assert isinstance(step, Free)
    return [f"free {step.buffer}"]


def _message(message: Message) -> str:
    first, stop = message.heads
    heads = f"head {first}" if stop - first == 1 else f"heads {first} to {stop - 1}"
    return f"{message.kind} [{ranges(message.tokens)}] of {heads}"
