"""strategy=auto: the candidates that fit, the reasons of those that do not, the cheapest under the model."""

import pytest

from bench.auto import batches
from bench.packs import packs
from data.mixes import MIXES
from parallel.auto import candidate, candidates, resolve
from parallel.plan.cost import load_cluster
from parallel.plan.ir import AttentionShape
from parallel.plan.layout import PackedLayout
from parallel.plan.mesh import MeshSpec
from parallel.plan.predict import predict_plan
from parallel.plan.verify import verify
from parallel.plan.visibility import MaskSpec
from parallel.sharding.planner import Planner
from parallel.strategy import Strategy, load_strategy
from tests.ranks.pool import RankPool

SHAPE = AttentionShape(8, 4, 64, 64, "bf16")
LENGTHS = [1500, 300, 200, 48]


def auto(cluster: str = "cpu2", **axes: object) -> Strategy:
    return load_strategy("auto", planner=Planner(cluster=cluster), **axes)


def layout_of(lengths: list[int]) -> PackedLayout:
    return PackedLayout.from_lengths(lengths)


def mesh_of(cp: int) -> MeshSpec:
    return auto().mesh(cp, SHAPE.H, SHAPE.Hkv)


def test_the_cheapest_wins_and_the_runner_up_is_next():
    """Every candidate's price is that of its own plans, and the least is run."""
    found = resolve(auto(), mesh_of(4), layout_of(LENGTHS), SHAPE)
    assert set(found.seconds) == set(candidates())
    cluster = load_cluster("cpu2")
    for name, seconds in found.seconds.items():
        one = candidate(name, auto())
        mesh = one.mesh(4, SHAPE.H, SHAPE.Hkv)
        plan = one.plan(one.shard(layout_of(LENGTHS), mesh, SHAPE), SHAPE, MaskSpec())
        assert predict_plan(plan, cluster).total_s == pytest.approx(seconds, rel=1e-12)
    prices = list(found.seconds.values())
    assert prices == sorted(prices) and prices[0] < prices[-1]
    assert found.strategy.name == next(iter(found.seconds))
    assert found.runner_up == list(found.seconds)[1]
    for plan in found.plans.values():
        verify(plan)


def test_the_choice_follows_the_documents_and_the_cluster():
    """Four quarters need no exchange of keys; one document is another matter, and slow wires too."""
    choices = {
        (cluster, len(lengths)): resolve(auto(cluster), mesh_of(4), layout_of(lengths), SHAPE).strategy.name
        for cluster in ("cpu2", "h100_8")
        for lengths in ([512] * 4, [2048])
    }
    for cluster in ("cpu2", "h100_8"):
        assert choices[cluster, 4] != choices[cluster, 1]


def test_layers_are_priced_together():
    """Windows of all layers: one placement, a plan for each distinct window, the price of every layer."""
    layout, windows = layout_of(LENGTHS), (128, None, 128)
    both = resolve(auto(), mesh_of(4), layout, SHAPE, windows)
    assert list(both.plans) == [128, None]
    narrow, whole = (resolve(auto(), mesh_of(4), layout, SHAPE, (window,)).seconds for window in windows[:2])
    for name, seconds in both.seconds.items():
        assert seconds == pytest.approx(2 * narrow[name] + whole[name], rel=1e-12)


def test_masks_that_an_exchange_refuses_leave_the_others():
    """helper takes causal masks alone; without them auto chooses among the rest."""
    found = resolve(auto(), mesh_of(4), layout_of(LENGTHS), SHAPE, causal=False)
    assert "distflash" not in found.seconds and len(found.seconds) > 5


def test_memory_binds_the_choice():
    """A limit that half of the candidates keep leaves those, at their prices; one that none keeps is refused."""
    free = resolve(auto(), mesh_of(4), layout_of(LENGTHS), SHAPE)
    peaks = {}
    for name in free.seconds:
        one = candidate(name, auto())
        plan = one.plan(one.shard(layout_of(LENGTHS), one.mesh(4, SHAPE.H, SHAPE.Hkv), SHAPE), SHAPE, MaskSpec())
        peaks[name] = max(plan.peak_buffer_bytes(rank) for rank in plan.ranks)
    limit = sorted(peaks.values())[len(peaks) // 2]
    tight = resolve(auto(buffer_bytes=limit), mesh_of(4), layout_of(LENGTHS), SHAPE)
    assert tight.seconds == {name: s for name, s in free.seconds.items() if peaks[name] <= limit}
    assert 0 < len(tight.seconds) < len(free.seconds)
    assert tight.strategy.name == next(iter(tight.seconds))
    with pytest.raises(ValueError, match=r"no candidate fits 4 ranks.*ring: its buffers exceed .*buffer_bytes=0"):
        resolve(auto(buffer_bytes=0), mesh_of(4), layout_of(LENGTHS), SHAPE)


@pytest.mark.parametrize(
    ("axes", "word"),
    [
        ({"sharding": "zigzag"}, "sharding"),
        ({"inner_exchange": "all_to_all"}, "inner_exchange"),
        ({"head_slices": 2}, "head_slices"),
        ({"batch_groups": 2}, "batch_groups"),
        ({"buffer_bytes": -1}, "give 0 or more"),
    ],
)
def test_what_auto_sets_itself_is_refused(axes: dict, word: str):
    with pytest.raises(ValueError, match=word):
        auto(**axes)


def test_auto_plans_through_resolve_alone():
    strategy, mesh = auto(), mesh_of(2)
    with pytest.raises(ValueError, match=r"parallel\.auto\.resolve"):
        strategy.plan(load_strategy("ring").shard(layout_of(LENGTHS), mesh), SHAPE, MaskSpec())


def choose(lengths: list[list[int]]) -> list[tuple[str, str]]:
    """A rank's job: what it would run on each batch, and the plans' hash."""
    found = [resolve(auto(), mesh_of(2), layout_of(some), SHAPE) for some in lengths]
    return [(one.strategy.name, one.plans[None].hash) for one in found]


def test_all_ranks_choose_alike(ranks: RankPool):
    """Processes of their own, without a word to each other."""
    some = [next(iter(packs(mix, 1_024, 1))) for mix in ("web", "code")]
    first, second = ranks.run(choose, some, world=2)
    assert first == second == choose(some)


def test_batches_of_the_bench_differ_and_are_full():
    found = list(batches(30, 4096))
    assert len(found) == 30 and len({tuple(lengths) for _, lengths in found}) == 30
    assert {mix for mix, _ in found} == set(MIXES)
    assert all(sum(lengths) == 4096 and min(lengths) > 0 for _, lengths in found)
