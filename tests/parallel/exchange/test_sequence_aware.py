"""Sequence-aware rounds, the compact gather and batch groups: what travels, in how many rounds, to whom."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.mask_spec import MaskSpec
from parallel.exchange.colouring import colour_edges, degree
from parallel.plan.ir import AttentionShape, Post
from parallel.plan.layout import PackedLayout
from parallel.plan.plan import Plan
from parallel.plan.visibility import Visibility
from parallel.proof.verify import verify
from parallel.runtime.buffers import BufferPool
from parallel.runtime.loopback import run_loopback
from parallel.sharding import SHARDINGS
from parallel.strategy import Strategy, load_strategy
from tests.parallel import cases as rig


def plan_on(strategy: Strategy, cp: int, layout: PackedLayout, H: int = 4, Hkv: int = 2, dtype: str = "fp64") -> Plan:
    mesh = strategy.mesh(cp, H, Hkv)
    return strategy.plan(strategy.shard(layout, mesh), AttentionShape(H, Hkv, 8, 8, dtype), MaskSpec())


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=60))
def test_edge_colouring(pairs: list[tuple[int, int]]):
    colours = colour_edges(pairs)
    assert len(set(colours)) <= degree(pairs) and all(0 <= c < degree(pairs) for c in colours)
    assert len({(s, c) for (s, _), c in zip(pairs, colours)}) == len(pairs)
    assert len({(r, c) for (_, r), c in zip(pairs, colours)}) == len(pairs)


def _messages(plan: Plan, direction: str) -> list[tuple[int, int, int, str]]:
    """(batch, sender, receiver, kind) of every message."""
    return [
        (step.batch, program.rank, message.peer, message.kind)
        for program in plan.programs(direction)
        for step in program.steps
        if isinstance(step, Post)
        for message in step.sends
    ]


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("lengths", [[96], [60, 36], [7, 50, 3, 20, 16], [1] * 90, [2, 94]])
@pytest.mark.parametrize("heads", [(2, 2), (16, 1)])
def test_rounds(sharding: str, lengths: list[int], heads: tuple[int, int]):
    """One message a pair, one sent and one received a round, no more rounds than the degrees."""
    strategy = load_strategy("hsap", dp=1, sharding=sharding, cp_inner=1)
    plan = plan_on(strategy, 6, PackedLayout.from_lengths(lengths), *heads)
    for direction in ("forward", "backward"):
        messages = _messages(plan, direction)
        fetched = {(b, s, r) for b, s, r, kind in messages if kind in ("kv", "q")}
        returned = {(b, s, r) for b, s, r, kind in messages if kind in ("partial", "grad_kv", "grad_q")}
        both = fetched | returned
        assert len({(b, s) for b, s, _ in both}) == len({(b, r) for b, _, r in both}) == len(both)
        rounds = len({b for b, _, _ in both})
        assert rounds <= degree([(s, r) for _, s, r in fetched]) + degree([(s, r) for _, s, r in returned])
        if direction == "backward":
            assert len(returned) == len(fetched)


def test_queries_move_where_that_is_cheaper():
    """Four queries against 28 keys of a cut document: queries move with a key head each, keys with one for sixteen."""
    layout, strategy = PackedLayout.from_lengths([20, 32, 44]), load_strategy("hsap", dp=1, cp_inner=1)
    for heads, kinds in (((4, 4), {"q", "partial"}), ((16, 1), {"kv"})):
        plan = plan_on(strategy, 2, layout, *heads)
        verify(plan)
        assert {kind for _, _, _, kind in _messages(plan, "forward")} == kinds
    # where the other rank has no room for the work, they stay
    busy = plan_on(strategy, 2, PackedLayout.from_lengths([52, 44]), 4, 4)
    assert {kind for _, _, _, kind in _messages(busy, "forward")} == {"kv"}


def test_no_byte_between_ranks_that_share_no_document():
    layout = PackedLayout.from_lengths([24, 8, 16, 30, 2, 16])
    plan = plan_on(load_strategy("hsap", dp=1, cp_inner=1), 4, layout)
    sight, sets = Visibility(layout, MaskSpec()), plan.placement.sets
    for a in range(4):
        for b in range(4):
            meets = sight.any(sets[a], sets[b]) or sight.any(sets[b], sets[a])
            assert meets or all(plan.bytes[traffic][a, b] == 0 for traffic in plan.bytes)
    whole = plan_on(load_strategy("hsap", dp=1, cp_inner=1), 4, PackedLayout.from_lengths([24] * 4))
    assert sum(x.sum() for x in whole.bytes.values()) == 0


def test_contiguous_shards_receive_the_cut_document_alone():
    """Rank e needs what its left border cuts off: e T / n - start of the document there."""
    layout = PackedLayout.from_lengths([30, 50, 7, 41])
    plan = plan_on(load_strategy("hsap", dp=1, cp_inner=1), 4, layout, 16, 1)
    border = [0, 32, 64, 96]
    start = [max((s for s in layout.starts.tolist() if s <= b), default=0) for b in border]
    received = plan.bytes_of("forward")["kv"].sum(0) // (1 * 16 * 8)
    assert received.tolist() == [b - s for b, s in zip(border, start)]


@pytest.mark.parametrize(("inner", "outer"), [(2, 2), (2, 4), (4, 2), (1, 4)])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_hsap_on_two_levels(inner: int, outer: int, sharding: str):
    strategy = load_strategy("hsap", dp=1, cp_inner=inner, cp_outer=outer, sharding=sharding)
    layout = PackedLayout.from_lengths([21, 1, 1, 9, 2, 14], rows=[4, 2], row_length=33)
    plan = plan_on(strategy, inner * outer, layout, 8, 4)
    verify(plan)
    inputs = rig.tensors(plan.shape, layout.total_tokens)
    result = run_loopback(plan, *inputs, rules="late", poison=True, backend="reference")
    rig.compare(result, rig.dense(layout, MaskSpec(), inputs, None, None))
    rig.check_bytes(plan, result)


def test_hsap_beyond_the_key_heads_repeats_nothing_across():
    """Sixteen ranks, two key heads: four ranks inside repeat heads, and what travels across is each head once."""
    layout = PackedLayout.from_lengths([100, 60])
    inside = plan_on(load_strategy("hsap", dp=1, cp_inner=2, cp_outer=8), 16, layout, 8, 2)
    verify(inside)
    inputs = rig.tensors(inside.shape, 160)
    rig.compare(run_loopback(inside, *inputs, backend="reference"), rig.dense(layout, MaskSpec(), inputs, None, None))
    units = plan_on(load_strategy("hsap", dp=1, cp_inner=1, cp_outer=8), 8, layout, 8, 2)

    def across(plan: Plan) -> int:
        return sum(
            message.tokens.count * (message.heads[1] - message.heads[0])
            for program in plan.programs("forward")
            for step in program.steps
            if isinstance(step, Post) and step.comm != "cp_inner"
            for message in step.sends
            if message.kind == "kv"
        )

    assert across(inside) == across(units)


def test_compact_gather_sends_what_somebody_needs():
    """Every rank gets the same: each shard but the last part of each document."""
    layout = PackedLayout.from_lengths([40, 24, 32])
    strategy = load_strategy("llama3", dp=1, sharding="contiguous", exchange="compact_all_gather")
    plan = plan_on(strategy, 4, layout)
    sent = plan.bytes_of("forward")["kv"].copy()
    np.fill_diagonal(sent, 0)
    each = 2 * 16 * 8
    assert (sent.sum(1) // each).tolist() == [3 * 24, 3 * 8, 3 * 8, 0]  # 0:24, 40:48 and 64:72
    whole = plan_on(strategy, 4, PackedLayout.from_lengths([24] * 4))
    assert sum(x.sum() for x in whole.bytes.values()) == 0


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["basp", "hsap", "zigzag_ring", "llama3", "usp"])
def test_batch_groups(rows: int, name: str):
    """B rows on eight ranks: B groups of neighbours, K - 1 peers at most, no byte between groups, tokens as ever."""
    axes = {} if name == "basp" else {"batch_groups": "auto"} | ({"cp_inner": 2} if name in ("hsap", "usp") else {})
    strategy = load_strategy(name, dp=1, **axes)
    lengths = [[20, 12], [32], [1, 1, 30], [31], [16, 16], [5], [32], [2, 3, 4]][:rows]
    layout = PackedLayout.from_lengths([n for row in lengths for n in row], [len(row) for row in lengths], 32)
    plan = plan_on(strategy, 8, layout, 8, 4)
    verify(plan)
    K = 8 // rows
    assert plan.placement.groups == rows
    assert [tokens.count for tokens in plan.placement.sets] == [rows * 32 // 8] * 8
    group = np.arange(8) // K
    for traffic, table in plan.bytes.items():
        assert (table[group[:, None] != group[None]] == 0).all(), traffic
        assert ((table > 0).sum(1) <= K).all()
    inputs = rig.tensors(plan.shape, layout.total_tokens)
    result = run_loopback(plan, *inputs, rules="late", poison=True, backend="reference")
    rig.compare(result, rig.dense(layout, MaskSpec(), inputs, None, None), 1e-12)
    rig.check_bytes(plan, result)
    if name == "basp":
        ulysses = plan_on(load_strategy("ulysses", dp=1), 8, layout, 8, 4)
        assert plan.placement.units[0].count * plan.placement.split == layout.total_tokens // rows * K
        sent, whole = plan.bytes["q"] * (1 - np.eye(8, dtype=int)), ulysses.bytes["q"] * (1 - np.eye(8, dtype=int))
        assert sent.sum() * 7 * K == whole.sum() * 8 * (K - 1)  # [(K - 1) / K] / [(N - 1) / N] of the bytes


def test_rows_that_do_not_divide():
    strategy = load_strategy("basp")
    assert [strategy.groups(rows, 8) for rows in (1, 2, 3, 4, 6, 8, 12, 16)] == [1, 2, 1, 4, 2, 8, 4, 8]
    with pytest.raises(ValueError, match="3 does not divide the micro-batch's 4 rows"):
        load_strategy("basp", batch_groups=3).groups(4, 6)
    for bad in (0, "many"):
        with pytest.raises(ValueError, match="batch_groups"):
            load_strategy("basp", batch_groups=bad)
    layout = PackedLayout.from_lengths([8, 8], rows=[1, 1])
    shape = AttentionShape(2, 2, 8, 8)
    with pytest.raises(ValueError, match="4 ranks of a group cannot share 2 query heads"):
        mesh = strategy.mesh(8, 2, 2)
        strategy.plan(strategy.shard(layout, mesh), shape, MaskSpec())


def test_a_batch_size_that_changes_from_step_to_step():
    """The last, smaller batch: other groups, the same ranks, nothing made anew; every plan right."""
    strategy = load_strategy("basp", dp=1)
    for rows in (4, 4, 2, 1, 3):
        layout = PackedLayout.from_lengths([24] * rows, [1] * rows)
        plan = plan_on(strategy, 4, layout)
        inputs = rig.tensors(plan.shape, layout.total_tokens, dtype=torch.float64)
        rig.compare(run_loopback(plan, *inputs), rig.dense(layout, MaskSpec(), inputs, None, None))


@pytest.mark.parametrize(
    ("heads", "key_heads", "sharding"),
    [(4, 2, "contiguous"), (4, 4, "per_document"),
     *(pytest.param(*case, marks=pytest.mark.deep) for case in (
         (4, 4, "contiguous"), (8, 1, "contiguous"), (4, 2, "per_document"), (8, 1, "per_document"),
     ))],
)  # fmt: skip
def test_memory_is_what_the_formula_says_whatever_the_documents(heads: int, key_heads: int, sharding: str):
    """A hundred random layouts leave the buffers as the first one made them."""
    strategy = load_strategy("hsap", dp=1, cp_inner=1, sharding=sharding)
    draw, pools = np.random.default_rng(0), [BufferPool() for _ in range(4)]
    for _ in range(100):
        cuts = np.sort(draw.choice(np.arange(1, 64), draw.integers(0, 12), replace=False))
        layout = PackedLayout.from_lengths(np.diff([0, *cuts, 64]))
        plan = plan_on(strategy, 4, layout, heads, key_heads, "fp32")
        run_loopback(plan, *rig.tensors(plan.shape, 64, dtype=torch.float32), backend="reference", pools=pools)
        wanted = BufferPool()
        wanted.reserve(plan.programs("forward")[0].slabs)
        assert {pool.total for pool in pools} == {wanted.total}


def test_memory_of_two_levels_settles():
    strategy = load_strategy("hsap", dp=1, cp_inner=2, cp_outer=2)
    draw, pools = np.random.default_rng(1), [BufferPool() for _ in range(4)]
    for number in range(100):
        cuts = np.sort(draw.choice(np.arange(1, 64), draw.integers(0, 12), replace=False))
        plan = plan_on(strategy, 4, PackedLayout.from_lengths(np.diff([0, *cuts, 64])), 4, 4, "fp32")
        run_loopback(plan, *rig.tensors(plan.shape, 64, dtype=torch.float32), backend="reference", pools=pools)
        first = [pool.total for pool in pools] if number == 0 else first
        assert [pool.total for pool in pools] == first
