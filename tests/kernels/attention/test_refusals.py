"""What the kernels refuse: sentences with the numbers and a way out."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
import torch

from kernels.api import BACKENDS, IntervalMask, attention, flash_attn_varlen_func
from kernels.attention import backends
from kernels.attention.checks import check_inputs


def mask(n: int = 4) -> IntervalMask:
    """One causal document."""
    return IntervalMask.from_cu_seqlens([0, n])


def z(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros."""
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "k", "v", "options", "message"),
    [
        (z(4, 2, 8), z(4, 2, 8), z(4, 2, 8).double(), {}, "float32, torch.float32, torch.float64; cast"),
        (*[z(4, 2, 8).int()] * 3, {}, "torch.int32"),
        (z(4, 5, 8), z(4, 2, 8), z(4, 2, 8), {}, "2 key heads do not divide 5 query heads"),
        (z(4, 2, 8), z(4, 0, 8), z(4, 0, 8), {}, "0 key heads"),
        (z(4, 2, 8), z(4, 2, 6), z(4, 2, 8), {}, "8 and 6"),
        (z(4, 2, 8), z(5, 2, 8), z(4, 2, 8), {}, r"k \(5, 2, 8\), v \(4, 2, 8\)"),
        (z(1, 4, 2, 8), z(4, 2, 8), z(4, 2, 8), {}, r"packed .* not q \(1, 4, 2, 8\)"),
        (*[z(4, 1, 257)] * 3, {}, "1..256, but q and k have 257"),
        (z(4, 1, 8), z(4, 1, 8), z(4, 1, 300), {}, "v has 300"),
        (*[z(4, 1, 0)] * 3, {}, "have 0"),
        (*[z(3, 1, 8)] * 3, {}, "covers 4 queries and 4 keys, but q has 3"),
        (*[z(4, 1, 8)] * 3, {"softcap": 0.0}, "softcap must be a positive number, not 0.0; use None"),
        (*[z(4, 1, 8)] * 3, {"softcap": float("nan")}, "softcap"),
        (*[z(4, 1, 8)] * 3, {"softmax_scale": float("inf")}, "softmax_scale must be a finite number, not inf"),
        (*[z(4, 2, 8)] * 3, {"sink": z(3)}, r"each of 2 heads on cpu, not \(3,\)"),
        (*[z(4, 2, 8)] * 3, {"sink": z(2).long()}, "int64"),
    ],
)
def test_inputs_that_do_not_fit(q: Any, k: Any, v: Any, options: dict[str, Any], message: str) -> None:
    """Dtypes, heads, widths, shapes, masks longer than their buffers, and options out of range."""
    with pytest.raises(ValueError, match=message):
        check_inputs(q, k, v, [mask()], **options)


def test_no_bands() -> None:
    """An empty list of bands."""
    x = z(4, 1, 8)
    with pytest.raises(ValueError, match="empty list"):
        check_inputs(x, x, x, [])


def test_overlapping_bands_reach_the_user() -> None:
    """attention itself refuses them."""
    x = z(4, 1, 8)
    with pytest.raises(ValueError, match="bands 0 and 1 overlap, first at query 0"):
        attention(x, x, x, [mask(), mask()])


def test_backends_by_name() -> None:
    """An unknown backend names those that work here."""
    x = z(4, 1, 8)
    able = ", ".join(backends.able_backends(x))
    with pytest.raises(ValueError, match=f"unknown attention backend 'cuda'; on cpu use one of {able}, or auto"):
        attention(x, x, x, mask(), backend="cuda")


def test_a_backend_that_cannot_run_here_names_one_that_can() -> None:
    """The torch backend is for the CPU; on another device the reference works."""
    with pytest.raises(ValueError, match="'torch' does not run on meta; use one of reference"):
        backends.choose_backend("torch", torch.zeros(1, device="meta"))
    assert backends.choose_backend("auto", torch.zeros(1, device="meta")) is BACKENDS["reference"]


def test_auto_says_what_it_picked_once(caplog: pytest.LogCaptureFixture) -> None:
    """One log line per device type, with the reason."""
    backends._say_once.cache_clear()
    x = z(4, 1, 8)
    with caplog.at_level(logging.INFO, logger="kernels.attention.backends"):
        attention(x, x, x, mask())
        attention(x, x, x, mask())
    assert [record.message for record in caplog.records] == [
        "attention on cpu uses the 'torch' backend (torch's flash operator on the parts of the mask, O(T) memory)"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p=0.1 is not supported"),
        ({"alibi_slopes": torch.ones(1)}, "alibi_slopes is not supported"),
        ({"block_table": torch.ones(1, 1)}, "block_table is not supported"),
        ({"seqused_k": torch.ones(1)}, "seqused_k is not supported; pass None"),
        ({"out": torch.ones(4, 1, 8)}, "out is not supported"),
        ({"s_aux": torch.ones(1), "learnable_sink": torch.ones(1)}, "pass one"),
        ({"window_size": (-3, 0)}, "below -1"),
        ({"max_seqlen_q": 3}, "max_seqlen_q is 3, but a document has 4 tokens"),
        ({"max_seqlen_k": 2}, "max_seqlen_k is 2, but a document has 4 tokens"),
    ],
)
def test_varlen_refusals(options: dict[str, Any], message: str) -> None:
    """Nothing that a user set is ignored."""
    x = z(4, 1, 8)
    lengths = {"max_seqlen_q": 4, "max_seqlen_k": 4}
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(x, x, x, [0, 4], [0, 4], **lengths | options)


def test_varlen_sinks_go_by_both_names() -> None:
    x, sink = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0.5, -1.0])
    want, _ = attention(x, x, x, mask(), sink=sink)
    for name in ("s_aux", "learnable_sink"):
        assert torch.equal(flash_attn_varlen_func(x, x, x, [0, 4], [0, 4], 4, 4, causal=True, **{name: sink}), want)


def test_refusals_without_the_checks_of_the_tests() -> None:
    """Outside pytest no annotation is checked: attention and IntervalMask refuse by themselves."""
    program = """
import torch
from kernels.api import IntervalMask, attention
m, x = IntervalMask.from_cu_seqlens([0, 4]), torch.zeros(4, 2, 8)
one = torch.zeros(1, dtype=torch.int32)
for call in (lambda: attention(x, x[:, :, :6], x, m), lambda: attention(x.int(), x.int(), x.int(), m),
             lambda: attention(x[None], x, x, m), lambda: attention(x, x, x, "causal"),
             lambda: IntervalMask(one, one.repeat(2), one, one), lambda: IntervalMask(one.long(), one, one, one)):
    try:
        call()
    except ValueError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert len(said) == 6
    assert "8 and 6" in said[0]
    assert "int32" in said[1]
    assert "(1, 4, 2, 8)" in said[2]
    assert "not str" in said[3]
    assert "k_start 1, k_end 2" in said[4]
    assert "int64" in said[5]
