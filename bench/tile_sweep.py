"""Which tile should the table hold? Every candidate compiled and measured, the best first.

    python -m bench.tile_sweep --kernel fwd --target sm_80 --head-dim 128 --dtype bf16

A candidate is out if it fits no core, or spills inside a loop with matrix instructions, or (forward, dq) has a stack.
The rest is ranked by what a pair costs, in tensor cycles: the larger of 1 and the bound, of three full tiles to one
masked one, and among equals by how much the issue ports have to do. It is a count, not a time: a GPU has the last word.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence

from bench.kernels.cases import DTYPES, PRODUCTS, attention_case, head_dim_argument
from bench.kernels.compile import Case, report
from bench.kernels.measure import KernelReport, LoopReport
from bench.kernels.static_report import kernel_rows, table_line
from bench.kernels.targets import TARGETS
from kernels.compile.tiling import Kernel, Tile

ROWS, COLUMNS, WARPS, STAGES = (16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (2, 3)


@dataclasses.dataclass(frozen=True)
class Ranked:
    case: Case
    found: KernelReport
    fault: str | None
    cost: tuple[float, float]


def candidates(kernel: Kernel, dtype: str) -> Iterator[Tile]:
    """Tiles worth a look: the side that stays is not the shorter one, and each warp has 16 rows of its own or more."""
    for block_m in ROWS:
        for block_n in COLUMNS:
            stays, streams = (block_n, block_m) if kernel == "dkdv" else (block_m, block_n)
            for warps in WARPS:
                largest = 64 * 32 if dtype == "fp32" else 128 * 128
                if stays >= streams and 512 * warps // 4 <= block_m * block_n <= largest:
                    yield from (Tile(block_m, block_n, warps, stages) for stages in STAGES)


def ranked(case: Case) -> Ranked:
    """Compile and rank one candidate."""
    found = report(case)
    return Ranked(case, found, fault(case, found), cost(found))


def fault(case: Case, found: KernelReport) -> str | None:
    """Why this tile cannot be chosen, or None."""
    if found.blocks < 1:
        return f"{found.shared} bytes of shared memory, {found.tensor_memory} columns of tensor memory do not fit"
    if not found.loops:
        return "no loop of matrix products"
    spills = sum(x.spills for x in found.loops if x.products)
    if spills:
        return f"{spills} spills in its loops"
    if found.stack and case.kernel != "dkdv":
        return f"{found.stack} bytes of stack"
    return None


def cost(found: KernelReport) -> tuple[float, float]:
    """Tensor cycles for each tensor cycle of useful work, in a mix of three full tiles to a masked one; and issue."""

    def mixed(value: Callable[[LoopReport], float]) -> float:
        by_kind = [[value(x) for x in found.loops if x.kind == kind] for kind in ("full", "masked")]
        full, masked = (sum(x) / len(x) if x else 0.0 for x in by_kind)
        return 0.75 * full + 0.25 * masked

    if not found.loops:
        return float("inf"), float("inf")
    return round(mixed(lambda x: max(1.0, x.bound)), 2), mixed(lambda x: x.issue_ratio)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tile_sweep", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kernel", choices=list(PRODUCTS), required=True)
    parser.add_argument("--target", choices=list(TARGETS), required=True)
    parser.add_argument("--head-dim", type=head_dim_argument, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    options = parser.parse_args(arguments)
    results = []
    for tile in candidates(options.kernel, options.dtype):
        case = attention_case(options.kernel, options.head_dim, options.dtype, options.target, tile=tile)
        try:
            results.append(ranked(case))
        except Exception as error:  # a tile that the compiler cannot do is no candidate
            print(f"{case.name}: {type(error).__name__}", file=sys.stderr)
    print(table_line(None))
    for result in sorted(results, key=lambda x: (x.fault is not None, x.cost)):
        for row in kernel_rows(result.case, result.found):
            print(table_line(row | {"peer": result.fault}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
