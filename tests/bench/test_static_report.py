"""The static report's rows: their keys, the backward figure by hand, peers, and the command itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.kernels.__main__ import main
from bench.kernels.measure import KernelReport, LoopPass, LoopReport
from bench.kernels.targets import TARGETS, occupancy

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "kernel", "target", "dtype", "head_dim", "tile", "stages", "warps", "loop", "issue_ratio", "bound", "overlap",
    "registers", "stack_bytes", "loop_spills", "peer",
}  # fmt: skip


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process without the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.kernels", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def loop(kind: str, tensor: float, issue: float, exp: float, shared: float) -> LoopReport:
    return LoopReport(
        kind=kind, counts={}, predicated=0, products=1, flops=1, tiles=1, spills=0, copies=1, tensor_cycles=tensor,
        issue_cycles=issue, exp_cycles=exp, shared_cycles=shared, operand_cycles=shared, overlap=0.25,
    )  # fmt: skip


def test_ratios_and_bound():
    x = loop("full", tensor=100.0, issue=46.0, exp=52.0, shared=31.0)
    assert (x.issue_ratio, x.bound, x.bound_cycles) == (0.46, 0.52, 100.0)
    assert loop("full", 100.0, 120.0, 52.0, 31.0).bound_cycles == 120.0


def test_json_rows_have_every_key_and_nothing_else_is_on_stdout():
    done = run("--static", "--json", "--targets", "sm_90", "--dtypes", "bf16", "--head-dims", "64", "--jobs", "1")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(set(row) >= KEYS for row in rows)
    ours = [row for row in rows if row["peer"] is None]
    loops = [(row["kernel"], row["loop"]) for row in ours if row["kernel"] in ("fwd", "dq", "dkdv")]
    assert set(loops) == {(kernel, kind) for kernel in ("fwd", "dq", "dkdv") for kind in ("full", "masked")}
    for row in ours:
        if row["kernel"] in ("fwd", "dq", "dkdv"):
            assert 0 < row["issue_ratio"] <= row["bound"] and 0 <= row["overlap"] <= 1
            m, n = (int(x) for x in row["tile"].split("x"))
            products = {"fwd": 2, "dq": 3, "dkdv": 4}[row["kernel"]]
            assert row["tensor_cycles"] == products * 2 * m * n * 64 / 4096
    assert {row["kernel"] for row in ours} >= {"merge", "backward"}
    (backward,) = [row for row in ours if row["kernel"] == "backward"]
    assert backward["bound"] >= 7 / 5
    # a peer is there, or the reason why not
    peers = {row["peer"].split()[0] for row in rows if row["peer"]}
    for name, word in (("torch", "flex"), ("fla-core", "fla-core")):
        assert name in peers or word in done.stderr


def test_backward_is_its_kernels_over_five_products():
    from bench.kernels.cases import attention_case, row_cases
    from bench.kernels.static_report import MEAN_KEYS, backward_row, delta_cycles

    def report(*loops: LoopReport, instructions: int = 0) -> KernelReport:
        return KernelReport(64, 8, 0, 0, 1, 0.5, instructions, 0, loops)

    parts = {}
    for kernel, products in (("dq", 3), ("dkdv", 4)):
        case = attention_case(kernel, 128, "bf16", "sm_90")
        assert isinstance(case.tile, LoopPass)
        tensor = products * 2 * case.tile.rows * case.tile.columns * 128 / 4096
        # the full loop counts, and where it is bound by the tensor cores, their cycles
        full = loop("full", tensor, tensor * (2.0 if kernel == "dq" else 0.5), 0.0, 0.0)
        parts[kernel] = (case, report(loop("masked", tensor, 9 * tensor, 0.0, 0.0), full))
    assert backward_row(parts)["bound"] == pytest.approx((2 * 3 + 4) / 5, abs=1e-4)
    assert backward_row(parts)["issue_ratio"] == pytest.approx((2 * 3 + 0.5 * 4) / 5, abs=1e-4)
    delta = next(case for case in row_cases((128,), ("bf16",), ("sm_90",)) if case.kernel == "delta")
    parts["delta"] = (delta, report(instructions=32 * 1000))
    rows = delta.spec.constexprs["BLOCK_M"]
    assert delta_cycles(*parts["delta"]) == 32 * 1000 * 4 / 4 / rows
    five = 5 * 2 * 128 / 4096
    assert backward_row(parts)["bound"] == pytest.approx(2 + 1000 * 32 / rows / MEAN_KEYS / five, abs=1e-4)
    # with few instructions, reading out and dout takes longer
    assert delta_cycles(delta, report(instructions=1)) == 2 * 128 * 2 / TARGETS["sm_90"].global_bytes


@pytest.mark.parametrize(
    "target, registers, shared, warps, blocks",
    [
        ("sm_90", 255, 0, 8, 1),  # 256 x 32 registers a warp: 2 warps in a quarter of 16,384
        ("sm_90", 168, 0, 4, 3),  # 168 x 32 = 5,376: 3 warps in a quarter, 12 in all
        ("sm_90", 32, 0, 4, 16),
        ("sm_90", 32, 100 * 1024, 4, 2),  # 228 KiB hold two blocks of 100 KiB
        ("sm_80", 32, 100 * 1024, 4, 1),
        ("sm_90", 32, 228 * 1024, 4, 1),  # the system's KiB is in the static part there
        ("sm_90", 32, 228 * 1024 + 1, 4, 0),
        ("sm_80", 32, 164 * 1024, 4, 0),  # and on top of it here
        ("gfx942", 128, 0, 4, 4),  # 512 registers a lane: four waves on each SIMD
        ("gfx942", 256, 65536, 4, 1),
        ("gfx942", 64, 65537, 4, 0),
    ],
)
def test_occupancy(target: str, registers: int, shared: int, warps: int, blocks: int):
    found, share = occupancy(TARGETS[target], registers, shared, warps)
    assert found == blocks
    assert share == blocks * warps / TARGETS[target].warps


def test_occupancy_counts_tensor_memory_in_powers_of_two():
    target = TARGETS["sm_100"]
    assert [occupancy(target, 32, 0, 4, columns)[0] for columns in (0, 100, 256, 257, 544)] == [16, 4, 2, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--static", "--head-dims", "300"], "head dims lie in 1..256, not '300'"),
        (["--gpu", "--jobs", "2"], "--jobs is for --static"),
        (["--gpu", "--head-dims", "64"], "--head-dims is for --static"),
        (["--static", "--gpu"], "not allowed with argument"),
    ],
)
def test_what_would_be_ignored_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_unknown_options_of_a_launch_are_refused():
    from bench.kernels.cases import attention_case

    with pytest.raises(ValueError, match="'causal' is no option of a launch; use one of add, capped, gaps, sink"):
        attention_case("fwd", 64, "bf16", "sm_90", ("causal",))
