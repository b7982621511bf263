"""Merging partial attention by log-sum-exp."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.merge.merge import check_partials, merge, merge_into

INF = float("inf")


def partials(n: int, T: int = 3, H: int = 2, D: int = 4, spread: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    outs = torch.randn(n, T, H, D, generator=g, dtype=torch.float64)
    return outs, torch.randn(n, H, T, generator=g, dtype=torch.float64) * spread


@given(st.integers(1, 6), st.integers(0, 4), st.floats(0.1, 300.0), st.integers(0, 99))
def test_against_softmax_weights(n: int, T: int, spread: float, seed: int) -> None:
    """The average under softmax over the lses, whatever their spread; stacked and listed alike."""
    outs, lses = partials(n, T, spread=spread, seed=seed)
    out, lse = merge(outs, lses)
    weights = lses.softmax(0).transpose(1, 2)[..., None]
    torch.testing.assert_close(out, (outs * weights).sum(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, lses.logsumexp(0), rtol=1e-12, atol=1e-12)
    listed = merge(list(outs), list(lses))
    assert torch.equal(listed[0], out)
    assert torch.equal(listed[1], lse)


@given(st.integers(0, 99), st.permutations(range(4)), st.integers(1, 3))
def test_any_order_any_grouping(seed: int, order: list[int], cut: int) -> None:
    """Associative and commutative, with empty partials among them."""
    outs, lses = partials(4, spread=20.0, seed=seed)
    lses[seed % 4, 0, :2] = -INF
    lses[:, 1, 1] = -INF
    whole = merge(outs, lses)
    first, second = (merge(outs[part], lses[part]) for part in (order[:cut], order[cut:]))
    pair = merge([first[0], second[0]], [first[1], second[1]])
    torch.testing.assert_close(pair, whole, rtol=1e-11, atol=1e-11)


def test_identity() -> None:
    """(0, -inf) changes nothing, to the bit."""
    outs, lses = partials(1)
    out, lse = merge([outs[0], torch.zeros_like(outs[0])], [lses[0], torch.full_like(lses[0], -INF)])
    assert torch.equal(out, outs[0])
    assert torch.equal(lse, lses[0])


@pytest.mark.parametrize("mark", [-INF, INF])
def test_empty_partials_weigh_nothing(mark: float) -> None:
    """Some kernels mark a row without keys by -inf, others by +inf, and leave its output undefined: both weigh 0."""
    outs, lses = partials(3)
    outs[1], lses[1] = float("nan"), mark
    outs.requires_grad_()
    lses.requires_grad_()
    out, lse = merge(outs, lses)
    torch.testing.assert_close((out, lse), merge(outs[::2], lses[::2]))
    (out.sum() + lse.sum()).backward()
    assert outs.grad is not None
    assert lses.grad is not None
    assert outs.grad[1].abs().max() == 0
    assert lses.grad[1].abs().max() == 0
    assert bool(outs.grad.isfinite().all() and lses.grad.isfinite().all())


def test_two_empty_partials_stay_empty() -> None:
    """(-inf) - (-inf) must not appear: the result is (0, -inf) and gradients are 0, not NaN."""
    outs = torch.full((2, 1, 1, 2), float("nan")).requires_grad_()
    lses = torch.full((2, 1, 1), -INF).requires_grad_()
    out, lse = merge(outs, lses)
    assert out.tolist() == [[[0.0, 0.0]]]
    assert lse.tolist() == [[-INF]]
    out.sum().backward()
    assert outs.grad is not None
    assert outs.grad.abs().max() == 0
    assert lses.grad is not None
    assert lses.grad.abs().max() == 0


def test_far_apart_lses_do_not_overflow() -> None:
    """log(1 + exp(200)) overflows fp32 when written so; the answer is 200."""
    outs = torch.stack([torch.zeros(1, 1, 1), torch.ones(1, 1, 1)])
    out, lse = merge(outs, torch.tensor([[[0.0]], [[200.0]]]))
    assert (out.item(), lse.item()) == (1.0, 200.0)
    out, lse = merge(outs, torch.tensor([[[1e4]], [[-1e4]]]))
    assert (out.item(), lse.item()) == (0.0, 1e4)


def test_a_thousand_partials() -> None:
    """lses up to +-1e4 in fp32, n in one pass."""
    g = torch.Generator().manual_seed(0)
    outs = torch.randn(1000, 2, 2, 3, generator=g)
    lses = (torch.rand(1000, 2, 2, generator=g) - 0.5) * 2e4
    out, lse = merge(outs, lses)
    want, want_lse = merge(outs.double(), lses.double())
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-3)


def test_equal_partials_average() -> None:
    """Weights 1/n and lse + log n."""
    outs = torch.arange(4.0)[:, None, None, None]
    out, lse = merge(outs, torch.zeros(4, 1, 1))
    assert out.item() == pytest.approx(1.5)
    assert lse.item() == pytest.approx(math.log(4))


def test_aliased_inputs() -> None:
    """The same buffer given twice, and results that share memory with no input."""
    outs, lses = partials(1)
    before = outs[0].clone(), lses[0].clone()
    out, lse = merge([outs[0], outs[0]], [lses[0], lses[0]])
    fresh = merge([outs[0].clone(), outs[0].clone()], [lses[0].clone(), lses[0].clone()])
    assert torch.equal(out, fresh[0])
    assert torch.equal(lse, fresh[1])
    out.zero_()
    lse.zero_()
    one = merge([outs[0]], [lses[0]])
    one[0].zero_()
    one[1].zero_()
    assert torch.equal(outs[0], before[0])
    assert torch.equal(lses[0], before[1])


@given(st.integers(1, 3), st.integers(0, 20))
@settings(max_examples=8)
def test_gradcheck(n: int, seed: int) -> None:
    """Through out and lse, in outs and lses."""
    outs, lses = (x.requires_grad_() for x in partials(n, 2, 2, 2, seed=seed))
    assert torch.autograd.gradcheck(lambda *x: merge(x[:n], x[n:]), (*outs.unbind(0), *lses.unbind(0)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_merged_in_fp32(dtype: torch.dtype) -> None:
    """A result in the dtype of the outputs, rounded once; lse in fp32."""
    outs, lses = partials(5)
    outs = outs.to(dtype)
    out, lse = merge(outs, lses.float())
    want, _ = merge(outs.double(), lses.float().double())
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_heads_equal_tokens() -> None:
    """With H = T a transposed lse has the right shape and must still be read as [H, T]."""
    outs, lses = partials(2, T=3, H=3)
    out, _ = merge(outs, lses)
    w = lses.softmax(0)
    assert out[2, 0, 0].item() == pytest.approx((w[:, 0, 2] * outs[:, 2, 0, 0]).sum().item())


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], "0 outputs and 0 lses"),
        ([torch.zeros(3, 2, 4)], [], "1 outputs and 0 lses"),
        ([torch.zeros(3, 2, 4)], [torch.zeros(3, 2)], r"lse \(3, 2\), but \[H, T\] = \(2, 3\)"),
        ([torch.zeros(3, 2, 4), torch.zeros(3, 2, 5)], [torch.zeros(2, 3)] * 2, r"partial 1 has out \(3, 2, 5\)"),
        ([torch.zeros(3, 2, 4), torch.zeros(5, 2, 4)], [torch.zeros(2, 3)] * 2, r"partial 1 has out \(5, 2, 4\)"),
        ([torch.zeros(3, 2, 4), torch.zeros(3, 2, 4).half()], [torch.zeros(2, 3)] * 2, "float16"),
        ([torch.zeros(3, 2)], [torch.zeros(2, 3)], r"must be \[T, H, D\]"),
    ],
)
def test_refusals(outs: list[Tensor], lses: list[Tensor], message: str) -> None:
    """One documented layout, lse [H, T]; others are refused with the shapes."""
    with pytest.raises(ValueError, match=message):
        check_partials(outs, lses)


@pytest.mark.parametrize("mark", [INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_place_equals_fresh(dtype: torch.dtype, mark: float) -> None:
    """Rows that weigh nothing may hold NaN on either side; where both do, the result is (0, -inf)."""
    outs, lses = (x.to(dtype) for x in partials(2, T=5, H=2))
    outs[0, :2], lses[0, :, :2] = math.nan, -INF
    outs[1, 1:3], lses[1, :, 1:3] = math.nan, mark
    want = merge(outs, lses)
    out, lse = outs[0].clone(), lses[0].clone()
    merge_into(out, lse, outs[1], lses[1])
    torch.testing.assert_close((out, lse), want, rtol=1e-6, atol=0)
    assert out[1].abs().max() == 0
    merge_into(out, lse, out, lse)  # aliased
    torch.testing.assert_close((out, lse), (want[0], want[1] + math.log(2)), rtol=1e-6, atol=1e-6)


def test_in_place_from_half_precision_into_rows() -> None:
    """A partial that travelled in bf16, into some rows and heads of a running result."""
    outs, lses = (x.float() for x in partials(2, T=6, H=3))
    out, lse = outs[0].clone(), lses[0].clone()
    merge_into(out[2:5, 1:], lse[1:, 2:5], outs[1, 2:5, 1:].bfloat16(), lses[1, 1:, 2:5])
    want, want_lse = merge([outs[0], outs[1].bfloat16().float()], list(lses))
    torch.testing.assert_close((out[2:5, 1:], lse[1:, 2:5]), (want[2:5, 1:], want_lse[1:, 2:5]))
    assert torch.equal(out[:2], outs[0, :2])
    assert torch.equal(lse[0], lses[0, 0])


def test_in_place_refusals() -> None:
    """Sums in half precision, and shapes that disagree."""
    out, lse = torch.zeros(3, 2, 4), torch.zeros(2, 3)
    merge = inspect.unwrap(merge_into)  # without the checks of the tests
    with pytest.raises(ValueError, match=r"fp32 or fp64, but out is torch\.float16 and lse torch\.float32"):
        merge(out.half(), lse, out, lse)
    with pytest.raises(ValueError, match=r"lses \(2, 3\) and \(3, 2\); give both as"):
        merge(out, lse, out, lse.T)
