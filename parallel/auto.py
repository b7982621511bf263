"""strategy=auto: for each batch, plan every preset that fits, price the plans on a named cluster, take the cheapest.

Prices are those of `parallel.price.predict`, of a layer's attention forward and backward, summed over the layers. The
choice is a function of the batch and the constants alone, so every rank comes to the same one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernels.mask_spec import CAUSAL, MaskSpec
from parallel.plan.ir import AttentionShape
from parallel.plan.layout import PackedLayout
from parallel.plan.mesh import MeshSpec
from parallel.plan.plan import Plan
from parallel.price.cluster import load_cluster
from parallel.price.predict import predict_plan
from parallel.strategy import Strategy, load_strategy, preset_names


@dataclass(frozen=True)
class Resolved:
    """What a batch runs: a strategy, its mesh and its plans by mask; for auto also the prices.

    Attributes:
        seconds: candidate -> predicted seconds of attention in all layers, cheapest first; empty unless auto chose.
    """

    strategy: Strategy
    mesh: MeshSpec
    plans: dict[MaskSpec, Plan]
    seconds: dict[str, float]

    @property
    def runner_up(self) -> str | None:
        """The second cheapest candidate."""
        return list(self.seconds)[1] if len(self.seconds) > 1 else None


def resolve(
    strategy: Strategy,
    mesh: MeshSpec,
    layout: PackedLayout,
    shape: AttentionShape,
    masks: Sequence[MaskSpec] = (CAUSAL,),
    ranks: list[int] | None = None,
) -> Resolved:
    """The plans of a batch, one for each distinct mask among the layers' `masks`.

    Under exchange=auto every candidate is planned for all ranks, and `ranks` is not looked at.

    Raises:
        ValueError: what the strategy refuses; for auto, that no candidate fits, with each one's reason.
    """
    if strategy.exchange != "auto":
        return Resolved(strategy, mesh, _plans(strategy, mesh, layout, shape, masks, ranks), {})
    cluster, counts = load_cluster(strategy.planner.cluster), Counter(masks)
    found: list[tuple[float, str, Strategy, MeshSpec, dict[MaskSpec, Plan]]] = []
    reasons = []
    for name in candidates():
        try:
            one = candidate(name, strategy)
            its_mesh = replace(one.mesh(mesh.cp, shape.H, shape.Hkv), pp=mesh.pp, dp=mesh.dp, tp=mesh.tp)
            plans = _plans(one, its_mesh, layout, shape, masks, None)
        except ValueError as error:
            reasons.append(f"{name}: {error}")
            continue
        limit = strategy.buffer_bytes
        if limit is not None and (peak := _peak_bytes(plans)) > limit:
            reasons.append(f"{name}: its buffers take {peak} bytes, over strategy.buffer_bytes={limit}")
            continue
        seconds = sum(counts[mask] * predict_plan(plan, cluster).total_s for mask, plan in plans.items())
        found.append((seconds, name, one, its_mesh, plans))
    if not found:
        raise ValueError(f"strategy=auto: no candidate fits {mesh.cp} ranks ({'; '.join(reasons)})")
    found.sort(key=lambda item: item[:2])
    _, _, chosen, its_mesh, plans = found[0]
    return Resolved(chosen, its_mesh, plans, {name: seconds for seconds, name, *_ in found})


def candidates() -> list[str]:
    """The presets that auto weighs: all that split a sequence."""
    return [name for name in preset_names() if load_strategy(name).exchange not in ("none", "auto")]


def candidate(name: str, auto: Strategy) -> Strategy:
    """A preset with what auto's user set for all of them."""
    one = load_strategy(name, dp=1, weights=auto.weights, node_size=auto.node_size)
    return replace(one, planner=auto.planner) if one.sharding == "whole_document" else one


def _plans(
    strategy: Strategy,
    mesh: MeshSpec,
    layout: PackedLayout,
    shape: AttentionShape,
    masks: Sequence[MaskSpec],
    ranks: list[int] | None,
) -> dict[MaskSpec, Plan]:
    placement = strategy.shard(layout, mesh, shape)
    return {mask: strategy.plan(placement, shape, mask, ranks) for mask in dict.fromkeys(masks)}


def _peak_bytes(plans: dict[MaskSpec, Plan]) -> int:
    """Of temporary buffers, on the rank that holds most."""
    return max(plan.peak_buffer_bytes(rank) for plan in plans.values() for rank in plan.ranks)
