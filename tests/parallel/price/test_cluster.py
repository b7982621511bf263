"""Predicted times: closed forms and a plan's steps, on clusters with round numbers."""

import dataclasses

import pytest

from kernels.mask_spec import MaskSpec
from parallel.plan.ir import AttentionShape, Post
from parallel.plan.layout import PackedLayout
from parallel.plan.mesh import MeshSpec
from parallel.plan.tokens import TokenSet
from parallel.price.cluster import Cluster, key_bytes, load_cluster, predict_needs
from parallel.price.needs import Needs
from parallel.price.predict import predict_plan
from parallel.strategy import load_strategy

SHAPE = AttentionShape(4, 2, 8, 8, "bf16")
# 1 flop and 1 byte a second; latencies, launches, copies and short rows at next to nothing
PLAIN = Cluster("plain", 8, 8, 1.0, 1.0, 1e-12, 1e-12, 1e30, 1.0, 1e-12, 1.0, 1e-12)


def predicted(name: str, lengths: list[int], cluster: Cluster, ranks: int = 4, node: int = 8):
    strategy = load_strategy(name, node_size=node)
    placement = strategy.shard(PackedLayout.from_lengths(lengths), strategy.mesh(ranks, SHAPE.H, SHAPE.Hkv))
    return predict_plan(strategy.plan(placement, SHAPE, MaskSpec()), cluster)


@pytest.mark.parametrize("name", ["h100_8", "h100_64", "cpu2"])
def test_clusters_load(name: str):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.ranks >= cluster.node_size > 0


def test_unknown_cluster_is_refused():
    with pytest.raises(ValueError, match="choose one of cpu2, h100_64, h100_8"):
        load_cluster("b9000")


def test_bytes_of_a_key():
    """K and V of two heads of 8 in bf16; backward again, with gradients in fp32."""
    assert key_bytes(SHAPE) == (2 * 2 * 8 * 2, 2 * 2 * 8 * 2 + 2 * 2 * 8 * 4)


def test_time_of_one_rank_is_its_flops():
    layout = PackedLayout.from_lengths([10])
    needs = Needs.of(layout, [TokenSet.of((0, 10))])
    time = predict_needs(needs, MeshSpec(), SHAPE, PLAIN)
    assert time.total_s == pytest.approx(55 * 4 * 8 * 14)  # pairs x heads x width x (4 + 10) flops
    assert time.exposed_s == 0
    assert predicted("local", [10], PLAIN, ranks=1).total_s == pytest.approx(55 * 4 * 8 * 14)


def test_whole_documents_wait_for_nobody():
    for time in (predicted("hsap", [8, 8], PLAIN, 2), predicted("flashcp_hsap", [8, 8, 8, 8], PLAIN)):
        assert time.attn_s > 0


def test_slow_wires_are_exposed_and_fast_ones_hidden():
    slow = dataclasses.replace(PLAIN, intra_bytes_s=1e-3)
    for name in ("ring", "llama3", "flashcp_hsap", "flashcp"):
        some, more = predicted(name, [64], PLAIN), predicted(name, [64], slow)
        assert more.attn_s > 0
        assert more.exposed_s > 10 * max(some.exposed_s, 1)
        assert more.total_s == pytest.approx(more.attn_s + more.copy_s + more.exposed_s)


def test_links_between_nodes_count():
    slow = dataclasses.replace(PLAIN, inter_bytes_s=1e-3)
    assert predicted("ring", [64], slow, node=2).total_s > 10 * predicted("ring", [64], slow, node=4).total_s


def test_short_rows_cost():
    """Documents cut small lose time to kernels of few rows."""
    cluster = dataclasses.replace(PLAIN, short_rows=16.0)
    assert (
        predicted("per_document", [16] * 8, cluster).attn_s > 1.5 * predicted("flashcp_hsap", [16] * 8, cluster).attn_s
    )


def test_partial_plans_are_refused():
    strategy = load_strategy("ring")
    placement = strategy.shard(PackedLayout.from_lengths([16]), strategy.mesh(4, 4, 2))
    with pytest.raises(ValueError, match="holds 1 of 4 ranks"):
        predict_plan(strategy.plan(placement, SHAPE, MaskSpec(), ranks=[0]), PLAIN)


def test_ranks_that_wait_forever_are_refused():
    strategy = load_strategy("ring")
    placement = strategy.shard(PackedLayout.from_lengths([16]), strategy.mesh(2, 4, 2))
    plan = strategy.plan(placement, SHAPE, MaskSpec())
    steps = plan.programs("forward")[0].steps
    steps[:] = [step for step in steps if not isinstance(step, Post)][:0]
    with pytest.raises(ValueError, match="wait forever"):
        predict_plan(plan, PLAIN)
