"""Which candidates there are, what makes one unfit, and how the rest are ranked."""

import pytest

from bench.kernels.cases import attention_case
from bench.kernels.measure import KernelReport, LoopReport
from bench.tile_sweep import candidates, cost, fault
from kernels.compile.tiling import Kernel, Tile


def loop(kind: str, issue: float, exp: float = 0.0, spills: int = 0) -> LoopReport:
    return LoopReport(
        kind=kind, counts={}, predicated=0, products=4, flops=1, tiles=1, spills=spills, copies=1, tensor_cycles=1.0,
        issue_cycles=issue, exp_cycles=exp, shared_cycles=0.0, operand_cycles=0.0, overlap=0.0,
    )  # fmt: skip


def report(*loops: LoopReport, stack: int = 0, blocks: int = 1) -> KernelReport:
    return KernelReport(64, stack, 1024, 32, blocks, 0.5, 100, 0, loops)


@pytest.mark.parametrize("kernel", ["fwd", "dq", "dkdv"])
def test_candidates_keep_the_longer_side_and_contain_the_tables_form(kernel: Kernel):
    found = list(candidates(kernel, "bf16"))
    assert len(found) == len(set(found))
    for tile in found:
        assert tile.stages >= 2
        assert (tile.block_n >= tile.block_m) if kernel == "dkdv" else (tile.block_m >= tile.block_n)
    wanted = {"fwd": Tile(128, 128, 8, 2), "dq": Tile(128, 64, 8, 2), "dkdv": Tile(64, 128, 8, 2)}
    assert wanted[kernel] in found


def test_unfit_are_those_that_do_not_fit_or_spill_or_stack():
    forward, keys = (attention_case(kernel, 64, "bf16", "sm_90") for kernel in ("fwd", "dkdv"))
    fine = loop("full", 0.5)
    assert fault(forward, report(fine)) is None
    assert (
        fault(forward, report(fine, blocks=0)) == "1024 bytes of shared memory, 32 columns of tensor memory do not fit"
    )
    assert fault(forward, report()) == "no loop of matrix products"
    assert fault(forward, report(fine, loop("masked", 0.5, spills=3))) == "3 spills in its loops"
    assert fault(forward, report(fine, stack=16)) == "16 bytes of stack"
    assert fault(keys, report(fine, stack=16)) is None


def test_cost_is_three_full_tiles_to_a_masked_one():
    # the bound counts only where it is over 1; issue decides among equals
    assert cost(report(loop("full", 0.4, 0.5), loop("masked", 0.8))) == (1.0, pytest.approx(0.75 * 0.4 + 0.25 * 0.8))
    slow = cost(report(loop("full", 0.4), loop("masked", 1.2), loop("masked", 1.6)))
    assert slow == (1.1, pytest.approx(0.75 * 0.4 + 0.25 * 1.4))
    assert cost(report())[0] == float("inf")
