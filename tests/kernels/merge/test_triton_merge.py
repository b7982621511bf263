"""The merge kernels against their twin in float64. Interpreted only."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import Tensor

from kernels.compile.runtime import interpreted
from kernels.merge.merge import merge, merge_into

if not interpreted():
    pytest.skip("test_triton.py runs this file in a process that interprets kernels", allow_module_level=True)

from kernels.merge.triton_merge import merge_into_triton, merge_triton

INF = math.inf


def partials(n: int, T: int = 19, H: int = 2, D: int = 5, spread: float = 3.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """fp32 partial results, some of whose rows are empty: -inf or +inf, with a NaN output."""
    g = torch.Generator().manual_seed(seed)
    outs = torch.randn(n, T, H, D, generator=g)
    lses = torch.randn(n, H, T, generator=g) * spread
    for mark in (-INF, INF):
        empty = torch.rand(n, H, T, generator=g) < 0.15
        lses[empty] = mark
        outs[empty.transpose(1, 2)] = math.nan
    lses[:, 0, -1] = -INF
    return outs, lses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "stacked"), [(1, True), (2, False), (3, False), (8, True), (9, True), (9, False)])
def test_against_the_twin(dtype: torch.dtype, n: int, stacked: bool) -> None:
    """Both results and all gradients, for few partials where they lie and for many in one buffer."""
    outs, lses = partials(n)
    outs = outs.to(dtype)
    mine = [x.detach().clone().requires_grad_() for x in (outs, lses)]
    twin = [x.detach().double().requires_grad_() for x in (outs, lses)]
    given = [list(x.unbind(0)) for x in mine] if stacked else [[y.clone() for y in x.unbind(0)] for x in mine]
    out, lse = merge_triton(*given)
    want, want_lse = merge(*twin)
    g = torch.Generator().manual_seed(1)
    dout, dlse = torch.randn(out.shape, generator=g).to(dtype), torch.randn(lse.shape, generator=g)
    grads = torch.autograd.grad((out, lse), mine, (dout, dlse))
    wants = torch.autograd.grad((want, want_lse), twin, (dout.double(), dlse.double()))
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0, "atol": 4 * torch.finfo(dtype).eps}
    )
    torch.testing.assert_close(out.double(), want, **tolerance)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grads[0].double(), wants[0], **tolerance)
    torch.testing.assert_close(grads[1].double(), wants[1], rtol=1e-4, atol=3e-5)


def test_a_thousand_partials() -> None:
    """lses up to +-1e4, n in one pass."""
    g = torch.Generator().manual_seed(0)
    outs, lses = torch.randn(1000, 2, 1, 4, generator=g), (torch.rand(1000, 1, 2, generator=g) - 0.5) * 2e4
    out, lse = merge_triton(list(outs.unbind(0)), list(lses.unbind(0)))
    want, want_lse = merge(outs.double(), lses.double())
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-3)


def test_empty_partials_have_no_gradient() -> None:
    """(-inf, -inf) gives (0, -inf), and gradients that are 0 and not NaN."""
    outs = torch.full((2, 3, 1, 2), math.nan).requires_grad_()
    lses = torch.full((2, 1, 3), -INF).requires_grad_()
    out, lse = merge_triton(list(outs.unbind(0)), list(lses.unbind(0)))
    assert out.abs().max() == 0
    assert bool((lse == -INF).all())
    grads = torch.autograd.grad((out, lse), (outs, lses), (torch.ones_like(out), torch.ones_like(lse)))
    assert all(g.abs().max() == 0 for g in grads)


def test_any_order_agrees() -> None:
    """Within 1e-6, with empty partials among them."""
    outs, lses = partials(6, spread=20.0)
    whole = merge_triton(list(outs), list(lses))
    for order in ([5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3]):
        torch.testing.assert_close(merge_triton(list(outs[order]), list(lses[order])), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("T", [1, 16, 35])
def test_in_place(T: int) -> None:
    """The running result is read before it is overwritten, and a partial that aliases it counts twice."""
    outs, lses = partials(2, T)
    fresh = merge_triton(list(outs), list(lses))
    out, lse = outs[0].clone(), lses[0].clone()
    merge_into_triton(out, lse, outs[1], lses[1])
    torch.testing.assert_close((out, lse), fresh, rtol=0, atol=0)
    twice = merge_triton([out, out.clone()], [lse, lse.clone()])
    merge_into_triton(out, lse, out, lse)
    torch.testing.assert_close((out, lse), twice, rtol=0, atol=0)


def test_in_place_from_half_precision() -> None:
    """A partial that travelled in bf16, into a running result in fp32."""
    outs, lses = partials(2)
    out, lse = outs[0].clone(), lses[0].clone()
    merge_into_triton(out, lse, outs[1].bfloat16(), lses[1])
    torch.testing.assert_close((out, lse), merge([outs[0], outs[1].bfloat16().float()], list(lses)))


def test_nothing_is_written_outside() -> None:
    """Canaries after buffers whose sizes are no multiples of a tile."""
    buffer, lses = torch.full((17 * 3 * 5 + 40,), 7.0), torch.full((3 * 17 + 40,), 7.0)
    out, lse = buffer[: 17 * 3 * 5].view(17, 3, 5), lses[: 3 * 17].view(3, 17)
    merge_into_triton(out, lse, out.clone(), lse.clone())
    assert bool((buffer[17 * 3 * 5 :] == 7).all() and (lses[3 * 17 :] == 7).all())
    torch.testing.assert_close(lse, torch.full((3, 17), 7 + math.log(2)))


@pytest.mark.parametrize("where", ["out", "lse"])
def test_a_nan_is_not_dropped(where: str) -> None:
    """In a partial that counts it reaches the result and the gradients; rows beside it stay whole."""
    outs, lses = torch.randn(2, 20, 2, 5), torch.randn(2, 2, 20)
    (outs[1, 3, 0] if where == "out" else lses[1, 0, 3:4]).fill_(math.nan)
    given = [x.requires_grad_() for x in (outs, lses)]
    out, lse = merge_triton(*(list(x.unbind(0)) for x in given))
    assert bool(out[3, 0].isnan().all())
    assert bool(lse[0, 3].isnan()) == (where == "lse")
    assert int(out.isnan().any(-1).sum()) == 1
    grads = torch.autograd.grad((out, lse), given, (torch.ones_like(out), torch.ones_like(lse)))
    assert bool(grads[1][1, 0, 3].isnan())
    assert int(grads[1].isnan().any(0).sum()) == 1


def test_in_place_refuses_other_shapes() -> None:
    """A shorter partial would be read beyond its end."""
    out, lse = torch.zeros(5, 2, 8), torch.zeros(2, 5)
    with pytest.raises(ValueError, match=r"the partial \(3, 2, 8\)"):
        inspect.unwrap(merge_into)(out, lse, torch.zeros(3, 2, 8), torch.zeros(2, 3))  # without the tests' own checks
