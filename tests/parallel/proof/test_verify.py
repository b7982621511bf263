"""verify finds what is wrong: each rule broken by hand, and any step lost or doubled."""

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kernels.mask_spec import MaskSpec
from parallel.plan.ir import (
    Add,
    AttentionShape,
    Copy,
    MakeStats,
    Message,
    Post,
    Program,
    Step,
)  # fmt: skip
from parallel.plan.layout import PackedLayout
from parallel.plan.plan import Plan, message_bytes
from parallel.plan.tokens import TokenSet
from parallel.proof.verify import PlanError, verify
from parallel.runtime.loopback import run_loopback
from parallel.strategy import load_strategy, preset_names
from tests.parallel import cases as rig
from tests.parallel.proof.drafts import Draft

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


@pytest.mark.parametrize(
    ("name", "ranks", "more"),
    [
        ("zigzag_ring", 2, {}),
        ("distflash", 3, {}),
        ("distflash", 5, {}),
        ("hsap", 4, {"cp_inner": 1}),
        ("llama3", 4, {}),
        ("ulysses", 4, {"Hkv": 2}),
        ("ulysses", 4, {"Hkv": 1}),
    ],
)
def test_whole_shares_may_travel_in_the_models_dtype(name: str, ranks: int, more: dict):
    """Each rank's gradient of a key or a query is sent once, rounded once, and summed in fp32."""
    draft = Draft(name, ranks, (30,), **more).every_message("backward", ("grad_q", "grad_kv"), exact=False)
    plan = draft.plan()
    assert plan.bytes["grad_kv"].sum() < draft.base.bytes["grad_kv"].sum()
    verify(plan)
    inputs = rig.tensors(plan.shape, 30, dtype=torch.bfloat16)
    exact, rounded = (run_loopback(p, *inputs, rules="strict", poison=True) for p in (draft.base, plan))
    wanted = rig.dense(plan.placement.layout, plan.mask, inputs, None, None)
    for what in ("dq", "dk", "dv"):
        errors = [(getattr(r, what).double() - wanted[what]).norm() / wanted[what].norm() for r in (exact, rounded)]
        assert errors[1] < 2 * errors[0] + 1e-3, (what, errors)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["partial", "stats"])
def test_no_log_sum_exp_travels_rounded(name: str, kind: str):
    for direction in ("forward", "backward"):
        draft = Draft(name, 4, (32,))
        sent = [m for p in draft.programs[direction] for s in p.steps if isinstance(s, Post) for m in s.sends]
        draft.every_message(direction, (kind,), exact=False)
        if any(m.kind == kind for m in sent):
            with pytest.raises(PlanError, match="must be exact"):
                verify(draft.plan())
        else:
            verify(draft.plan())


def test_a_claim_is_held_where_the_exchange_makes_it():
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
        (text.replace('"format":2', '"format":9'), "format 2"),
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
