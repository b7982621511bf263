"""The executor step by step, on programs written by hand: what moves where, how precisely, and in whose memory."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention.backends import choose_rounds
from kernels.mask_spec import MaskSpec
from parallel.plan.ir import (
    Add,
    AttentionShape,
    Buffer,
    Copy,
    Free,
    Merge,
    Message,
    Post,
    Program,
    Step,
    Wait,
)  # fmt: skip
from parallel.plan.layout import PackedLayout
from parallel.plan.tokens import TokenSet
from parallel.runtime.bind import BoundPlan
from parallel.runtime.buffers import BufferPool
from parallel.runtime.comm import Parcel, Recorder
from parallel.runtime.executor import Execution, Options
from parallel.strategy import load_strategy

T = 6
ALL, SOME, ODD = TokenSet.of((0, T)), TokenSet.of((2, 4)), TokenSet.of((1, T, 2))
NAN = float("nan")


class Wire:
    """A transport that keeps what is sent and gives what it was told to."""

    def __init__(self, *arriving: Tensor) -> None:
        self.rank, self.arriving = 0, list(arriving)
        self.posted: list[tuple[str, Any, Any]] = []
        self.open, self.finished = True, 0

    def post(self, comm: str, sends: Any, recvs: Any) -> Any:
        self.posted.append((comm, sends, recvs))
        return recvs

    def ready(self, handle: Any) -> bool:
        return self.open

    def finish(self, handle: list[Parcel]) -> None:
        self.finished += 1
        for parcel in handle:
            parcel.wire.copy_(self.arriving.pop(0))


def execution(
    buffers: dict[str, Buffer], *steps: Step, wire: Wire | None = None, sink: Tensor | None = None, **more: Any
) -> Execution:
    """A run of these steps over four query heads, two key heads, widths 2 and 3, in bf16."""
    strategy = load_strategy("ring", dp=1)
    placement = strategy.shard(PackedLayout.from_lengths([2 * T]), strategy.mesh(2, 4, 2))
    plan = strategy.plan(placement, AttentionShape(4, 2, 2, 3, "bf16"), MaskSpec())
    program = Program(0, buffers, list(steps), more.pop("results", {}), more.pop("slabs", []))
    bound = BoundPlan(dataclasses.replace(plan, forward=(program, plan.forward[1])), 0)
    given = more.pop("given", {})
    options = Options(0.5, None, sink)
    return Execution(
        bound, "forward", given, options, choose_rounds("torch", torch.zeros(1, 1, 1)), wire or Wire(),
        more.pop("pool", None) or BufferPool(poison=True), **more,
    )  # fmt: skip


def finish(run: Execution) -> Execution:
    assert list(run.steps()) == []
    return run


def buffer(
    kind: str, tokens: TokenSet = ALL, heads: tuple[int, int] = (0, 4), exact: bool = True, **more: Any
) -> Buffer:
    return Buffer(kind, tokens, heads, exact, **{"capacity": tokens.count, **more})  # pyright: ignore[reportArgumentType]


def numbers(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


# memory


@pytest.mark.parametrize("role", ["temporary", "saved", "accumulator", "result"])
def test_sums_begin_as_nothing(role: str):
    kinds = {"partial": ("out", "lse"), "grad_q": ("dq",), "grad_kv": ("dk", "dv")}
    run = execution({kind: buffer(kind, heads=(0, 2), role=role) for kind in kinds})
    for kind, names in kinds.items():
        held = run.get(kind)
        assert tuple(held.tensors) == names and run.get(kind) is held
        for name, tensor in held.tensors.items():
            assert (tensor == (-torch.inf if name == "lse" else 0)).all(), name
            assert tensor.dtype == torch.float32
        assert (held.slab is not None) == (role == "temporary")


def test_other_buffers_begin_as_anything_and_lie_as_wires_do():
    run = execution({"kv": buffer("kv", heads=(0, 2), exact=False)})
    held = run.get("kv")
    assert held.tensors["k"].isnan().all() and held.tensors["v"].isnan().all()  # the pool's poison
    assert held.flat is not None and held.flat.numel() == T * 2 * (2 + 3) * 2
    assert held.tensors["k"].data_ptr() == held.flat.data_ptr()
    assert held.tensors["v"].data_ptr() == held.flat.data_ptr() + T * 2 * 2 * 2


def test_a_temporary_takes_its_capacity_and_gives_it_back():
    pool = BufferPool()
    held = {name: buffer("grad_q", SOME, capacity=40) for name in ("a", "b")}
    run = execution(held, Free("a"), pool=pool)
    size = run.get("a").slab.numel()  # pyright: ignore[reportOptionalMemberAccess]
    assert size >= 40 * 4 * 2 * 4 and pool.total == size
    finish(run)
    assert "a" not in run.held
    run.get("b")
    assert pool.total == size  # the same slab again
    finish(execution(held, Free("a")))  # never used


def test_slabs_are_there_before_the_first_step():
    pool = BufferPool()
    finish(execution({}, slabs=[(1024, 2), (4096, 1)], pool=pool))
    assert pool.total == 2 * 1024 + 4096


def test_a_result_that_nothing_wrote_is_there_at_the_end():
    run = finish(execution({"x": buffer("grad_q", role="result")}, results={"grad_q": "x"}))
    assert not run.held["x"].tensors["dq"].any()


def test_a_sink_begins_the_running_result_and_no_other():
    sink = torch.tensor([0.5, -1.0, 2.0, 3.0])
    run = execution(
        {"acc": buffer("partial", heads=(1, 3), role="accumulator"), "part": buffer("partial", heads=(1, 3))}, sink=sink
    )
    assert (
        torch.equal(run.get("acc").tensors["lse"], sink[1:3, None].expand(2, T))
        and not run.get("acc").tensors["out"].any()
    )
    assert run.get("part").tensors["lse"].isneginf().all()
    assert execution({"acc": buffer("partial", role="accumulator")}).get("acc").tensors["lse"].isneginf().all()


# moving


@pytest.mark.parametrize("tokens", [ALL, SOME, ODD], ids=["all", "a run", "strided"])
def test_copies_and_sums_touch_their_tokens_and_heads_alone(tokens: TokenSet):
    at, heads = tokens.expand(), slice(1, 3)
    source, base = numbers(T, 4, 2), numbers(T, 4, 2, seed=1)
    held = {name: buffer("grad_q") for name in ("from", "into")}
    for step in (Copy("from", "into", tokens, (1, 3)), Add("from", "into", tokens, (1, 3))):
        run = execution(held, step, given={"from": {"dq": source}, "into": {"dq": base.clone()}})
        wanted = base.clone()
        wanted[at, heads] = source[at, heads] + (base[at, heads] if isinstance(step, Add) else 0)
        assert torch.equal(finish(run).get("into").tensors["dq"], wanted)


def test_buffers_that_begin_at_another_head_and_lie_in_another_order():
    turned = TokenSet.of((3, T), (0, 3))
    held = {"from": buffer("grad_kv", heads=(0, 2)), "into": buffer("grad_kv", turned, (1, 2))}
    dk, dv = numbers(T, 2, 2), numbers(T, 2, 3, seed=1)
    for step in (Copy("from", "into", ALL, (1, 2)), Add("from", "into", ALL, (1, 2))):
        run = finish(execution(held, step, given={"from": {"dk": dk, "dv": dv}}))
        assert torch.equal(run.get("into").tensors["dk"], dk[[3, 4, 5, 0, 1, 2], 1:])
        assert torch.equal(run.get("into").tensors["dv"], dv[[3, 4, 5, 0, 1, 2], 1:])


def test_a_partial_copied_as_out_is_rounded_and_leaves_its_lse():
    recorder, out = Recorder(), numbers(T, 4, 3)
    held = {"acc": buffer("partial"), "out": buffer("out", exact=False, role="result")}
    run = execution(
        held, Copy("acc", "out", SOME, (0, 2)), given={"acc": {"out": out, "lse": numbers(4, T)}}, recorder=recorder
    )
    found = finish(run).get("out").tensors
    assert list(found) == ["out"] and torch.equal(found["out"][2:4, :2], out[2:4, :2].bfloat16())
    assert dict(recorder.bytes) == {("out", 0, 0): 2 * 2 * 3 * 2}


@pytest.mark.parametrize(
    "tokens", [ALL, SOME, ODD, TokenSet.of((4, T), (1, 2))], ids=["all", "a run", "strided", "turned"]
)
def test_merges_join_by_log_sum_exp(tokens: TokenSet):
    """Of two keys with logits a and b, each alone first: out is the softmax's mean, lse its logarithm."""
    at = torch.from_numpy(tokens.expand().copy())
    a, b = numbers(4, T), numbers(4, T, seed=1)[1:3, at]
    v, u = numbers(T, 4, 3, seed=2), numbers(tokens.count, 2, 3, seed=3)
    held = {"acc": buffer("partial"), "part": buffer("partial", tokens, (1, 3))}
    given = {"acc": {"out": v.clone(), "lse": a.clone()}, "part": {"out": u, "lse": b}}
    found = finish(execution(held, Merge("part", "acc"), given=given)).get("acc").tensors
    both = torch.stack([a[1:3, at], b])
    weights = both.softmax(0).mT[..., None]
    wanted, lse = v.clone(), a.clone()
    wanted[at, 1:3] = weights[0] * v[at, 1:3] + weights[1] * u
    lse[1:3, at] = both.logsumexp(0)
    torch.testing.assert_close(found["out"], wanted)
    torch.testing.assert_close(found["lse"], lse)


# messages


def sent(run: Execution, number: int = 0) -> list[Parcel]:
    return finish(run).transport.posted[number][1]  # pyright: ignore[reportAttributeAccessIssue]


def test_a_whole_buffer_is_its_own_wire():
    """Nothing is copied where the message is all of the buffer, as it lies; a part of it has a wire of its own."""
    held = {"x": buffer("grad_kv", heads=(0, 2))}
    whole = Message(1, "grad_kv", "x", ALL, (0, 2), True)
    cases = {
        True: [whole],
        False: [
            whole._replace(exact=False), whole._replace(tokens=SOME), whole._replace(heads=(0, 1)),
            whole._replace(tokens=TokenSet.of((3, T), (0, 3))),
        ],
    }  # fmt: skip
    for same, messages in cases.items():
        for message in messages:
            for side in ("sends", "recvs"):
                post = Post(0, "cp", (message,), ()) if side == "sends" else Post(0, "cp", (), (message,))
                run = finish(execution(held, post))
                (parcel,) = run.transport.posted[0][1 if side == "sends" else 2]  # pyright: ignore[reportAttributeAccessIssue]
                flat = run.get("x").flat
                assert flat is not None and (parcel.wire.data_ptr() == flat.data_ptr()) == same
                assert parcel.wire.dtype == torch.uint8 and parcel.wire.is_contiguous() and parcel.peer == 1


def test_a_partial_result_sent_as_out_has_a_wire_of_its_own():
    out = numbers(T, 4, 3)
    run = execution({"acc": buffer("partial")}, Post(0, "cp", (Message(1, "out", "acc", ALL, (0, 4)),), ()),
                    given={"acc": {"out": out, "lse": numbers(4, T)}})  # fmt: skip
    (parcel,) = sent(run)
    assert torch.equal(parcel.wire.view(torch.bfloat16).view(T, 4, 3), out.bfloat16())


@pytest.mark.parametrize("tokens", [ALL, SOME, ODD], ids=["all", "a run", "strided"])
@pytest.mark.parametrize("exact", [True, False])
def test_what_is_sent_is_fields_of_the_tokens_and_heads(tokens: TokenSet, exact: bool):
    at, dtype = tokens.expand(), torch.float32 if exact else torch.bfloat16
    dk, dv, recorder = numbers(T, 2, 2), numbers(T, 2, 3, seed=1), Recorder()
    message = Message(1, "grad_kv", "x", tokens, (1, 2), exact)
    held = {"x": buffer("grad_kv", heads=(0, 2))}
    run = execution(held, Post(7, "cp_outer", (message,), ()), given={"x": {"dk": dk, "dv": dv}}, recorder=recorder)
    (parcel,) = sent(run)
    assert run.transport.posted[0][0] == "cp_outer"  # pyright: ignore[reportAttributeAccessIssue]
    parts = [dk[at, 1:].to(dtype).flatten(), dv[at, 1:].to(dtype).flatten()]
    assert torch.equal(parcel.wire.view(dtype), torch.cat(parts))
    sizes = [len(part) * dtype.itemsize for part in parts]
    assert list(parcel.classes) == [("grad_kv", size) for size in sizes]
    assert dict(recorder.bytes) == {("grad_kv", 0, 1): sum(sizes)}


@pytest.mark.parametrize("tokens", [ALL, SOME, ODD], ids=["all", "a run", "strided"])
@pytest.mark.parametrize("exact", [True, False])
def test_what_arrives_is_written_where_it_belongs(tokens: TokenSet, exact: bool):
    at, dtype = tokens.expand(), torch.float32 if exact else torch.bfloat16
    out, lse = numbers(tokens.count, 2, 3), numbers(2, tokens.count, seed=1)
    arriving = torch.cat([out.to(dtype).flatten(), lse.to(dtype).flatten()])
    message = Message(1, "partial", "x", tokens, (1, 3), exact)
    wire = Wire(arriving.view(torch.uint8))
    run = execution({"x": buffer("partial")}, Post(0, "cp", (), (message,)), Wait(0, "cp"), wire=wire)
    found = finish(run).get("x").tensors
    wanted, logs = torch.zeros(T, 4, 3), torch.full((4, T), -torch.inf)
    wanted[at, 1:3], logs[1:3, torch.from_numpy(at.copy())] = out.to(dtype).float(), lse.to(dtype).float()
    assert torch.equal(found["out"], wanted) and torch.equal(found["lse"], logs)
    assert wire.finished == 1 and not run.pending


def test_wires_are_given_back_after_the_wait_and_have_room_for_the_capacity():
    pool = BufferPool()
    held = {"x": buffer("grad_q", capacity=50, role="result")}
    message = Message(1, "grad_q", "x", SOME, (0, 4), True)
    wire = Wire(torch.zeros(2 * 4 * 2 * 4, dtype=torch.uint8))
    run = execution(held, Post(0, "cp", (message,), (message,)), Wait(0, "cp"), wire=wire, pool=pool)
    finish(run)
    one = pool.total // 2
    assert one >= 50 * 4 * 2 * 4 and pool.total == 2 * one  # one each way
    pool.take(50 * 4 * 2 * 4), pool.take(50 * 4 * 2 * 4)
    assert pool.total == 2 * one  # both were back
    small = {"x": buffer("grad_q", capacity=1, role="result")}  # a message longer than the buffer's room
    run = execution(small, Post(0, "cp", (message,), ()), pool=(other := BufferPool()))
    finish(run)
    assert other.total >= 2 * 4 * 2 * 4


def test_a_wait_pauses_until_the_batch_is_there():
    wire, trace = Wire(), []
    message = Message(1, "grad_q", "x", ALL, (0, 4), True)
    run = execution(
        {"x": buffer("grad_q")}, Post(0, "cp", (message,), ()), Wait(0, "cp"), Free("x"), wire=wire,
        trace=lambda what, step: trace.append((what, type(step).__name__)),
    )  # fmt: skip
    wire.open = False
    steps = run.steps()
    assert next(steps) is None and next(steps) is None and wire.finished == 0
    assert trace == [("Post", "Post")]
    wire.open = True
    assert next(steps, "done") == "done" and wire.finished == 1
    assert [what for what, _ in trace] == ["Post", "Wait", "Free"]
