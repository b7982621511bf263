"""The whole reader on a freshly compiled product whose FLOP, exponentials and loop are known."""

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from bench.kernels import sass
from bench.kernels.listing import innermost_loops
from bench.kernels.measure import _kinds

ROOT = Path(__file__).resolve().parents[2]
FLOPS = 2 * 64 * 64 * 32


@lru_cache
def toy(target: str, dtype: str, warps: int, exp: str) -> dict:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "tests/bench/toy_matmul.py", target, dtype, str(warps), exp]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_flops_of_one_pass_come_out_exactly(target: str):
    report = toy(target, "bf16", 4, "plain")
    (loop,) = report["loops"]
    assert loop["flops"] == loop["tiles"] * FLOPS
    assert loop["kind"] == "full"
    assert loop["tensor_cycles"] == FLOPS / {"sm_80": 2048, "sm_90": 4096, "sm_100": 8192, "gfx942": 2048}[target]
    assert report["stack"] == 0 and report["spills"] == 0
    assert (loop["copies"] > 0) == (target != "gfx942")  # two stages
    assert report["blocks"] >= 1 and 0 < report["occupancy"] <= 1


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_exponentials_of_one_pass_come_out_exactly(target: str):
    """64 x 64 of them at 16 a cycle; the product's result is waited for before, so nothing overlaps on Hopper."""
    (loop,) = toy(target, "bf16", 4, "exp")["loops"]
    assert loop["exp_cycles"] == 64 * 64 / 16
    assert loop["tiles"] == 1
    if target == "sm_90":
        assert loop["overlap"] == 0


def test_half_the_warps_issue_the_same_products():
    four, eight = (toy("sm_80", "fp16", warps, "plain")["loops"][0] for warps in (4, 8))
    assert four["flops"] // four["tiles"] == eight["flops"] // eight["tiles"] == FLOPS


def test_fp32_products_are_found_in_the_fp_units():
    (loop,) = toy("sm_90", "fp32", 4, "plain")["loops"]
    assert loop["products"] == 0
    assert loop["flops"] == loop["tiles"] * FLOPS
    assert loop["tensor_cycles"] == FLOPS / 256


def test_a_loop_that_compares_for_each_score_is_masked():
    """One with a select for each score; one that compares as much more than the least as there are scores."""

    def kernel(*loops: str) -> list[str]:
        lines = [y for n, x in enumerate(loops) for y in (f".L_x_{n}:", *x.split(";"), f"@P0 BRA `(.L_x_{n})")]
        text = [x if x.startswith(".L") else f" /*{n:04x}*/ {x} ;" for n, x in enumerate(lines)]
        function = sass.parse("\n".join(text))[""]
        return _kinds(sass, function, innermost_loops(function), 8)

    product, compare, select = (
        "HMMA.16816.F32 R4, R8, R12, R4",
        "ISETP.GE.AND P0, PT, R1, R2, PT",
        "FSEL R1, R2, R3, P0",
    )
    plain, by_select, by_predicate = (";".join([product, *x]) for x in ([compare] * 9, [select] * 8, [compare] * 17))
    assert kernel(by_select, plain, by_predicate) == ["masked", "full", "masked"]
    assert kernel(plain) == ["full"]
    assert kernel(by_select) == ["masked"]
