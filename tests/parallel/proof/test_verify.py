"""verify finds what is wrong: each rule broken by hand, and any step lost or doubled."""

import copy
import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kernels.mask_spec import MaskSpec
from parallel.plan.ir import (
    Add,
    Attend,
    AttendBackward,
    AttentionShape,
    Copy,
    Free,
    MakeStats,
    Merge,
    Message,
    Post,
    Program,
    Step,
    Wait,
)  # fmt: skip
from parallel.plan.layout import PackedLayout
from parallel.plan.plan import Plan, message_bytes
from parallel.plan.tokens import TokenSet
from parallel.proof.verify import PlanError, verify
from parallel.strategy import load_strategy, preset_names

LAYOUT = PackedLayout.from_lengths([13, 2, 17], rows=[2, 1], row_length=18)
GATHERS = ("llama3", "per_document", "flashcp")
NAMES = [name for name in preset_names() if name not in ("local", "auto")]


def make(name: str = "zigzag_ring", layout: PackedLayout = LAYOUT) -> Plan:
    strategy = load_strategy(name, dp=1, **({"cp_inner": 2} if name in ("usp", "double_ring") else {}))
    placement = strategy.shard(layout, strategy.mesh(4, 4, 2))
    return strategy.plan(placement, AttentionShape(4, 2, 8, 8), MaskSpec())


def changed(plan: Plan, rank: int, direction: str, change: Callable[[list[Step]], list[Step]]) -> Plan:
    """The plan with one rank's steps changed."""
    programs = list(getattr(plan, direction))
    program: Program = copy.copy(programs[rank])
    program.steps = change(list(program.steps))
    programs[rank] = program
    return dataclasses.replace(plan, **{direction: tuple(programs)})


@pytest.mark.parametrize("name", ["local", *NAMES])
def test_plans_verify(name: str):
    verify(make(name) if name != "local" else _local())


def _local() -> Plan:
    strategy = load_strategy("local")
    return strategy.plan(strategy.shard(LAYOUT, strategy.mesh(1, 4, 2)), AttentionShape(4, 2, 8, 8), MaskSpec())


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(NAMES), st.sampled_from(["forward", "backward"]), st.integers(0, 3), st.data())
def test_any_lost_step_is_found(name: str, direction: str, rank: int, data: st.DataObject):
    plan = make(name)
    steps = getattr(plan, direction)[rank].steps
    # a gather's useless blocks return zeros, which may as well not be added
    places = [i for i, step in enumerate(steps) if not (name in GATHERS and isinstance(step, Add))]
    assume(places)
    at = data.draw(st.sampled_from(places))
    with pytest.raises(PlanError):
        verify(changed(plan, rank, direction, lambda steps: steps[:at] + steps[at + 1 :]))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(NAMES), st.sampled_from(["forward", "backward"]), st.integers(0, 3), st.data())
def test_any_doubled_step_is_found(name: str, direction: str, rank: int, data: st.DataObject):
    plan = make(name)
    steps = getattr(plan, direction)[rank].steps
    # copying twice gives no other numbers, nor do the same stats, nor the zeros that a gather's useless blocks return
    harmless = (Copy, MakeStats, Add) if name in GATHERS else (Copy, MakeStats)
    places = [i for i, step in enumerate(steps) if not isinstance(step, harmless)]
    assume(places)
    at = data.draw(st.sampled_from(places))
    with pytest.raises(PlanError):
        verify(changed(plan, rank, direction, lambda steps: steps[: at + 1] + steps[at:]))


def first(kind: type) -> Callable[[list[Step]], int]:
    return lambda steps: next(i for i, step in enumerate(steps) if isinstance(step, kind))


def edit(plan: Plan, direction: str, kind: type, change: Callable[[Step], Step]) -> Plan:
    """The plan with the first step of `kind` changed, on the first rank that has one."""
    having = [p for p in plan.programs(direction) if any(isinstance(step, kind) for step in p.steps)]
    at = first(kind)(having[0].steps)
    made = change(having[0].steps[at])
    return changed(plan, having[0].rank, direction, lambda steps: [*steps[:at], made, *steps[at + 1 :]])


def resend(step: Step, **new: object) -> Step:
    assert isinstance(step, Post)
    return step._replace(sends=(step.sends[0]._replace(**new), *step.sends[1:]))


@pytest.mark.parametrize(
    ("name", "direction", "kind", "change", "match"),
    [
        ("zigzag_ring", "forward", Post, lambda s: resend(s, tokens=s.sends[0].tokens.cut(0, 3)), "not what its peer"),
        ("zigzag_ring", "forward", Post, lambda s: resend(s, peer=0), "copies to itself"),
        ("zigzag_ring", "forward", Post, lambda s: resend(s, peer=9), "rank 9"),
        ("zigzag_ring", "forward", Post, lambda s: resend(s, tokens=TokenSet.of()), "empty message"),
        ("zigzag_ring", "forward", Post, lambda s: resend(s, heads=(1, 1)), "empty message"),
        ("zigzag_ring", "forward", Post, lambda s: resend(s, kind="q"), "holds no q"),
        ("zigzag_ring", "forward", Post, lambda s: resend(s, buffer="nowhere"), "not declared"),
        ("zigzag_ring", "forward", Post, lambda s: s._replace(batch=77), "deadlock|not posted"),
        ("zigzag_ring", "forward", Post, lambda s: s._replace(comm="cp_outer"), "deadlock|not posted"),
        ("zigzag_ring", "forward", Wait, lambda s: s._replace(batch=77), "was not posted"),
        ("zigzag_ring", "forward", Attend, lambda s: s._replace(heads=(0, 3)), "head 3"),
        ("zigzag_ring", "forward", Attend, lambda s: s._replace(heads=(0, 5)), "does not hold"),
        ("zigzag_ring", "forward", Attend, lambda s: s._replace(k_tokens=s.k_tokens.cut(0, 1)), "0 times"),
        ("zigzag_ring", "forward", Attend, lambda s: s._replace(kv="kv1"), "received|nothing was written|hold"),
        ("zigzag_ring", "forward", Free, lambda s: s._replace(buffer="q"), "no temporary"),
        ("zigzag_ring", "backward", AttendBackward, lambda s: s._replace(q_tokens=s.q_tokens.cut(0, 2)), "0 times"),
        ("zigzag_ring", "backward", Add, lambda s: s._replace(tokens=s.tokens.cut(0, 1)), "times"),
        ("zigzag_ring", "backward", MakeStats, lambda s: s._replace(into="grad_q"), "nothing was written"),
        ("distflash", "forward", Merge, lambda s: s._replace(into="partial1.9"), "not declared"),
        ("ulysses", "forward", Copy, lambda s: s._replace(heads=(0, 0)), "does not hold|nothing was written"),
        ("ulysses", "forward", Copy, lambda s: s._replace(into="q"), "is an input|does not hold"),
    ],
)  # fmt: skip
def test_broken_rules(name: str, direction: str, kind: type, change: Callable[[Step], Step], match: str):
    plan = make(name, PackedLayout.from_lengths([32]) if name == "distflash" else LAYOUT)
    with pytest.raises(PlanError, match=match):
        verify(edit(plan, direction, kind, change))


def test_a_buffer_in_flight_is_guarded():
    """Freeing what a batch still sends, and reading what it still receives."""
    plan = make("zigzag_ring", PackedLayout.from_lengths([32]))

    def swap(steps: list[Step]) -> list[Step]:
        wait = next(i for i, s in enumerate(steps) if isinstance(s, Wait) and isinstance(steps[i + 1], Free))
        return [*steps[:wait], steps[wait + 1], steps[wait], *steps[wait + 2 :]]

    with pytest.raises(PlanError, match="while a batch holds it"):
        verify(changed(plan, 1, "forward", swap))

    def early(steps: list[Step]) -> list[Step]:
        wait = first(Wait)(steps)
        attend = next(i for i in range(wait, len(steps)) if isinstance(steps[i], Attend))
        return [*steps[:wait], steps[attend], *steps[wait:attend], *steps[attend + 1 :]]

    with pytest.raises(PlanError, match="while it is received"):
        verify(changed(plan, 1, "forward", early))


def test_bytes_that_nobody_needs_are_found_where_the_exchange_claims_otherwise():
    plan = make("zigzag_ring", PackedLayout.from_lengths([4, 28]))
    with pytest.raises(PlanError, match="nothing here needs"):
        verify(dataclasses.replace(plan, sends_only_needed=True))
    assert make("distflash").sends_only_needed
    verify(make("distflash"))


def test_a_partial_plan_cannot_be_verified():
    strategy = load_strategy("ring")
    placement = strategy.shard(LAYOUT, strategy.mesh(4, 4, 2))
    with pytest.raises(ValueError, match="1 of 4 ranks"):
        verify(strategy.plan(placement, AttentionShape(4, 2, 8, 8), MaskSpec(), ranks=[2]))
    with pytest.raises(ValueError, match="not all among"):
        strategy.plan(placement, AttentionShape(4, 2, 8, 8), MaskSpec(), ranks=[4])


def test_json_that_was_changed_is_refused():
    text = make().to_json()
    for bad, match in (
        ("{", "not a plan"),
        ("[]", "format"),
        (text.replace('"format":1', '"format":9'), "format 1"),
        (text.replace('"causal":true', '"causal":false'), "was changed"),
        (text.replace('"units"', '"unit"'), "damaged"),
    ):
        with pytest.raises(ValueError, match=match):
            Plan.from_json(bad)


def test_messages_know_their_bytes():
    shape = AttentionShape(4, 2, 8, 16, "bf16")
    tokens = TokenSet.of((0, 10))
    sizes = {
        ("kv", False): [("kv", 10 * 2 * 8 * 2), ("kv", 10 * 2 * 16 * 2)],
        ("partial", True): [("out", 10 * 4 * 16 * 4), ("lse", 10 * 4 * 4)],
        ("out", False): [("out", 10 * 4 * 16 * 2)],
        ("stats", True): [("lse", 10 * 4 * 4)] * 2,
        ("grad_q", True): [("grad_q", 10 * 4 * 8 * 4)],
        ("grad_q", False): [("grad_q", 10 * 4 * 8 * 2)],
        ("grad_kv", True): [("grad_kv", 10 * 2 * 8 * 4), ("grad_kv", 10 * 2 * 16 * 4)],
    }
    for (kind, exact), wanted in sizes.items():
        heads = (0, 2) if kind in ("kv", "grad_kv") else (0, 4)
        assert message_bytes(Message(1, kind, "x", tokens, heads, exact), shape) == wanted


def test_shapes_are_refused():
    for values, match in (((4, 3, 8, 8), "3 key heads"), ((4, 2, 300, 8), "D=300"), ((4, 2, 8, 0), "Dv=0")):
        with pytest.raises(ValueError, match=match):
            AttentionShape(*values)
    with pytest.raises(ValueError, match="fp8"):
        AttentionShape(4, 2, 8, 8, "fp8")
