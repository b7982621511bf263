"""A plan read back from its JSON is the plan."""

import json

import pytest

from kernels.mask_spec import MaskSpec
from parallel.plan.ir import AttentionShape, Message, Post
from parallel.plan.layout import PackedLayout
from parallel.plan.plan import Plan
from parallel.proof.verify import verify
from parallel.strategy import load_strategy, preset_names


def planned(name: str, ranks: list[int] | None = None) -> Plan:
    strategy = load_strategy(name, **({} if name == "local" else {"dp": 1}))
    world = 1 if name == "local" else 4
    placement = strategy.shard(PackedLayout.from_lengths([13, 2, 17], [2, 1], 18), strategy.mesh(world, 4, 2))
    return strategy.plan(placement, AttentionShape(4, 2, 8, 8, "bf16"), MaskSpec(window=9), ranks=ranks)


@pytest.mark.parametrize("name", [name for name in preset_names() if name != "auto"])
def test_every_part_comes_back(name: str):
    plan = planned(name)
    read = Plan.from_json(plan.to_json())
    for part in ("axes", "shape", "mask", "sends_only_needed", "forward", "backward"):
        assert getattr(read, part) == getattr(plan, part), part
    for part in ("layout", "mesh", "units", "split", "groups"):
        assert getattr(read.placement, part) == getattr(plan.placement, part), part
    assert read.hash == plan.hash and read.to_json() == plan.to_json()
    for program in read.programs("forward"):
        for step in program.steps:
            if isinstance(step, Post):
                assert all(isinstance(m, Message) for m in (*step.sends, *step.recvs))
    verify(read)


def test_one_row_comes_back():
    read = Plan.from_json(planned("hsap", [2]).to_json())
    assert read.ranks == [2] and read.forward[2] == planned("hsap").forward[2] and read.size == 4


def test_each_set_of_tokens_is_written_once():
    raw = json.loads(planned("zigzag_ring").to_json())
    assert raw["format"] == 2 and len({str(s) for s in raw["tokens"]}) == len(raw["tokens"])
    assert len(planned("zigzag_ring").to_json()) < 20_000


def test_what_is_no_plan_is_refused_in_words():
    text = planned("zigzag_ring").to_json()
    raw = json.loads(text)
    for bad, match in (
        ("{", "not a plan: "),
        ("[]", r"not a plan of format 2 \(found 'list'\)"),
        ("{}", r"not a plan of format 2 \(found None\)"),
        (json.dumps({**raw, "format": 3}), r"not a plan of format 2 \(found 3\)"),
        (json.dumps({k: v for k, v in raw.items() if k != "units"}), "the plan's JSON is damaged: KeyError 'units'"),
        (json.dumps({**raw, "units": [999]}), "the plan's JSON is damaged: IndexError"),
        (json.dumps({**raw, "shape": {}}), "the plan's JSON is damaged: TypeError"),
        (json.dumps({**raw, "hash": "0" * 32}), f"says hash {'0' * 32}, and its contents make .*; it was changed"),
    ):
        with pytest.raises(ValueError, match=match):
            Plan.from_json(bad)
