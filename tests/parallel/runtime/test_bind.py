"""A plan on one rank: rows of buffers, wires, masks."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.mask_spec import MaskSpec
from parallel.plan.ir import AttentionShape, Buffer, Message
from parallel.plan.layout import PackedLayout
from parallel.plan.tokens import TokenSet
from parallel.runtime.bind import BoundPlan, WireField, token_index
from parallel.strategy import load_strategy
from tests.masks import allowed

LAYOUT = PackedLayout.from_lengths([7, 9], row_length=20)


def bound(dtype: str = "bf16", mask: MaskSpec | None = None, ranks: list[int] | None = None) -> BoundPlan:
    strategy = load_strategy("zigzag_ring", dp=1)
    placement = strategy.shard(LAYOUT, strategy.mesh(2, 4, 2))
    return BoundPlan(strategy.plan(placement, AttentionShape(4, 2, 8, 16, dtype), mask or MaskSpec(), ranks), 1)


@given(st.permutations(range(6)), st.sets(st.integers(0, 5), min_size=1))
def test_rows_are_where_the_tokens_lie(order: list[int], wanted: set[int]):
    held = TokenSet.of(*((2 * i, 2 * i + 1) for i in order))
    tokens = TokenSet.of(*((2 * i, 2 * i + 1) for i in sorted(wanted)))
    right = [order.index(i) for i in sorted(wanted)]
    rows = bound().rows(held, tokens)
    straight = all(b - a == 1 for a, b in itertools.pairwise(right))
    assert isinstance(rows, slice) == straight
    assert np.arange(6)[rows].tolist() == right
    if straight:
        assert bound().run(held, tokens) == slice(right[0], right[-1] + 1)
    else:
        with pytest.raises(ValueError, match=r"does not lie in one piece in a buffer of .*; attend it block by block"):
            bound().run(held, tokens)


def test_rows_of_all_and_of_nothing():
    one, held = bound(), TokenSet.of((4, 6), (0, 2))
    assert one.rows(held, held) == slice(0, 4)
    assert len(np.arange(4)[one.rows(held, TokenSet.of())]) == 0
    assert one.rows(held, TokenSet.of((0, 2))) is one.rows(held, TokenSet.of((0, 2)))
    assert one.rows(TokenSet.of((0, 2)), TokenSet.of((0, 2))) == slice(0, 2)


def test_a_wire_is_its_fields_one_after_the_other():
    one, tokens = bound(), TokenSet.of((3, 8))
    assert one.parts(Message(0, "kv", "x", tokens, (0, 2))) == [
        WireField("k", "kv", torch.bfloat16, (5, 2, 8), 0, 160),
        WireField("v", "kv", torch.bfloat16, (5, 2, 16), 160, 480),
    ]
    assert one.parts(Message(0, "partial", "x", tokens, (1, 4), True)) == [
        WireField("out", "out", torch.float32, (5, 3, 16), 0, 960),
        WireField("lse", "lse", torch.float32, (3, 5), 960, 1020),
    ]
    assert one.parts(Buffer("stats", tokens, (0, 4), True)) == [
        WireField("lse", "lse", torch.float32, (4, 5), 0, 80),
        WireField("delta", "lse", torch.float32, (4, 5), 80, 160),
    ]
    assert [p.dtype for p in one.parts(Buffer("grad_kv", tokens, (0, 2)))] == [torch.bfloat16] * 2
    # q is never exact, whatever is said
    assert one.parts(Buffer("q", tokens, (0, 4), True)) == [WireField("q", "q", torch.bfloat16, (5, 4, 8), 0, 320)]


@pytest.mark.parametrize(
    ("dtype", "model", "exact"),
    [("fp64", torch.float64, torch.float64), ("fp32", torch.float32, torch.float32),
     ("bf16", torch.bfloat16, torch.float32), ("fp16", torch.float16, torch.float32)],
)  # fmt: skip
def test_dtypes(dtype: str, model: torch.dtype, exact: torch.dtype):
    assert (bound(dtype).dtype(False), bound(dtype).dtype(True)) == (model, exact)


SPECS = [MaskSpec(), MaskSpec(False), MaskSpec(True, 3), MaskSpec(False, 2), MaskSpec(True, 2, prefix=4, first=1)]


@pytest.mark.parametrize("spec", [*SPECS, MaskSpec(chunk=3, first=2)], ids=str)
def test_masks_are_who_sees_whom(spec: MaskSpec):
    q_tokens, k_tokens = TokenSet.of((3, 6), (8, 19, 3)), TokenSet.of((1, 20, 2))
    one = bound(mask=spec)
    masks, at = one.masks(q_tokens, k_tokens), np.arange(k_tokens.count)[None]
    seen = sum(((m.k_start.numpy()[:, None] <= at) & (at < m.k_end.numpy()[:, None])).astype(int) for m in masks)
    assert (seen == allowed(spec, LAYOUT)[q_tokens.expand()[:, None], k_tokens.expand()[None]]).all()
    assert one.masks(q_tokens, k_tokens) is masks is not one.masks(k_tokens, q_tokens)


def test_bands_that_show_a_block_nothing_are_left_out():
    one = bound(mask=MaskSpec(window=2, first=1))
    first, later = TokenSet.of((0, 2)), TokenSet.of((4, 6))
    assert [m.pairs() for m in one.masks(first, first)] == [3] and [m.pairs() for m in one.masks(later, first)] == [2]
    assert [m.pairs() for m in one.masks(first, later)] == [0]


def test_another_ranks_row_is_refused():
    with pytest.raises(ValueError, match=r"the plan holds steps for ranks \[0\], not for rank 1"):
        bound(ranks=[0])
    assert bound(ranks=[1]).rank == 1


def test_token_index():
    assert token_index(TokenSet.of((4, 6), (0, 5, 2))).tolist() == [4, 5, 0, 2, 4]
