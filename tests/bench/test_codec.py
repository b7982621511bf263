"""The codec's bench: its rows, and what the compiler makes of the kernels on Hopper."""

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from bench.codec.__main__ import error_row, sum_rows, view_row
from bench.codec.data import DRAWN, drawn, trained
from parallel.plan.codec import CodecSpec

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ["data", "format", "group", "stages", "bytes_per_value", "rel_l2", "worst_channel", "flushed", "saturated"]


@pytest.mark.parametrize("name", DRAWN)
def test_rows_have_the_promised_columns(name: str):
    row = error_row(name, drawn(name, 0), CodecSpec())
    assert list(row)[: len(COLUMNS)] == COLUMNS
    assert row["bytes_per_value"] == 1.0625 and row["stages"] == "ha"
    assert 0.015 < float(row["rel_l2"]) < 0.028


def test_a_transform_spreads_outliers_over_small_channels():
    """So it is a switch: for FP8 it costs the other channels, for int8 it is a gain."""
    x = drawn("channel x50", 0)

    def worst(form: str, on: bool) -> float:
        return float(error_row("", x, CodecSpec(form, hadamard=on))["worst_channel"])

    assert worst("e4m3", True) > 3 * worst("e4m3", False)
    assert worst("int8", True) < 0.3 * worst("int8", False)


def test_sums():
    one, two, hops = (float(row["rel_l2"]) for row in sum_rows(0))
    assert one < 0.027 < two < 0.037 < hops < 0.06


def test_the_chosen_view_of_a_drawn_tensor():
    x, held_out = drawn("channel x50", 0)[:, :128], drawn("channel x50", 1)[:, :128]
    assert float(view_row("", x, held_out, False)["gain"]) > 0.2
    assert float(view_row("", x, held_out, True)["gain"]) > -0.05


def test_tensors_of_a_model():
    kept = trained(2, 0)
    assert {name: len(xs) for name, xs in kept.items()} == dict.fromkeys(
        ("attention out", "attention grad", "mlp out", "mlp grad"), 2
    )
    assert all(x.shape == (512, x.shape[1]) and bool(torch.isfinite(x).all()) for xs in kept.values() for x in xs)


@lru_cache
def hopper() -> dict[tuple[str, str], dict]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.codec", "--static", "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {(row["kernel"], row["format"]): row for row in map(json.loads, done.stdout.splitlines())}


def test_each_byte_moves_once_in_wide_accesses():
    """bf16 in, one byte a code out, 16 bytes at a time; no spills; nothing staged through memory."""
    rows = hopper()
    for (kernel, _), row in rows.items():
        assert row["spills"] == 0 and row["stack"] == 0, kernel
        assert row["access"].split()[0].startswith("16x") and row["access"].split()[1].startswith("16x"), kernel
    encode, decode = rows["encode", "e4m3"], rows["decode", "e4m3"]
    assert (encode["read"], encode["written"]) == (2, 1)
    assert (decode["read"], decode["written"]) == (1, 2)
    assert rows["copy", "-"]["read"] == 2


@pytest.mark.parametrize(
    ("kernel", "form", "least"),
    [("encode", "e4m3", 29), ("encode", "e4m3 hardware", 19), ("decode", "e4m3", 18)],
)
def test_instructions_are_within_twice_the_least(kernel: str, form: str, least: float):
    """The least by the count in docs/log.md, for G = 128 and 16 values in a thread."""
    assert hopper()[kernel, form]["per_value"] < 2 * least
