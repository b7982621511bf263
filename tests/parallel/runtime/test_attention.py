"""ContextParallel on real gloo ranks: attention and its gradients are dense attention's, bytes are the plan's."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kernels.mask_spec import MaskSpec
from parallel.api import ContextParallel
from parallel.auto import resolve
from parallel.plan.ir import AttentionShape
from parallel.plan.layout import PackedLayout
from parallel.runtime.groups import Groups
from parallel.strategy import Strategy, load_strategy, preset_names
from tests.masks import allowed, dense_attention
from tests.ranks.pool import RankPool

LENGTHS, ROWS, ROW = [21, 1, 1, 9, 2, 30], [5, 1], 37
CONTEXT = [name for name in preset_names() if load_strategy(name).exchange != "none"]


def inputs(shape: AttentionShape, total: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    sizes = [(shape.H, shape.D), (shape.Hkv, shape.D), (shape.Hkv, shape.Dv), (shape.H, shape.Dv)]
    return [torch.randn(total, *size, generator=draw) for size in sizes]


def layout(lengths: list[int] = LENGTHS) -> PackedLayout:
    return PackedLayout.from_lengths(lengths, ROWS, ROW) if lengths == LENGTHS else PackedLayout.from_lengths(lengths)


def attend(strategy: Strategy, shape: AttentionShape, masks: tuple[MaskSpec, ...]) -> list[dict[str, Tensor]]:
    """A rank's job: two batches, each through layers of every mask; out and gradients put together again."""
    world = dist.get_world_size()
    mesh = strategy.mesh(world, shape.H, shape.Hkv)
    cp = ContextParallel(strategy, mesh, Groups(mesh, dist.get_rank()), dist.get_rank())
    results = []
    for batch in (layout(), layout([64])):
        q, k, v, dout = inputs(shape, batch.total_tokens)
        sink = torch.linspace(-1, 1, shape.H, requires_grad=True)
        cp.prepare(batch, shape, masks)
        cp.bind(batch, shape, masks)
        q, k, v = (cp.shard(x).requires_grad_() for x in (q, k, v))
        outs = [cp.attention(q, k, v, mask=mask, sink=sink) for mask in masks]
        sum(outs).backward(cp.shard(dout))
        assert sink.grad is not None
        dsink = sink.grad.clone()
        dist.all_reduce(dsink)
        found = {"dq": q.grad, "dk": k.grad, "dv": v.grad, "out": sum(outs)}
        results.append({name: cp.unshard(x) for name, x in found.items()} | {"dsink": dsink})
        planned = {}
        for plan in resolve(strategy, mesh, batch, shape, masks, ranks=[cp.rank]).plans.values():
            for traffic, table in plan.bytes.items():
                for peer, size in enumerate(table[cp.rank].tolist()):
                    key = f"{traffic}/{mesh.link(cp.rank, peer)}"
                    planned[key] = planned.get(key, 0) + size
        sent = cp.take_bytes()
        assert all(sent[key] == size for key, size in planned.items()) and sum(sent.values()) == sum(planned.values())
    return results


def expect(shape: AttentionShape, masks: tuple[MaskSpec, ...]) -> list[dict[str, Tensor]]:
    results = []
    for batch in (layout(), layout([64])):
        data = inputs(shape, batch.total_tokens)
        sink = torch.linspace(-1, 1, shape.H)
        each = [dense_attention(data, allowed(mask, batch), sink) for mask in masks]
        results.append({name: sum(found[name] for found in each) for name in ("out", "dq", "dk", "dv", "dsink")})
    return results


def check(pool: RankPool, strategy: Strategy, shape: AttentionShape, world: int) -> None:
    masks = (MaskSpec(), MaskSpec(window=7), MaskSpec(window=5, prefix=9, first=2), MaskSpec(chunk=8, first=3))
    wanted = expect(shape, masks)
    for rank in pool.run(attend, strategy, shape, masks, world=world):
        for found, right in zip(rank, wanted, strict=True):
            for name, x in right.items():
                assert torch.allclose(found[name].double(), x, rtol=1e-4, atol=2e-5), name


@pytest.mark.parametrize("name", CONTEXT)
def test_four_ranks(ranks: RankPool, name: str):
    check(ranks, load_strategy(name, dp=1), AttentionShape(4, 2, 8, 8), 4)


@pytest.mark.parametrize(
    ("name", "axes", "heads"),
    [
        ("ulysses", {}, (14, 2)),
        ("hsap", {"cp_inner": 2, "cp_outer": 2}, (4, 4)),
        ("llama3", {"exchange": "compact_all_gather"}, (4, 2)),
        ("zigzag_ring", {"batch_groups": "auto"}, (4, 2)),
    ],
)
def test_four_ranks_with_other_axes(ranks: RankPool, name: str, axes: dict, heads: tuple[int, int]):
    check(ranks, load_strategy(name, dp=1, **axes), AttentionShape(*heads, 8, 8), 4)


def differ() -> str:
    """A rank's job: rank 1 binds another batch than the others."""
    mesh = load_strategy("ring").mesh(dist.get_world_size(), 4, 2)
    cp = ContextParallel(load_strategy("ring"), mesh, Groups(mesh, dist.get_rank()), dist.get_rank())
    shape = AttentionShape(4, 2, 8, 8)
    with pytest.raises(ValueError, match=r"\[1\] differ from rank 0"):
        cp.bind(layout([60, 4] if dist.get_rank() == 1 else [64]), shape)
    with pytest.raises(ValueError, match=r"no plan was made for the mask \(causal, window 3\).*made: none"):
        cp.attention(*inputs(shape, 16)[:3], mask=MaskSpec(window=3))
    cp.bind(layout([64]), shape)
    with pytest.raises(ValueError, match="shard whole batches"):
        cp.shard(torch.zeros(16))
    with pytest.raises(ValueError, match="the plan is for"):
        cp.attention(*inputs(shape, 64)[:3])
    return "refused"


def test_ranks_that_bind_different_batches_are_told_so(ranks: RankPool):
    assert ranks.run(differ, world=3) == ["refused"] * 3


@pytest.fixture(scope="module")
def eight():
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.mark.deep
@pytest.mark.parametrize(("inner", "outer"), [(1, 8), (2, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("name", ["usp", "double_ring", "hsap"])
def test_eight_ranks_on_two_levels(eight: RankPool, name: str, inner: int, outer: int):
    check(eight, load_strategy(name, dp=1, cp_inner=inner, cp_outer=outer), AttentionShape(8, 4, 8, 8), 8)


@pytest.mark.deep
@pytest.mark.parametrize("name", CONTEXT)
def test_eight_ranks(eight: RankPool, name: str):
    check(eight, load_strategy(name, dp=1), AttentionShape(40, 8, 8, 8), 8)
