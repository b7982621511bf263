"""Sums over parts stay in fp32 for bf16 inputs: results err by one rounding at the end, and fp32 results by none."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from kernels.api import IntervalMask
from kernels.attention.backends import choose_rounds
from kernels.compile.runtime import interpreted
from kernels.merge.merge import merge, merge_into
from tests.kernels.oracle import Case, actual, document_pairs, every_backend, make_case

NAMES = ("out", "lse", "dq", "dk", "dv")
SLACK = 1.02  # what fp32 adds to the error of rounding once; a sum of two parts in bf16 errs by 1.22 of it
T = 144 if interpreted() else 300
MERGES = ["torch", "triton"] if interpreted() else ["torch"]


def dense(case: Case, kept: Tensor | None = None) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv in float64, of queries that all see a key; delta from the out that was kept, if given."""
    q, dout, Hkv = case.q.double(), case.dout.double(), case.k.shape[1]
    k, v = (x.double().repeat_interleave(q.shape[1] // Hkv, 1) for x in (case.k, case.v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * case.scale
    scores = scores.masked_fill(~case.allowed, -math.inf)
    p, lse = scores.softmax(-1), scores.logsumexp(-1)
    out = torch.einsum("hqk,khd->qhd", p, v)
    delta = (dout * (out if kept is None else kept.double())).sum(-1).T[..., None]
    ds = p * (torch.einsum("qhd,khd->hqk", dout, v) - delta) * case.scale
    dq, dk = torch.einsum("hqk,khd->qhd", ds, k), torch.einsum("hqk,qhd->khd", ds, q)
    dv = torch.einsum("hqk,qhd->khd", p, dout)
    dk, dv = (x.unflatten(1, (Hkv, -1)).sum(2) for x in (dk, dv))
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def coarseness(got: Tensor, exact: Tensor) -> float:
    """The error of a result in bf16, in units of the error of rounding the exact one."""
    return float((got.double() - exact).norm() / (exact.bfloat16().double() - exact).norm())


def drift(got: Tensor, exact: Tensor) -> float:
    """The error of a result in fp32, relative to the largest number."""
    return float((got.double() - exact).abs().max() / exact.abs().max())


def masked(kind: str) -> tuple[Case, list[IntervalMask]]:
    """Many parts to a row and to a column, on every backend."""
    reach = (None, None) if kind == "document" else (T // 4 - 1, 0)
    allowed = document_pairs([T], reach=reach)
    bands = [IntervalMask.from_cu_seqlens([0, T], window=None if kind == "document" else T // 4)]
    if kind == "bands":
        rows = torch.arange(T)
        bands.append(IntervalMask.from_rows(torch.zeros(T).int(), (rows - T // 4 + 1).clamp(0, 40).int(), T))
        allowed |= torch.arange(T) < (rows - T // 4 + 1).clamp(0, 40)[:, None]
    return make_case(allowed, (4, 2), (16, 16), torch.bfloat16, dlse=False), bands


@every_backend
@pytest.mark.parametrize("kind", ["document", "window", "bands"])
def test_attention_rounds_once(backend: str, kind: str) -> None:
    """Also of gradients, with delta from the out that the backend keeps, which on triton is in bf16 already."""
    case, bands = masked(kind)
    got = actual(case, bands, backend)
    exact = dense(case, got["out"] if backend == "triton" else None)
    assert drift(got["lse"], exact["lse"]) < 1e-6
    found = {name: coarseness(got[name], exact[name]) for name in ("out", "dq", "dk", "dv")}
    assert max(found.values()) < SLACK, found


def cut(n: int) -> list[slice]:
    """All tokens in n equal parts."""
    return [slice(i * T // n, (i + 1) * T // n) for i in range(n)]


@every_backend
@pytest.mark.parametrize("kind", ["document", "window"])
def test_rounds_do_not_round(backend: str, kind: str) -> None:
    """Two blocks of queries against three of keys: every sum has several rounds."""
    case, (mask,) = masked(kind)
    rounds, dout = choose_rounds(backend, case.q), case.dout
    out, lse = torch.full((T, 4, 16), math.nan), torch.full((4, T), -math.inf)
    dq, dk, dv = torch.zeros(T, 4, 16), torch.zeros(T, 2, 16), torch.zeros(T, 2, 16)
    blocks = []
    for rows, keys in itertools.product(cut(2), cut(3)):
        ends = (x[rows].clamp(keys.start, keys.stop) - keys.start for x in (mask.k_start, mask.k_end))
        blocks.append((rows, keys, IntervalMask.from_rows(*ends, keys.stop - keys.start)))
    for rows, keys, block in blocks:
        rounds.forward(case.q[rows], case.k[keys], case.v[keys], block, out[rows], lse[:, rows], case.scale)
    stats = rounds.stats(out, dout, lse)
    for rows, keys, block in blocks:
        part = rounds.part(stats, rows)
        q, k, v, do = case.q[rows], case.k[keys], case.v[keys], dout[rows]
        rounds.backward(q, k, v, do, part, block, dq[rows], dk[keys], dv[keys], case.scale)
    exact = dense(case)
    found = {name: drift(got, exact[name]) for name, got in zip(NAMES, (out, lse, dq, dk, dv))}
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("backend", MERGES)
@pytest.mark.parametrize("n", [2, 5, 9])
def test_merge_rounds_once(backend: str, n: int) -> None:
    """n partials in bf16, all at once and one after the other."""
    join, join_into = merge, merge_into
    if backend == "triton":
        from kernels.merge.triton_merge import merge_into_triton as join_into
        from kernels.merge.triton_merge import merge_triton as join
    g = torch.Generator().manual_seed(0)
    outs = [torch.randn(40, 4, 16, generator=g).bfloat16().requires_grad_() for _ in range(n)]
    lses = [torch.randn(4, 40, generator=g).requires_grad_() for _ in range(n)]
    dout = torch.randn(40, 4, 16, generator=g).bfloat16()
    exact_outs = [x.detach().double().requires_grad_() for x in outs]
    exact_lses = [x.detach().double().requires_grad_() for x in lses]
    weights = torch.stack(exact_lses).softmax(0).transpose(1, 2)[..., None]
    exact, log = (weights * torch.stack(exact_outs)).sum(0), torch.stack(exact_lses).detach().logsumexp(0)
    wants = torch.autograd.grad(exact, [*exact_outs, *exact_lses], dout.double())
    out, lse = join(outs, lses)
    grads = torch.autograd.grad(out, [*outs, *lses], dout)
    out, lse, exact = out.detach(), lse.detach(), exact.detach()
    assert drift(lse, log) < 1e-6
    assert coarseness(out, exact) < SLACK
    assert all(coarseness(grad, want) < SLACK for grad, want in zip(grads[:n], wants[:n]))
    assert all(drift(grad, want) < 1e-5 for grad, want in zip(grads[n:], wants[n:]))
    out, lse = torch.zeros(40, 4, 16), torch.full((4, 40), -math.inf)
    for part, part_lse in zip(outs, lses):
        join_into(out, lse, part.detach(), part_lse.detach())
    assert max(drift(out, exact), drift(lse, log)) < 1e-6
