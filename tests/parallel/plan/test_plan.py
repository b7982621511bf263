"""What a plan counts, by hand: the batch of docs/plan.md, and heads exchanged."""

import dataclasses

import numpy as np
import pytest

from kernels.mask_spec import MaskSpec
from parallel.plan.ir import CLASSES, AttentionShape, Copy, Message, Post
from parallel.plan.layout import PackedLayout
from parallel.plan.mesh import MeshSpec
from parallel.plan.plan import Plan, copy_bytes, message_bytes, touched
from parallel.plan.tokens import TokenSet
from parallel.strategy import load_strategy

LAYOUT = PackedLayout.from_lengths([5, 3, 4])


def planned(name: str = "zigzag_ring", ranks: list[int] | None = None, **more: object) -> Plan:
    strategy = load_strategy(name, dp=1)
    shape = AttentionShape(2, 1, 64, 32, "bf16") if "shape" not in more else more["shape"]
    placement = strategy.shard(more.get("layout", LAYOUT), strategy.mesh(2, 2, 1))  # pyright: ignore[reportArgumentType]
    return strategy.plan(placement, shape, more.get("mask", MaskSpec()), ranks=ranks)  # pyright: ignore[reportArgumentType]


def test_work_is_pairs_a_head():
    assert planned().work.tolist() == [15, 16]
    plan = planned("ulysses")  # each rank all tokens, one head of two
    assert plan.work.tolist() == [15.5, 15.5]
    assert plan.work_of(plan.forward[0]) == 31 == plan.work_of(plan.backward[0])  # pyright: ignore[reportArgumentType]


def test_bytes_by_class_and_pair():
    """Six tokens each way: k and v forward and again backward, dk and dv home in fp32."""
    plan = planned()
    keys, grads = 6 * (64 + 32) * 2, 6 * (64 + 32) * 4
    forward, both = plan.bytes_of("forward"), plan.bytes
    assert set(forward) == set(both) == set(CLASSES)
    assert forward["kv"].tolist() == [[0, keys], [keys, 0]] and both["kv"].tolist() == [[0, 2 * keys], [2 * keys, 0]]
    assert both["grad_kv"].tolist() == [[0, grads], [grads, 0]]
    assert sum(size.sum() for size in forward.values()) == 2 * keys
    assert all(size.dtype == np.int64 for size in both.values())


def test_copies_count_on_the_diagonal():
    """Heads exchanged: of 12 tokens a rank gives 6 x 1 head and copies as much to itself; both need the key head."""
    forward = planned("ulysses").bytes_of("forward")
    assert forward["q"].tolist() == [[6 * 64 * 2] * 2] * 2
    assert forward["kv"].tolist() == [[6 * (64 + 32) * 2] * 2] * 2
    assert forward["out"].tolist() == [[6 * 32 * 2] * 2] * 2
    assert not forward["lse"].any()


def test_rounds_are_the_busiest_ranks_batches():
    assert planned().rounds == {"forward": 1, "backward": 2}
    assert planned(layout=PackedLayout.from_lengths([])).rounds == {"forward": 0, "backward": 0}
    lone = dataclasses.replace(planned(), forward=(None, planned().forward[1]), backward=(None, None))
    assert lone.rounds == {"forward": 1, "backward": 0}


def test_peak_is_what_is_held_at_once():
    """Backward: the other's keys, their gradients, stats of 6 tokens x 2 heads x 2 numbers; then both gradients."""
    keys, grads, stats = 6 * 96 * 2, 6 * 96 * 4, 6 * 2 * 2 * 4
    plan = planned()
    assert [plan.peak_buffer_bytes(rank) for rank in (0, 1)] == [max(keys + grads, 2 * grads) + stats] * 2
    forward = dataclasses.replace(plan, backward=plan.forward)
    assert forward.peak_buffer_bytes(0) == keys
    assert planned(layout=PackedLayout.from_lengths([])).peak_buffer_bytes(0) == 0


def test_ranks_and_rows():
    assert planned().ranks == [0, 1] and planned().size == 2
    one = planned(ranks=[1])
    assert one.ranks == [1] and one.size == 2 and [p.rank for p in one.programs("backward")] == [1]
    assert one.hash == planned().hash


def test_hash_names_what_the_plan_is_made_from():
    plans = {
        "as it is": planned(),
        "documents": planned(layout=PackedLayout.from_lengths([5, 4, 3])),
        "shape": planned(shape=AttentionShape(2, 1, 64, 64, "bf16")),
        "dtype": planned(shape=AttentionShape(2, 1, 64, 32, "fp16")),
        "mask": planned(mask=MaskSpec(window=3)),
        "axes": planned("ring"),
    }
    base = plans["as it is"]
    placement = base.placement
    plans["mesh"] = dataclasses.replace(
        base, placement=dataclasses.replace(placement, mesh=MeshSpec(cp_outer=2, node_size=4))
    )
    plans["split"] = dataclasses.replace(
        base, placement=dataclasses.replace(placement, units=(TokenSet.of((0, 12)),), split=2)
    )
    plans["groups"] = dataclasses.replace(base, placement=dataclasses.replace(placement, groups=2))
    plans["units"] = dataclasses.replace(base, placement=dataclasses.replace(placement, units=placement.units[::-1]))
    hashes = {name: plan.hash for name, plan in plans.items()}
    assert len(set(hashes.values())) == len(hashes) and all(len(h) == 32 for h in hashes.values())
    assert planned().hash == base.hash
    turned = dict(reversed(base.axes.items()))  # as they may come out of JSON
    assert dataclasses.replace(base, axes=turned).hash == base.hash


def test_bytes_of_a_message_and_of_a_copy():
    shape, tokens = AttentionShape(4, 2, 8, 16, "bf16"), TokenSet.of((0, 10))
    message = Message(1, "grad_kv", "x", tokens, (0, 1), True)
    assert message_bytes(message, shape) == [("grad_kv", 10 * 8 * 4), ("grad_kv", 10 * 16 * 4)]
    program = planned("ulysses").forward[0]
    assert program is not None
    step = next(step for step in program.steps if isinstance(step, Copy) and step.source == "acc")
    # a copy costs what it writes: out in the model's dtype, out of an fp32 result
    assert copy_bytes(step, program, AttentionShape(2, 1, 64, 32, "bf16")) == [("out", 6 * 32 * 2)]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_touched_names_every_buffer(direction: str):
    for name in ("zigzag_ring", "ulysses"):
        for program in planned(name).programs(direction):
            for step in program.steps:
                words = [value for value in step if isinstance(value, str) and value in program.buffers]
                if isinstance(step, Post):
                    words = [message.buffer for message in (*step.sends, *step.recvs)]
                assert sorted(touched(step)) == sorted(words)
