"""Every kernel compiles for every target at the tile that the table chooses, fits there, and does not spill.

The compiler runs in a process of its own, without the interpreter that other tests of this folder switch on.
"""

import ast
import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"]
DTYPES = ["bf16", "fp16", "fp32"]
CODEC_KERNELS = {"encode", "decode", "decode_sum", "decode_sum_encode"}


@lru_cache
def gate(target: str, *more: str) -> list[dict]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.gate", "--target", target, *more]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(rows: list[dict], target: str) -> None:
    assert rows
    errors = {row["case"]: row["error"] for row in rows if row["error"]}
    assert not errors, "\n".join(f"{case}: {error}" for case, error in errors.items())
    for row in rows:
        if row["kernel"] in CODEC_KERNELS:
            assert row["stack"] == 0, f"{row['case']} has {row['stack']} bytes of stack"
        if row["kernel"] in ("fwd", "dq", "dkdv") and row["dtype"] != "fp32":
            assert row["stages"] >= 2, f"{row['case']} is not pipelined"
            kinds = {loop["kind"] for loop in row["loops"]}
            assert kinds == {"full", "masked"}, f"{row['case']} has {sorted(kinds)} loops with matrix instructions"
            if target != "gfx942":
                assert all(loop["copies"] for loop in row["loops"]), f"{row['case']}: a loop copies nothing ahead"
    check_registers(rows, target)


def check_registers(rows: list[dict], target: str) -> None:
    """On NVIDIA no loop with matrix products spills, the forward and dq have no stack, and fp32 is no TF32."""
    for row in rows if target != "gfx942" else ():
        if row["dtype"] == "fp32":
            assert not any(loop["products"] for loop in row["loops"]), f"{row['case']} multiplies on the tensor cores"
        spills = {loop["kind"]: loop["spills"] for loop in row["loops"] if loop["spills"]}
        assert not spills, f"{row['case']} spills in its loops: {spills}"
        assert row["stack"] == 0 or row["kernel"] == "dkdv", f"{row['case']} has {row['stack']} bytes of stack"


@pytest.mark.parametrize("target", TARGETS)
def test_a_covering_subset_compiles(target: str):
    rows = gate(target)
    check(rows, target)
    assert {row["kernel"] for row in rows} == {"fwd", "dq", "dkdv", "delta", "merge", "merge_backward", *CODEC_KERNELS}
    assert {row["dtype"] for row in rows} == set(DTYPES)
    assert {row["head_dim"] for row in rows} == {64, 80, 128, 256}


def test_sources_leave_nothing_to_defaults():
    """A masked load without `other` is 0 in the interpreter and anything on a GPU; a dot's default is TF32."""
    seen = 0
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.load", "tl.dot"):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                where = f"{path.name}:{node.lineno}"
                seen += 1
                assert "mask" not in given or "other" in given, f"{where}: a masked load without other"
                assert ast.unparse(node.func) != "tl.dot" or given.get("input_precision") == "'ieee'", where
    assert seen > 30


@lru_cache
def hopper() -> list[dict]:
    """The static report's rows with matrix products for sm_90, bf16, D = 128: ours and those of torch's template."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.kernels", "--static", "--json", "--jobs", "1", "--targets", "sm_90"]
    command += ["--dtypes", "bf16", "--head-dims", "128"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [row for row in map(json.loads, done.stdout.splitlines()) if row["kernel"] in ("fwd", "dq", "dkdv")]


@pytest.mark.parametrize(
    "kernel, full, masked, bound",
    [("fwd", 0.46, 0.75, 0.52), ("dq", 0.36, 0.58, 0.52), ("dkdv", 0.39, 0.58, 0.52)],
)
def test_loops_on_hopper_issue_no_more_than_promised(kernel: str, full: float, masked: float, bound: float):
    """Issue cycles over tensor cycles. The forward's bound is its exponentials: 1/16 a score against 4 x 128 / 4096."""
    ours = [row for row in hopper() if row["kernel"] == kernel and row["peer"] is None]
    for row in ours:
        reach = full if row["loop"] == "full" else masked
        assert round(row["issue_ratio"], 2) <= reach, f"{row['loop']} loop: {row['issue_ratio']}, promised {reach}"
        if row["loop"] == "full":
            assert round(row["bound"], 2) <= bound
    assert max(row["overlap"] for row in ours if row["loop"] == "full") > 0 or kernel != "fwd"


@pytest.mark.parametrize("kernel", ["fwd", "dq", "dkdv"])
def test_loops_on_hopper_issue_less_than_torchs_template(kernel: str):
    """Full loop against the cheapest loop of theirs, and the dearest masked loop of each."""

    def ratios(peer: bool, kind: str | None) -> list[float]:
        rows = [r for r in hopper() if r["kernel"] == kernel and (r["peer"] or "").startswith("torch") == peer]
        return [r["issue_ratio"] for r in rows if (peer or r["peer"] is None) and kind in (None, r["loop"])]

    assert max(ratios(False, "full")) < min(ratios(True, None))
    assert max(ratios(False, "masked")) < max(ratios(True, "masked"))


@pytest.mark.deep
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", TARGETS)
def test_everything_compiles(target: str, dtype: str):
    rows = gate(target, "--every", "--dtype", dtype)
    check(rows, target)
    assert len([row for row in rows if row["kernel"] in ("fwd", "dq", "dkdv")]) == 3 * 4


@pytest.mark.deep
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("target", TARGETS)
def test_every_option_of_a_launch_compiles(target: str):
    rows = gate(target, "--options")
    assert len(rows) == 2 * (6 + 5 + 5)
    assert not [row["case"] for row in rows if row["error"]]
    check_registers(rows, target)
