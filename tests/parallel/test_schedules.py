"""Every schedule is attention: random cases on loopback, the adversaries, bytes, leaks, drift."""

import dataclasses
import math

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from kernels.mask_spec import MaskSpec
from parallel.auto import resolve
from parallel.plan.ir import Attend, AttendBackward, AttentionShape, Post, Wait
from parallel.plan.layout import PackedLayout
from parallel.plan.plan import Plan
from parallel.proof.verify import verify
from parallel.runtime.comm import Loopback, Parcel
from parallel.runtime.loopback import run_loopback
from parallel.strategy import Strategy, load_strategy, preset_names
from tests.parallel import cases as rig

CAUSAL = MaskSpec()
# each option alone and together, one band and two
MASKS = [
    CAUSAL,
    MaskSpec(window=6),
    MaskSpec(prefix=12),
    MaskSpec(chunk=8, first=3),
    MaskSpec(window=4, prefix=7, first=2),
]
PLAIN = [name for name in preset_names() if name != "auto"]
MIXED = PackedLayout.from_lengths([21, 1, 1, 9, 2, 14], rows=[4, 2], row_length=33)


def _try_cases(seed: int, count: int) -> None:
    @hypothesis.seed(seed)
    @settings(max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(rig.cases())
    def one(case: rig.Case) -> None:
        rig.check(case)

    one()


@pytest.mark.parametrize("seed", range(8))
def test_random_schedules_equal_dense_attention(seed: int):
    _try_cases(seed, 250)


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(100, 150))
def test_many_random_schedules_equal_dense_attention(seed: int):
    _try_cases(seed, 1000)


def on(name: str, cp: int = 4, **axes: object) -> Strategy:
    """A preset on cp ranks, or as the axes say."""
    if name == "local":
        return load_strategy(name)
    return load_strategy(name, dp=1, **axes)


def planned(
    strategy: Strategy, cp: int, layout: PackedLayout = MIXED, mask: MaskSpec = CAUSAL, dtype: str = "fp64", H: int = 4,
    Hkv: int = 2,
) -> Plan:  # fmt: skip
    mesh, shape = strategy.mesh(1 if strategy.exchange == "none" else cp, H, Hkv), AttentionShape(H, Hkv, 8, 8, dtype)
    return resolve(strategy, mesh, layout, shape, (mask,)).plans[mask]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("rules", ["strict", "late"])
@pytest.mark.parametrize("name", preset_names())
def test_preset_under_the_adversaries(name: str, rules: str, mask: MaskSpec):
    plan = planned(on(name), 4, mask=mask)
    verify(plan)
    inputs = rig.tensors(plan.shape, MIXED.total_tokens)
    result = run_loopback(plan, *inputs, rules=rules, poison=True, backend="reference")
    rig.compare(result, rig.dense(MIXED, plan.mask, inputs, None, None))
    rig.check_bytes(plan, result)


@pytest.mark.parametrize("name", [n for n in preset_names() if n not in ("local", "ulysses", "basp", "auto")])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_next_transfer_is_posted_before_the_current_compute(name: str, direction: str):
    """In the order in which ranks really did things, what a batch brings was on its way during a computation: that of
    what the batch before it brought, where that brought the rank anything."""
    layout = PackedLayout.from_lengths([64])
    axes = {"cp_inner": 2} if on(name).inner_exchange else {}
    plan = planned(on(name, **axes), 8, layout, H=8, Hkv=4)
    result = run_loopback(plan, *rig.tensors(plan.shape, 64), rules="late", backend="reference")
    hidden = brought = 0
    for rank in range(plan.size):
        events = [(what, step) for r, d, what, step in result.events if (r, d) == (rank, direction)]
        posts = [step for what, step in events if what == "Post" and step.batch >= 0]
        brings = {step.batch for step in posts if any(m.kind in ("kv", "q") for m in step.recvs)}
        first = min((step.batch for step in posts), default=0)
        for at, (what, step) in enumerate(events):
            if what != "Post" or step.batch not in brings or (step.batch > first and step.batch - 1 not in brings):
                continue
            end = next(i for i, (w, s) in enumerate(events) if w == "Wait" and s[:2] == (step.batch, step.comm))
            brought += 1
            hidden += any(w in ("Attend", "AttendBackward") for w, _ in events[at:end])
    assert brought > 0 and hidden == brought


@pytest.mark.parametrize(("inner", "outer"), [(1, 8), (2, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("name", ["usp", "double_ring"])
def test_two_levels_on_eight_ranks(name: str, inner: int, outer: int):
    strategy = load_strategy(name, dp=1, cp_inner=inner, cp_outer=outer)
    plan = planned(strategy, 8, H=8, Hkv=4)
    verify(plan)
    inputs = rig.tensors(plan.shape, MIXED.total_tokens)
    result = run_loopback(plan, *inputs, rules="late", poison=True, backend="reference")
    rig.compare(result, rig.dense(MIXED, CAUSAL, inputs, None, None))


@pytest.mark.parametrize(("heads", "key_heads", "ranks"), [(40, 8, 8), (14, 2, 4), (32, 8, 16), (7, 1, 4), (20, 4, 8)])
@pytest.mark.parametrize("name", ["ulysses", "usp"])
def test_heads_that_do_not_divide(name: str, heads: int, key_heads: int, ranks: int):
    axes = {"cp_inner": ranks // 2, "cp_outer": 2} if name == "usp" else {}
    plan = planned(load_strategy(name, dp=1, **axes), ranks, H=heads, Hkv=key_heads)
    verify(plan)
    inputs = rig.tensors(plan.shape, MIXED.total_tokens)
    result = run_loopback(plan, *inputs, rules="strict", poison=True, backend="reference")
    rig.compare(result, rig.dense(MIXED, CAUSAL, inputs, None, None))
    if name == "ulysses":  # each rank receives its distinct key heads alone
        received = plan.bytes_of("forward")["kv"].sum(0) / (MIXED.total_tokens * 8 * 16)
        assert received == pytest.approx(
            [len({h * key_heads // heads for h in heads_of(heads, ranks, r)}) for r in range(ranks)]
        )


def heads_of(heads: int, ranks: int, rank: int) -> range:
    return range(rank * heads // ranks, (rank + 1) * heads // ranks)


@pytest.mark.parametrize("name", preset_names())
def test_documents_do_not_leak(name: str):
    """Other tokens in document 1 leave document 2's results and gradients as they were, bit for bit."""
    layout = PackedLayout.from_lengths([23, 40])
    plan = planned(on(name), 4, layout, dtype="fp32")
    one = rig.tensors(plan.shape, 63, dtype=torch.float32)
    two = [torch.cat([x[:23] * 3 - 1, x[23:]]) for x in one]
    first, second = (run_loopback(plan, *x, backend="torch") for x in (one, two))
    for what in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(first, what)[23:], getattr(second, what)[23:]), what
        assert not torch.equal(getattr(first, what)[:23], getattr(second, what)[:23])


def _layers(plan: Plan, layers: int, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of the first layer's input through layers of attention and a fixed linear map."""
    x, k, v, dout = rig.tensors(plan.shape, plan.placement.layout.total_tokens, dtype=dtype)
    states = []
    for _ in range(layers):
        result = run_loopback(plan, x, k, v, backend="torch")
        states.append(x)
        x = (x + result.out).to(dtype)
    grad = dout
    for x in reversed(states):
        result = run_loopback(plan, x, k, v, grad, backend="torch")
        grad = (grad + result.dq).to(dtype)
    return grad.double()


def test_gradients_do_not_drift_with_ranks():
    """bf16, twelve layers, a ring of eight: no further from fp32 than one rank is."""
    layout = PackedLayout.from_lengths([160, 96])
    errors = {}
    exact = _layers(planned(load_strategy("local"), 1, layout, dtype="fp32"), 12, torch.float32)
    for name, ranks in (("local", 1), ("zigzag_ring", 8), ("ring", 8)):
        found = _layers(planned(on(name), ranks, layout, dtype="bf16"), 12, torch.bfloat16)
        errors[name] = float((found - exact).norm() / exact.norm())
    assert errors["local"] > 1e-4  # bf16 does round
    assert errors["ring"] <= 1.2 * errors["local"] and errors["zigzag_ring"] <= 1.2 * errors["local"], errors


def test_useless_hops_send_nothing():
    """Documents that stay on a rank move no byte; causal shards never travel to earlier ranks."""
    alone = PackedLayout.from_lengths([16, 16, 16, 16])
    for name in ("ring", "distflash", "hsap"):
        assert sum(x.sum() for x in planned(load_strategy(name, dp=1, cp_inner=1), 4, alone).bytes.values()) == 0
    causal = planned(on("ring"), 4, PackedLayout.from_lengths([64])).bytes_of("forward")["kv"]
    assert (causal > 0).tolist() == [[b == a + 1 for b in range(4)] for a in range(4)]


@pytest.mark.parametrize("name", ["ring", "llama3", "usp"])
def test_a_window_exchanges_only_its_halo(name: str):
    """Contiguous shards of 32 tokens and a window of 5: each boundary is crossed by 4 tokens of keys."""
    strategy = load_strategy(name, dp=1, sharding="contiguous", **({"cp_inner": 1} if name == "usp" else {}))
    plan = planned(strategy, 4, PackedLayout.from_lengths([128]), MaskSpec(window=5))
    sent = plan.bytes_of("forward")["kv"].copy()
    for rank in range(4):
        sent[rank, rank] = 0
    assert sent.sum() == 3 * 4 * plan.shape.Hkv * 16 * 8


def test_helper_takes_about_half_the_rounds():
    layout = PackedLayout.from_lengths([8 * 16])
    ring, helped = planned(on("ring"), 8, layout), planned(on("distflash"), 8, layout)
    assert ring.rounds["forward"] == 7
    computing = [sum(isinstance(s, Attend) for s in p.steps) for p in helped.programs("forward")]
    assert (
        max(computing) == 5 and max(sum(isinstance(s, Attend) for s in p.steps) for p in ring.programs("forward")) == 8
    )
    assert helped.work.max() / helped.work.mean() < 1.15 < ring.work.max() / ring.work.mean()


def test_work_is_balanced_where_it_should_be():
    layout = PackedLayout.from_lengths([512])
    for name in ("zigzag_ring", "per_document", "striped_ring", "ulysses", "llama3", "double_ring"):
        work = planned(on(name), 4, layout).work
        assert work.max() / work.mean() < 1.02, name


def test_one_ranks_row_is_the_same_as_in_the_whole_plan():
    for name in PLAIN:
        strategy = on(name)
        mesh = strategy.mesh(1 if name == "local" else 4, 4, 2)
        placement, shape = strategy.shard(MIXED, mesh), AttentionShape(4, 2, 8, 8)
        whole = strategy.plan(placement, shape, CAUSAL)
        for rank in range(mesh.cp):
            row = strategy.plan(placement, shape, CAUSAL, ranks=[rank])
            assert row.ranks == [rank] and row.hash == whole.hash
            assert row.forward[rank] == whole.forward[rank] and row.backward[rank] == whole.backward[rank]


def test_double_ring_gives_sums_a_lap_to_come_home():
    """A batch that takes sums of gradients to another node is waited for only after more blocks were computed."""
    strategy = load_strategy("double_ring", dp=1, cp_inner=4)
    layout = PackedLayout.from_lengths([128])
    plan = strategy.plan(strategy.shard(layout, strategy.mesh(8, 4, 2)), AttentionShape(4, 2, 8, 8), MaskSpec())
    hops = {"cp_inner"}  # where sums follow their keys; all others are on their way home
    blocks = []
    for program in plan.programs("backward"):
        for at, step in enumerate(program.steps):
            if isinstance(step, Post) and step.comm not in hops and any(m.kind == "grad_kv" for m in step.sends):
                end = program.steps.index(Wait(step.batch, step.comm), at)
                blocks.append(sum(isinstance(s, AttendBackward) for s in program.steps[at:end]))
    assert max(blocks) > 1


def test_json_round_trip_runs_the_same():
    for name in preset_names():
        plan = planned(on(name), 4)
        read = Plan.from_json(plan.to_json())
        verify(read)
        assert read.hash == plan.hash and read.to_json() == plan.to_json()
        inputs = rig.tensors(plan.shape, MIXED.total_tokens)
        a, b = run_loopback(plan, *inputs), run_loopback(read, *inputs)
        assert all(torch.equal(getattr(a, what), getattr(b, what)) for what in ("out", "lse", "dq", "dk", "dv"))


def test_hash_changes_with_everything_it_should():
    base = planned(on("ring"), 4)
    others = [
        planned(on("ring"), 4, PackedLayout.from_lengths([22, 1, 9, 2, 14], rows=[3, 2], row_length=33)),
        planned(on("zigzag_ring"), 4),
        planned(on("ring"), 3),
        planned(on("ring"), 4, mask=MaskSpec(window=4)),
        planned(on("ring"), 4, dtype="bf16"),
        planned(on("ring"), 4, H=8),
    ]
    assert len({base.hash, *(plan.hash for plan in others)}) == 7
    assert planned(on("ring"), 4).hash == base.hash


def test_memory_of_a_ring_does_not_depend_on_the_documents():
    plans = [
        planned(on("zigzag_ring"), 4, PackedLayout.from_lengths(lengths)) for lengths in ([96], [50, 46], [1] * 96)
    ]
    assert plans[0].peak_buffer_bytes(1) >= plans[1].peak_buffer_bytes(1) >= plans[2].peak_buffer_bytes(1)
    two_wires = 2 * 24 * plans[0].shape.Hkv * 16 * 8
    forward = dataclasses.replace(plans[0], backward=plans[0].forward)
    assert forward.peak_buffer_bytes(1) == two_wires  # double-buffered, whatever the number of ranks
    assert dataclasses.replace(planned(on("zigzag_ring"), 8, PackedLayout.from_lengths([96])), backward=()).size == 8


def test_loopback_refuses_what_does_not_fit():
    plan = planned(on("ring"), 4)
    q, k, v, dout = rig.tensors(plan.shape, MIXED.total_tokens)
    with pytest.raises(ValueError, match="the plan is for"):
        run_loopback(plan, q[:-1], k, v)
    with pytest.raises(ValueError, match="fp64"):
        run_loopback(plan, q.float(), k.float(), v.float())
    with pytest.raises(ValueError, match="plan all of them"):
        run_loopback(dataclasses.replace(plan, forward=(None, *plan.forward[1:])), q, k, v, dout)


def test_strict_transport_refuses():
    net = Loopback(2, "strict")
    end = net.transport(0)
    wire = torch.zeros(8, dtype=torch.uint8)
    for comm, parcel, match in (
        ("later", Parcel(1, wire, [("kv", 8)]), "not there at the start"),
        ("cp", Parcel(0, wire, [("kv", 8)]), "to itself"),
        ("cp", Parcel(1, wire[:0], [("kv", 0)]), "empty"),
        ("cp", Parcel(1, wire[::2], [("kv", 4)]), "non-contiguous"),
    ):
        with pytest.raises(ValueError, match=match):
            end.post(comm, [parcel], [])
    other = net.transport(1)
    mine = end.post("cp", [Parcel(1, wire, [("kv", 8)])], [])
    assert not end.ready(mine)  # nobody receives it yet
    theirs = other.post("cp", [], [Parcel(0, torch.zeros(4, dtype=torch.uint8), [("kv", 4)])])
    assert end.ready(mine) and other.ready(theirs)
    with pytest.raises(ValueError, match="expects"):
        other.finish(theirs)


def test_late_transport_shows_a_buffer_that_changes_too_early():
    net = Loopback(2, "late")
    sent, got = torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    a = net.transport(0).post("cp", [Parcel(1, sent, [("kv", 4)])], [])
    b = net.transport(1).post("cp", [], [Parcel(0, got, [("kv", 4)])])
    assert got.tolist() == [255] * 4
    sent.fill_(7)
    net.transport(1).finish(b)
    assert got.tolist() == [7] * 4
    net.transport(0).finish(a)
    net.check_empty()


def test_large_logits_do_not_overflow():
    """Partial results whose lse differ by hundreds merge exactly (an exponential of the difference would overflow)."""
    plan = planned(on("ring"), 4, dtype="fp32")
    inputs = rig.tensors(plan.shape, MIXED.total_tokens, dtype=torch.float32)
    inputs[0] = inputs[0] * 300
    result = run_loopback(plan, *inputs)
    wanted = rig.dense(MIXED, CAUSAL, inputs, None, None)
    assert all(torch.isfinite(getattr(result, what)).all() for what in ("out", "dq", "dk", "dv"))
    assert math.isclose(float((result.out - wanted["out"]).abs().max()), 0, abs_tol=2e-3)


def test_softmax_scale_reaches_every_round():
    for name in ("ring", "ulysses", "distflash", "llama3"):
        plan = planned(on(name), 4)
        q, k, v, dout = rig.tensors(plan.shape, MIXED.total_tokens)
        result = run_loopback(plan, q, k, v, dout, softmax_scale=0.1)
        scaled = rig.dense(MIXED, CAUSAL, [q * 0.1 * math.sqrt(8), k, v, dout], None, None)
        rig.compare(result, {"out": scaled["out"], "dk": scaled["dk"], "dv": scaled["dv"]})


def test_every_batch_is_waited_for():
    for name in preset_names():
        plan = planned(on(name), 4)
        for direction in ("forward", "backward"):
            for program in plan.programs(direction):
                posts = [(s.batch, s.comm) for s in program.steps if isinstance(s, Post)]
                waits = [(s.batch, s.comm) for s in program.steps if isinstance(s, Wait)]
                assert sorted(posts) == sorted(waits)


@pytest.mark.parametrize("name", [name for name in preset_names() if name != "local"])
def test_a_group_of_one_communicates_nothing(name: str):
    plan = planned(on(name), 1)
    assert plan.rounds == {"forward": 0, "backward": 0} and sum(x.sum() for x in plan.bytes.values()) == 0
    inputs = rig.tensors(plan.shape, MIXED.total_tokens)
    rig.compare(run_loopback(plan, *inputs), rig.dense(MIXED, CAUSAL, inputs, None, None))


def test_schedules_of_other_heads_do_not_meet():
    """Nothing is kept outside a plan: twelve heads after three are twelve heads."""
    plans = [planned(on("ulysses"), 4, H=heads, Hkv=heads) for heads in (12, 4, 12)]
    assert [program.buffers["acc"].heads for program in plans[2].forward] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert plans[0].to_json() == plans[2].to_json() != plans[1].to_json()


def test_no_tokens_at_all():
    empty = PackedLayout.from_lengths([], rows=[0], row_length=0)
    for name in preset_names():
        plan = planned(on(name), 4, empty)
        verify(plan)
        result = run_loopback(plan, *rig.tensors(plan.shape, 0))
        assert result.out.shape == (0, 4, 8) and result.dk is not None and result.dk.shape == (0, 2, 8)
        assert sum(x.sum() for x in plan.bytes.values()) == 0
