"""Compiles a small matrix product for the target named on the command line and prints what `measure` reads, as JSON.

A program of its own: `@triton.jit` looks at TRITON_INTERPRET when it decorates, and a test process may have set it.
"""

import dataclasses
import json
import sys

import triton
import triton.language as tl

from bench.kernels.compile import Case, compile_case, describe
from bench.kernels.measure import LoopPass, measure
from bench.kernels.targets import TARGETS


@triton.jit
def matmul(A, B, C, K, EXP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr):
    rows, cols, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, STEP)
    total = tl.zeros([M, N], tl.float32)
    for first in tl.range(0, K, STEP):
        a = tl.load(A + rows[:, None] * K + (first + depth)[None, :])
        b = tl.load(B + (first + depth)[:, None] * N + cols[None, :])
        total = tl.dot(a, b, total, input_precision="ieee")
        if EXP:
            total = tl.math.exp2(total)
    tl.store(C + rows[:, None] * N + cols[None, :], total)


def main() -> None:
    target, dtype, warps, exp = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "exp"
    arguments = {"A": f"*{dtype}:16", "B": f"*{dtype}:16", "C": "*fp32:16", "K": "i32:16"}
    constants = {"EXP": exp, "M": 64, "N": 64, "STEP": 32}
    tile = LoopPass(64, 64, 32, 1)
    case = Case("matmul", target, dtype, 32, describe(matmul, arguments | constants, warps, 2), tile)
    report = measure(compile_case(case), TARGETS[target], dtype, tile)
    print(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    main()
