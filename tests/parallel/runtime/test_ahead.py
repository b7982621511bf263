"""Plans made ahead: kept by their bytes, made again when they have gone, and measured about right."""

import gc
import tracemalloc

import numpy as np
import pytest

from kernels.mask_spec import CAUSAL
from parallel.auto import resolve
from parallel.plan.ir import AttentionShape
from parallel.plan.layout import PackedLayout
from parallel.runtime.ahead import Ahead, footprint
from parallel.strategy import load_strategy


def test_what_is_kept_is_bounded_by_bytes_and_by_number() -> None:
    made: list[int] = []

    def make(key: int) -> np.ndarray:
        made.append(key)
        return np.zeros(1000, np.uint8)

    ahead = Ahead(make, keep=5, limit=3500)
    for key in range(20):
        assert ahead.get(key).size == 1000
        assert len(ahead._made) <= 5 and sum(list(ahead._sizes.values())[:-1]) <= 3500
    assert made == list(range(20))
    ahead.get(19)
    ahead.get(0)
    assert made == [*range(20), 0]
    few = Ahead(make, keep=5)
    for key in range(20):
        few.get(key)
    assert len(few._made) == len(few._sizes) == 5


def test_one_that_is_too_large_is_kept_until_the_next() -> None:
    ahead = Ahead(lambda key: np.zeros(10_000, np.uint8), limit=10)
    assert ahead.get(1).size == ahead.get(2).size == 10_000
    assert len(ahead._made) <= 2


@pytest.mark.parametrize("name", ["hsap", "llama3", "striped_ring", "zigzag_ring", "flashcp"])
def test_a_plan_s_footprint_is_what_it_takes(name: str) -> None:
    strategy = load_strategy(name)
    mesh, shape = strategy.mesh(16, 32, 8), AttentionShape(32, 8, 64, 64, "bf16")
    layout = PackedLayout.from_lengths([700 + 37 * (n % 50) for n in range(200)])
    resolve(strategy, mesh, layout, shape, (CAUSAL,), ranks=[3])  # what is kept for all plans
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    resolved = resolve(strategy, mesh, layout, shape, (CAUSAL,), ranks=[3])
    gc.collect()
    real = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert real / 4 < footprint(resolved) < real * 4
