"""strategy=auto: what it weighs, what it leaves out and why, and that the cheapest under the model is what runs."""

import dataclasses

import pytest
import torch.distributed as dist

from kernels.mask_spec import MaskSpec
from parallel.api import ContextParallel
from parallel.auto import Resolved, candidate, candidates, resolve
from parallel.plan.ir import AttentionShape
from parallel.plan.layout import PackedLayout
from parallel.price.cluster import load_cluster
from parallel.price.predict import predict_plan
from parallel.proof.verify import verify
from parallel.runtime.groups import Groups
from parallel.sharding.planner import Planner
from parallel.strategy import Strategy, load_strategy, preset_names
from tests.ranks.pool import RankPool

SHAPE = AttentionShape(8, 4, 16, 16, "bf16")
SHORT = [156] * 8 + [100] * 8  # a pair on each of eight ranks, out of order
MIXED = [900, 40, 300, 8, 8, 8, 500, 284]


def auto(**axes: object) -> Strategy:
    return load_strategy("auto", dp=1, **axes)


def choose(
    lengths: list[int],
    ranks: int = 8,
    shape: AttentionShape = SHAPE,
    masks: tuple[MaskSpec, ...] = (MaskSpec(),),
    **axes: object,
) -> Resolved:
    strategy = auto(**axes)
    mesh = strategy.mesh(ranks, shape.H, shape.Hkv)
    return resolve(strategy, mesh, PackedLayout.from_lengths(lengths), shape, masks)


def test_candidates_are_the_presets_that_split_a_sequence():
    assert set(preset_names()) - set(candidates()) == {"auto", "local"}


def test_every_candidate_that_fits_is_priced_and_the_cheapest_runs():
    """Prices are those of plans made here one by one, each mask's as often as layers have it."""
    masks = (MaskSpec(), MaskSpec(window=64), MaskSpec(window=64))
    found = choose(MIXED, masks=masks)
    layout, cluster, expected = PackedLayout.from_lengths(MIXED), load_cluster("h100_8"), {}
    for name in candidates():
        strategy = load_strategy(name, dp=1)
        placement = strategy.shard(layout, strategy.mesh(8, SHAPE.H, SHAPE.Hkv), SHAPE)
        plans = [strategy.plan(placement, SHAPE, mask) for mask in masks]
        expected[name] = sum(predict_plan(plan, cluster).total_s for plan in plans)
    assert found.seconds == pytest.approx(expected)
    assert list(found.seconds) == sorted(found.seconds, key=lambda name: (found.seconds[name], name))
    assert found.strategy.name == min(expected, key=lambda name: (expected[name], name))
    assert found.runner_up == sorted(expected, key=lambda name: (expected[name], name))[1]
    assert set(found.plans) == set(masks)
    for plan in found.plans.values():
        verify(plan)
        assert list(plan.ranks) == list(range(8))


def test_documents_that_fit_ranks_travel_nowhere():
    found = choose(SHORT)
    assert sum(table.sum() - table.trace() for table in found.plans[MaskSpec()].bytes.values()) == 0
    assert found.seconds[found.strategy.name] < found.seconds["ring"]


def test_choice_follows_the_batch_and_the_constants():
    """One long document wants another schedule than many short ones; and a slower wire another than a fast one."""
    shape = AttentionShape(32, 8, 128, 128, "bf16")
    by_batch = {choose(lengths, shape=shape).strategy.name for lengths in ([65_536], [512] * 128)}
    assert len(by_batch) == 2
    prices = [choose(MIXED, planner=Planner(cluster=name)).seconds for name in ("h100_8", "cpu2")]
    assert prices[0]["ring"] != prices[1]["ring"]


def test_candidates_that_do_not_fit_are_left_out():
    few_heads = choose(MIXED, shape=AttentionShape(2, 1, 16, 16, "bf16"))
    assert "ulysses" not in few_heads.seconds and "ring" in few_heads.seconds
    both_ways = choose(MIXED, masks=(MaskSpec(causal=False),))
    assert "distflash" not in both_ways.seconds and "zigzag_ring" in both_ways.seconds
    verify(both_ways.plans[MaskSpec(causal=False)])


def test_buffers_are_kept_under_the_limit():
    """With the limit one byte under what the free choice takes, another one runs; with none at all, none can."""
    free = choose([2048])
    peak = max(free.plans[MaskSpec()].peak_buffer_bytes(rank) for rank in range(8))
    tight = choose([2048], buffer_bytes=peak - 1)
    assert free.strategy.name not in tight.seconds
    assert max(tight.plans[MaskSpec()].peak_buffer_bytes(rank) for rank in range(8)) < peak
    assert tight.seconds.items() < free.seconds.items()
    with pytest.raises(ValueError, match=r"no candidate fits 8 ranks.*ring: its buffers take \d+ bytes.*buffer_bytes"):
        choose([2048], buffer_bytes=0)


def test_what_auto_decides_cannot_be_set():
    for axes, word in (
        ({"sharding": "zigzag"}, "sharding=zigzag"),
        ({"inner_exchange": "ring"}, "inner_exchange=ring"),
        ({"cp_inner": 2}, "cp_inner=2"),
        ({"batch_groups": "auto"}, "batch_groups=auto"),
        ({"buffer_bytes": -1}, "buffer_bytes=-1"),
    ):
        with pytest.raises(ValueError, match=f"strategy.{word}"):
            auto(**axes)
    with pytest.raises(ValueError, match="buffer_bytes=5 belongs to exchange=auto"):
        load_strategy("ring", buffer_bytes=5)
    with pytest.raises(ValueError, match="chooses a strategy for the batch"):
        strategy = auto()
        placement = strategy.shard(PackedLayout.from_lengths(SHORT), strategy.mesh(8, 8, 4))
        strategy.plan(placement, SHAPE, MaskSpec())


def test_what_holds_for_all_candidates_reaches_them():
    planner = Planner("deep", "bytes", 1.05, "h100_64")
    strategy = auto(planner=planner, weights="fully_sharded", node_size=4)
    for name in candidates():
        one = candidate(name, strategy)
        assert (one.weights, one.node_size) == ("fully_sharded", 4)
        assert one.planner == (planner if one.sharding == "whole_document" else Planner())


def test_replicas_stay():
    strategy = load_strategy("auto", dp=2)
    found = resolve(strategy, strategy.mesh(8, SHAPE.H, SHAPE.Hkv), PackedLayout.from_lengths(MIXED), SHAPE)
    assert (found.mesh.dp, found.mesh.cp) == (2, 4)


@pytest.mark.parametrize("lengths", [[], [1], [5, 1, 1]], ids=str)
def test_few_tokens_on_many_ranks(lengths: list[int]):
    verify(choose(lengths).plans[MaskSpec()])


def decide(batches: list[list[int]]) -> list[tuple[str, list[tuple[str, float]], str]]:
    """A rank's job: (choice, prices in order, the plan's hash) of every batch, as bound."""
    strategy, shape = auto(planner=Planner(cluster="cpu2")), dataclasses.replace(SHAPE, dtype="fp32")
    mesh = strategy.mesh(dist.get_world_size(), shape.H, shape.Hkv)
    cp = ContextParallel(strategy, mesh, Groups(mesh, dist.get_rank()), dist.get_rank())
    found = []
    for lengths in batches:
        cp.bind(PackedLayout.from_lengths(lengths), shape, (MaskSpec(), MaskSpec(window=32)))
        assert cp.resolved is not None
        plans = cp.resolved.plans.values()
        found.append((cp.resolved.strategy.name, list(cp.resolved.seconds.items()), "".join(p.hash for p in plans)))
    return found


def test_all_ranks_choose_alike(ranks: RankPool):
    answers = ranks.run(decide, [MIXED, SHORT, [2048], [1] * 50], world=4)
    assert all(answer == answers[0] for answer in answers)
    assert len({chosen for chosen, _, _ in answers[0]}) > 1
