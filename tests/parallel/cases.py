"""Random schedules held against dense float64 attention, for the property tests."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from kernels.mask_spec import MaskSpec
from parallel.plan.ir import CLASSES, AttentionShape
from parallel.plan.layout import PackedLayout
from parallel.plan.mesh import MeshSpec
from parallel.plan.plan import Plan
from parallel.proof.verify import verify
from parallel.runtime.loopback import LoopbackResult, run_loopback
from parallel.sharding import SHARDINGS
from parallel.strategy import EXCHANGES, Strategy, load_strategy, preset_names
from tests.masks import allowed, dense_attention, masks

TOLERANCE = 1e-10


@dataclass(frozen=True)
class Case:
    """A strategy on a mesh, a batch, a mask and heads; and how the ranks are driven."""

    strategy: Strategy
    mesh: MeshSpec
    layout: PackedLayout
    mask: MaskSpec
    shape: AttentionShape
    sink: bool
    softcap: float | None
    rules: str
    backend: str


@st.composite
def layouts(draw: Any) -> PackedLayout:
    """A few short documents, some of one token or none, in one to three rows with padding; perhaps none at all."""
    short, long = st.integers(0, 3), st.integers(1, 30)
    rows = draw(st.lists(st.lists(short | long, max_size=4), min_size=1, max_size=3))
    fullest = max(sum(row) for row in rows)
    padding = draw(st.sampled_from([0, 0, 1, 5]))
    return PackedLayout.from_lengths([n for row in rows for n in row], [len(row) for row in rows], fullest + padding)


@st.composite
def cases(draw: Any, names: list[str] | None = None) -> Case:
    """Any preset with any of its axes changed, on 1 to 8 or more ranks."""
    preset = load_strategy(draw(st.sampled_from(names or [name for name in preset_names() if name != "auto"])))
    if preset.exchange == "all_gather" and draw(st.booleans()):
        preset = dataclasses.replace(preset, exchange="compact_all_gather")
    exchange = EXCHANGES.get(preset.exchange)
    axes: dict[str, Any] = {}
    if preset.exchange != "none":
        axes["sharding"] = draw(st.sampled_from((exchange and exchange.shardings) or sorted(SHARDINGS)))
    if exchange and exchange.hierarchical and preset.inner_exchange is None and draw(st.booleans()):
        axes["inner_exchange"] = "all_to_all"
    if draw(st.booleans()) and preset.exchange != "none":
        axes["batch_groups"] = "auto"
    if "all_gather" in preset.exchange:
        axes["head_slices"] = draw(st.sampled_from([None, 1, 2]))
    key_heads, group = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 7]))
    strategy = dataclasses.replace(preset, **axes)
    outer, inner = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3, 4]))
    if preset.exchange == "none":
        outer = inner = 1
    elif preset.exchange == "all_to_all":
        outer, inner = 1, draw(st.integers(1, 8))
    elif strategy.inner_exchange is None:
        outer, inner = draw(st.integers(1, 8)), 1
    if strategy.splits_heads:
        inner = min(inner, key_heads * group)
    strategy = dataclasses.replace(strategy, dp=1, cp_outer=outer, cp_inner=inner)
    width = draw(st.sampled_from([4, 6]))
    causal = True if preset.exchange == "helper" else None
    return Case(
        strategy,
        strategy.mesh(outer * inner, key_heads * group, key_heads),
        draw(layouts()),
        draw(masks(causal)),
        AttentionShape(key_heads * group, key_heads, 4, width, "fp64"),
        draw(st.integers(0, 5)) == 0,
        draw(st.sampled_from([None, None, None, 0.7])),
        draw(st.sampled_from(["plain", "strict", "late"])),
        draw(st.sampled_from(["reference", "reference", "reference", "torch"])),
    )


def plan_of(case: Case) -> Plan:
    """The case's plan, all ranks."""
    placement = case.strategy.shard(case.layout, case.mesh)
    return case.strategy.plan(placement, case.shape, case.mask)


def tensors(shape: AttentionShape, total: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v and dout."""
    draw = torch.Generator().manual_seed(seed)
    sizes = [(shape.H, shape.D), (shape.Hkv, shape.D), (shape.Hkv, shape.Dv), (shape.H, shape.Dv)]
    return [torch.randn(total, *size, generator=draw, dtype=torch.float64).to(dtype) for size in sizes]


def dense(
    layout: PackedLayout, mask: MaskSpec, inputs: list[torch.Tensor], sink: torch.Tensor | None, softcap: float | None
) -> dict[str, torch.Tensor]:
    """out, lse and gradients of one process, dense, in float64."""
    return dense_attention(inputs, allowed(mask, layout), sink, softcap)


def check(case: Case) -> None:
    """The plan verifies, survives JSON, and on loopback equals dense attention; bytes measured = bytes planned."""
    plan = plan_of(case)
    verify(plan)
    assert abs(plan.work.sum() - case.layout.pairs(case.mask)) < 1e-6
    inputs = tensors(case.shape, case.layout.total_tokens)
    sink = torch.linspace(-1, 1, case.shape.H, dtype=torch.float64) if case.sink else None
    result = run_loopback(
        plan, *inputs, softcap=case.softcap, sink=sink, backend=case.backend, rules=case.rules, poison=True
    )
    compare(result, dense(case.layout, case.mask, inputs, sink, case.softcap))
    check_bytes(plan, result)


def compare(result: LoopbackResult, wanted: dict[str, torch.Tensor], tolerance: float = TOLERANCE) -> None:
    """Every result within `tolerance`, and no number where there should be none."""
    for name, right in wanted.items():
        found = getattr(result, name)
        assert found is not None and found.shape == right.shape, name
        assert torch.equal(torch.isinf(found), torch.isinf(right)), name
        finite = torch.isfinite(right)
        worst = (found[finite] - right[finite]).abs().max() if finite.any() else torch.zeros(())
        assert worst <= tolerance, f"{name} is off by {worst:.2e}"


def check_bytes(plan: Plan, result: LoopbackResult) -> None:
    """What the recorder counted is what the plan says, for every class and pair of ranks."""
    planned = {
        (traffic, a, b): int(plan.bytes[traffic][a, b])
        for traffic in CLASSES
        for a in range(plan.size)
        for b in range(plan.size)
        if plan.bytes[traffic][a, b]
    }
    assert {key: size for key, size in result.recorder.bytes.items() if size} == planned
