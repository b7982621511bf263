"""Attention and its gradients written out in float64 for dense allowed pairs: no autograd, no interval masks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.api import IntervalMask, attention
from kernels.attention.backends import able_backends

# Triton's kernels are among these in a process that interprets them; test_triton.py starts such processes
every_backend = pytest.mark.parametrize("backend", able_backends(torch.zeros(1)))
every_double_backend = pytest.mark.parametrize("backend", able_backends(torch.zeros(1).double()))


def exact_dtype(backend: str) -> torch.dtype:
    """float64 where the backend computes it, else float32."""
    return torch.float64 if backend in able_backends(torch.zeros(1).double()) else torch.float32


def exact_tolerance(backend: str) -> float:
    """How far results of order 1 may lie from the definition in `exact_dtype`."""
    return 1e-10 if exact_dtype(backend) == torch.float64 else 1e-5


@dataclass
class Case:
    """One call: inputs, allowed pairs [Tq, Tk] (shorter than q and k where those have padding), cotangents, options."""

    q: Tensor
    k: Tensor
    v: Tensor
    allowed: Tensor
    dout: Tensor
    dlse: Tensor | None
    scale: float
    softcap: float | None = None
    sink: Tensor | None = None


def make_case(
    allowed: Tensor,
    heads: tuple[int, int] = (2, 1),
    widths: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float64,
    dlse: bool = True,
    softcap: float | None = None,
    sink: bool = False,
    padding: tuple[int, int] = (0, 0),
    scale: float | None = None,
    seed: int = 0,
) -> Case:
    """Random inputs. Whatever the mask leaves out (padding, blind queries, unseen keys) holds NaN, cotangents too."""
    g = torch.Generator().manual_seed(seed)
    (H, Hkv), (D, Dv) = heads, widths
    Tq, Tk = allowed.shape[0] + padding[0], allowed.shape[1] + padding[1]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    case = Case(
        draw(Tq, H, D),
        draw(Tk, Hkv, D),
        draw(Tk, Hkv, Dv),
        allowed,
        draw(Tq, H, Dv),
        draw(H, Tq).to(torch.float64 if dtype == torch.float64 else torch.float32) if dlse else None,
        D**-0.5 if scale is None else scale,
        softcap,
        draw(H) if sink else None,
    )
    blind = torch.ones(Tq, dtype=torch.bool)
    blind[: allowed.shape[0]] = ~allowed.any(1)
    unseen = torch.ones(Tk, dtype=torch.bool)
    unseen[: allowed.shape[1]] = ~allowed.any(0)
    for x, dead in ((case.q, blind), (case.k, unseen), (case.v, unseen), (case.dout, blind)):
        x[dead] = float("nan")
    if case.dlse is not None:
        case.dlse[:, allowed.shape[0] :] = float("nan")
        if not sink:
            case.dlse[:, blind] = float("nan")
    return case


def expected(case: Case) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv (and dsink) by the definition, one head at a time."""
    n = case.allowed.shape[0]
    H, group = case.q.shape[1], case.q.shape[1] // case.k.shape[1]
    q, k, v, dout = (x.double() for x in (case.q, case.k, case.v, case.dout))
    res = {"out": torch.zeros_like(dout), "lse": torch.full((H, q.shape[0]), -float("inf"), dtype=torch.float64)}
    res |= {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    if case.sink is not None:
        res["dsink"] = torch.zeros(H, dtype=torch.float64)
    for h in range(H):
        g = h // group
        for i in range(n):
            js = case.allowed[i].nonzero().flatten()
            z = k[js, g] @ q[i, h] * case.scale if len(js) else torch.zeros(0, dtype=torch.float64)
            cap = case.softcap
            s = z if cap is None else cap * torch.tanh(z / cap)
            slope = torch.ones_like(z) if cap is None else 1 - torch.tanh(z / cap) ** 2
            logits = s if case.sink is None else torch.cat([s, case.sink[h : h + 1].double()])
            if not len(logits):
                continue
            top = logits.max()
            lse = top + (logits - top).exp().sum().log()
            res["lse"][h, i] = lse
            p = (s - lse).exp()
            dlse = 0.0 if case.dlse is None else case.dlse[h, i].double()
            delta = torch.zeros((), dtype=torch.float64)
            if len(js):
                res["out"][i, h] = p @ v[js, g]
                delta = dout[i, h] @ res["out"][i, h]
                dz = p * (v[js, g] @ dout[i, h] - delta + dlse) * slope * case.scale
                res["dq"][i, h] = dz @ k[js, g]
                res["dk"][js, g] += dz[:, None] * q[i, h]
                res["dv"][js, g] += p[:, None] * dout[i, h]
            if case.sink is not None:
                res["dsink"][h] += (case.sink[h].double() - lse).exp() * (dlse - delta)
    return res


def actual(case: Case, mask: IntervalMask | list[IntervalMask], backend: str) -> dict[str, Tensor]:
    """The same from a backend."""
    leaves = {"dq": case.q, "dk": case.k, "dv": case.v}
    if case.sink is not None:
        leaves["dsink"] = case.sink
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    options: dict[str, Any] = {"softmax_scale": case.scale, "softcap": case.softcap, "sink": leaves.get("dsink")}
    out, lse = attention(leaves["dq"], leaves["dk"], leaves["dv"], mask, backend=backend, **options)
    outputs, cotangents = [out], [case.dout.to(out.dtype)]
    if case.dlse is not None:
        outputs, cotangents = [out, lse], [case.dout.to(out.dtype), case.dlse]
    grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, grads))}


def plain(case: Case) -> dict[str, Tensor]:
    """What plain torch makes of it in the inputs' own precision: matmul, softmax, matmul and autograd."""
    n, m = case.allowed.shape
    group = case.q.shape[1] // case.k.shape[1]
    leaves = {"dq": case.q, "dk": case.k, "dv": case.v}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    sees, seen = case.allowed.any(1), case.allowed.any(0)
    q = torch.where(sees[:, None, None], leaves["dq"][:n], 0).transpose(0, 1)
    k, v = (
        torch.where(seen[:, None, None], leaves[x][:m], 0).repeat_interleave(group, 1).transpose(0, 1)
        for x in ("dk", "dv")
    )
    s = q @ k.transpose(1, 2) * case.scale
    s = torch.where(sees[:, None], s.masked_fill(~case.allowed, -float("inf")), 0)
    lse = s.logsumexp(-1)
    out = torch.where(sees[:, None], s.softmax(-1) @ v, 0).transpose(0, 1)
    outputs, cotangents = [out], [torch.where(sees[:, None, None], case.dout[:n], 0)]
    if case.dlse is not None:
        outputs, cotangents = [out, lse], [*cotangents, torch.where(sees, case.dlse[:, :n], 0).to(lse.dtype)]
    grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
    pad = case.q.shape[0] - n
    out = torch.nn.functional.pad(out.detach(), (0, 0, 0, 0, 0, pad))
    lse = torch.nn.functional.pad(lse.detach().masked_fill(~sees, -float("inf")), (0, pad), value=-float("inf"))
    return {"out": out, "lse": lse, **dict(zip(leaves, grads))}


def error(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference; infinite if an infinity stands elsewhere or there is a NaN."""
    got, want = got.double(), want.double()
    if got.shape != want.shape or not torch.equal(got.isinf(), want.isinf()) or bool(got.isnan().any()):
        return float("inf")
    finite = ~want.isinf()
    return float((got - want)[finite].abs().max()) if bool(finite.any()) else 0.0


def assert_exact(case: Case, mask: IntervalMask | list[IntervalMask], backend: str) -> None:
    """Backend against the definition, in float64 where the backend computes it and in float32 otherwise."""
    if case.q.dtype == torch.float64 != exact_dtype(backend):
        names = ("q", "k", "v", "dout", "dlse", "sink")
        narrow = {name: x.float() for name in names if (x := getattr(case, name)) is not None}
        case = replace(case, **narrow)
    want, got = expected(case), actual(case, mask, backend)
    errors = {name: error(got[name], want[name]) for name in want}
    size = max(1.0, *(float(x[x.isfinite()].abs().max()) for x in want.values() if bool(x.isfinite().any())), 1.0)
    assert max(errors.values()) <= exact_tolerance(backend) * size, errors


def document_pairs(
    q_lengths: list[int],
    k_lengths: list[int] | None = None,
    causal: bool = True,
    reach: tuple[int | None, int | None] = (None, None),
) -> Tensor:
    """Allowed pairs [Tq, Tk] of documents laid end to end, aligned bottom-right, pair by pair."""
    k_lengths = q_lengths if k_lengths is None else k_lengths
    allowed = torch.zeros(sum(q_lengths), sum(k_lengths), dtype=torch.bool)
    row, col = 0, 0
    for n, m in zip(q_lengths, k_lengths, strict=True):
        for i in range(n):
            for j in range(m):
                distance = (i + m - n) - j  # positive: the key is before the query
                seen = not (causal and distance < 0)
                seen &= reach[0] is None or distance <= reach[0]
                seen &= reach[1] is None or -distance <= reach[1]
                allowed[row + i, col + j] = seen
        row, col = row + n, col + m
    return allowed


def cumulative(lengths: list[int]) -> list[int]:
    """[0, n0, n0 + n1, ...]."""
    total = [0]
    for n in lengths:
        total.append(total[-1] + n)
    return total
