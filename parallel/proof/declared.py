"""What a program says of its buffers before its first step: true of the rank, the model and what forward leaves."""

from collections.abc import Callable

from parallel.plan.ir import Buffer, Program
from parallel.plan.plan import Plan
from parallel.proof.coverage import coverage_fault, covered, repeats, sink_fault
from parallel.proof.memory import LSE, Content, PlanError

INPUTS = {"forward": ("q", "kv"), "backward": ("grad_out",)}
KEYS = ("kv", "grad_kv")
RESULTS = {
    "forward": {"out": ("partial", "out")},
    "backward": {"grad_q": ("grad_q",), "grad_kv": ("grad_kv",)},
}


def check_declared(plan: Plan, direction: str, program: Program, left: dict[str, Content] | None) -> None:
    """Raise PlanError unless the program's buffers can be what they are said to be."""

    def fail(rule: str) -> PlanError:
        return PlanError(f"{direction}, rank {program.rank}: {rule}")

    for name, buffer in program.buffers.items():
        _check_buffer(plan, name, buffer, fail)
        if buffer.role == "input":
            _check_input(plan, direction, program, name, fail)
        elif buffer.kept and left is not None:
            _check_saved(plan, program, name, left, fail)
    if len(program.accumulators) != 1:
        raise fail(f"{len(program.accumulators)} buffers are accumulators; one is, for a sink joins it once")
    unknown = sorted(set(program.results) - set(RESULTS[direction]))
    if unknown:
        raise fail(f"{unknown[0]} is no result of {direction}; it has {' and '.join(RESULTS[direction])}")
    for what, kinds in RESULTS[direction].items():
        name = program.results.get(what)
        if name not in program.buffers:
            raise fail(f"no buffer is named as the result {what}")
        buffer = program.buffers[name]
        if buffer.kind not in kinds:
            raise fail(f"{name} is a buffer of {buffer.kind} and cannot be the result {what}")
        if buffer.role != "result" and not buffer.kept:
            raise fail(f"the result {what} lies in {name}, which is no result or saved buffer but {buffer.role}")


def _check_buffer(plan: Plan, name: str, buffer: Buffer, fail: Callable[[str], PlanError]) -> None:
    heads = plan.shape.Hkv if buffer.kind in KEYS else plan.shape.H
    if not 0 <= buffer.heads[0] <= buffer.heads[1] <= heads:
        raise fail(f"{name} holds heads {buffer.heads}, and the model has {heads}")
    if buffer.capacity < buffer.tokens.count:
        raise fail(f"{name} reserves {buffer.capacity} tokens and holds {buffer.tokens.count}")
    if repeats(buffer.tokens):
        raise fail(f"{name} holds a token twice")
    if buffer.role == "accumulator" and buffer.kind != "partial":
        raise fail(f"{name} holds {buffer.kind}, and an accumulator holds partial results")
    if buffer.kind in LSE and not buffer.exact:
        raise fail(f"{name} holds log-sum-exps, which are never rounded; make it exact")


def _check_input(plan: Plan, direction: str, program: Program, name: str, fail: Callable[[str], PlanError]) -> None:
    """Only what a rank owns is there without a message."""
    buffer, own = program.buffers[name], plan.placement.sets[program.rank]
    full = (0, plan.shape.Hkv if buffer.kind in KEYS else plan.shape.H)
    if name not in INPUTS[direction] or buffer.kind != name:
        raise fail(f"{name} is said to be an input, and {direction} is given {' and '.join(INPUTS[direction])}")
    if buffer.tokens != own or buffer.heads != full:
        raise fail(f"input {name} holds {buffer.tokens} x heads {buffer.heads}, and the rank has {own} x {full}")


def _check_saved(
    plan: Plan, program: Program, name: str, left: dict[str, Content], fail: Callable[[str], PlanError]
) -> None:
    """What backward finds is what forward left, whole."""
    forward, buffer = plan.forward[program.rank], program.buffers[name]
    made = forward.buffers.get(name) if forward else None
    if made is None or not (made.kept or made.role == "input"):
        raise fail(f"{name} is not among what forward keeps")
    if made.role == "accumulator" != buffer.role or buffer.role == "accumulator" != made.role:
        raise fail(f"{name} is an accumulator in one direction and not in the other")
    if (made.kind, made.tokens, made.heads, made.exact) != (buffer.kind, buffer.tokens, buffer.heads, buffer.exact):
        raise fail(f"forward leaves another {name} than backward reads")
    if buffer.tokens.count and buffer.heads[0] < buffer.heads[1]:
        if not covered(buffer.tokens, buffer.heads, left[name].written):
            raise fail(f"forward does not write all of {name}, which backward reads")
        if buffer.kind == "partial":
            fault = coverage_fault(plan.sight, buffer.tokens, buffer.heads, left[name].blocks, True, plan.shape.group)
            total = plan.placement.layout.total_tokens
            fault = fault or sink_fault(buffer.tokens, buffer.heads, left[name].blocks, total)
            if fault:
                raise fail(f"{name} is not finished when forward leaves it: {fault}")
