"""What of the GPU page can be shown without one: the refusal, the contenders' agreement, the rows and their figures."""

import dataclasses
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from bench.kernels import gpu_contenders
from bench.kernels.gpu_page import correctness_rows, forward_flops, speed_rows
from kernels.attention.backends import BACKENDS
from kernels.attention.problem import Problem
from kernels.attention.torch_backend import attention_torch

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_refuses_without_a_gpu():
    command = [sys.executable, "-m", "bench.kernels", "--gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no GPU here" in done.stderr
    assert done.stdout == ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; run python -m bench.kernels --gpu")
@pytest.mark.gpu
def test_ours_is_right_on_this_gpu():
    assert all(row["right"] for row in correctness_rows(torch.device("cuda"), "triton", 64))


def test_correctness_rows_tell_right_from_wrong(monkeypatch: pytest.MonkeyPatch):
    rows = list(correctness_rows(CPU, "torch", 64, tokens=70))
    assert [row["direction"] for row in rows] == ["out", "dq", "dk", "dv"]
    assert all(row["right"] and 0 < row["plain_error"] < 0.2 for row in rows)

    def wrong(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention_torch(problem)
        return out * 1.2, lse

    monkeypatch.setitem(BACKENDS, "wrong", dataclasses.replace(BACKENDS["torch"], attention=wrong))
    assert not any(row["right"] for row in correctness_rows(CPU, "wrong", 64, tokens=70))


def test_ours_and_sdpa_are_the_same_function():
    lengths = [5, 1, 30]
    q, k, v = (torch.randn(36, heads, 16) for heads in (4, 2, 2))
    ours = gpu_contenders.ours(lengths, CPU, "torch")(q, k, v)
    torch.testing.assert_close(ours, gpu_contenders.sdpa(lengths, CPU)(q, k, v))


def test_speed_rows_have_medians_of_both_directions_and_leave_out_what_fails(capsys: pytest.CaptureFixture[str]):
    lengths = [7, 2]

    def broken() -> gpu_contenders.Attend:
        raise RuntimeError("no such thing\nand more")

    contenders = {"ours": partial(gpu_contenders.ours, lengths, CPU, "torch"), "flex": broken}
    rows = list(speed_rows(contenders, lengths, 16, CPU, end=time.monotonic() + 60))
    assert [(row["contender"], row["direction"]) for row in rows] == [("ours", "forward"), ("ours", "backward")]
    for row, work in zip(rows, (1.0, 2.5)):
        assert row["tflops"] == pytest.approx(forward_flops(lengths, 16) * work / row["ms"] / 1e9)
    assert "flex on 2 documents, 9 tokens left out: no such thing\n" in capsys.readouterr().err


def test_nothing_is_timed_after_the_end(capsys: pytest.CaptureFixture[str]):
    contenders = {"ours": partial(gpu_contenders.ours, [4], CPU, "torch")}
    assert list(speed_rows(contenders, [4], 16, CPU, end=time.monotonic() - 1)) == []
    assert "the time is up" in capsys.readouterr().err


def test_flops_count_allowed_pairs_alone():
    assert forward_flops([3], 8, heads=2) == 4 * 6 * 8 * 2
    assert forward_flops([2, 1], 8, heads=2) == 4 * (3 + 1) * 8 * 2


@pytest.mark.deep
def test_flex_is_the_same_function_and_compiles_once_for_all_masks():
    """On the CPU, where torch compiles its forward alone."""
    counters = torch._dynamo.utils.counters
    q, k, v = (torch.randn(128, heads, 16) for heads in (4, 2, 2))
    with torch.no_grad():
        for lengths in ([50, 1, 77], [128]):
            attend = gpu_contenders.flex(lengths, CPU)
            before = counters["stats"]["unique_graphs"]
            torch.testing.assert_close(attend(q, k, v), gpu_contenders.sdpa(lengths, CPU)(q, k, v))
            made = counters["stats"]["unique_graphs"] - before
    assert made == 0
