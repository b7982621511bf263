"""Every backend against attention by its definition: a closed form, then sweeps over layouts and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.api import IntervalMask, attention, merge
from kernels.attention.backends import able_backends
from tests.kernels.oracle import (
    Case,
    actual,
    assert_exact,
    cumulative,
    document_pairs,
    error,
    every_backend,
    every_double_backend,
    exact_dtype,
    exact_tolerance,
    expected,
    make_case,
    plain,
)

INTERPRETED = "triton" in able_backends(torch.zeros(1))  # a second for each example
sweep = settings(max_examples=25 if INTERPRETED else 50, suppress_health_check=[HealthCheck.too_slow])


@every_backend
def test_closed_form(backend: str) -> None:
    """Documents of 3, 1 and 4 tokens, equal logits: averages of what came before, counts as exp(lse)."""
    mask = IntervalMask.from_cu_seqlens([0, 3, 4, 8])
    q, k = torch.zeros(8, 1, 16), torch.ones(8, 1, 16)
    v = torch.arange(8.0)[:, None, None].expand(8, 1, 16).clone().requires_grad_()
    out, lse = attention(q, k, v, mask, backend=backend)
    out.sum().backward()
    assert v.grad is not None
    want = torch.tensor([0, 0.5, 1, 3, 4, 4.5, 5, 5.5])
    torch.testing.assert_close(out, want[:, None, None].expand(8, 1, 16))
    torch.testing.assert_close(lse.exp(), torch.tensor([[1.0, 2, 3, 1, 1, 2, 3, 4]]))
    dv = torch.tensor([1.833333, 0.833333, 0.333333, 1, 2.083333, 1.083333, 0.583333, 0.25])
    torch.testing.assert_close(v.grad, dv[:, None, None].expand(8, 1, 16))


@dataclass
class Layout:
    """A description of a mask, apart from the mask itself so that drawing one calls nothing of ours."""

    kind: str
    nq: list[int]
    nk: list[int]
    causal: bool
    window: int | None
    prefix: int

    def build(self) -> tuple[IntervalMask | list[IntervalMask], Tensor]:
        """The mask and its allowed pairs; "bands" is a window and each document's first tokens, as two bands."""
        reach = (None, None) if self.window is None else (self.window - 1, self.window - 1)
        cu = cumulative(self.nq)
        mask = IntervalMask.from_cu_seqlens(cu, cumulative(self.nk), causal=self.causal, window=self.window)
        allowed = document_pairs(self.nq, self.nk, self.causal, reach)
        if self.kind != "bands":
            return mask, allowed
        first = torch.tensor([a for a, n in zip(cu, self.nq) for _ in range(n)], dtype=torch.int32)
        second = IntervalMask.from_rows(first, torch.minimum(first + self.prefix, mask.k_start), mask.Tk)
        for a, n in zip(cu, self.nq):
            for i in range(a, a + n):
                allowed[i, a : min(a + self.prefix, i + 1)] = True
        return [mask, second], allowed


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Square, rectangular, windowed, banded and long documents; empty and one-token ones among them."""
    kind = draw(st.sampled_from(["square", "rectangular", "window", "bands", "long"]))
    size = st.one_of(st.sampled_from([0, 1]), st.integers(0, 30))
    nq = draw(st.lists(size, max_size=5)) if kind != "long" else [draw(st.integers(97, 180)), draw(st.integers(0, 20))]
    nk = draw(st.lists(size, min_size=len(nq), max_size=len(nq))) if kind == "rectangular" else nq
    causal = draw(st.booleans()) or kind == "bands"
    window = draw(st.integers(1, 90)) if kind in ("window", "bands", "long") else None
    return Layout(kind, nq, nk, causal, window, draw(st.integers(1, 4)))


options = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
        "widths": st.sampled_from([(8, 8), (5, 3), (4, 9), (1, 1), (16, 15)]),
        "dlse": st.booleans(),
        "softcap": st.sampled_from([None, None, 2.5]),
        "sink": st.booleans(),
        "padding": st.sampled_from([(0, 0), (3, 0), (2, 5)]),
        "scale": st.sampled_from([None, 0.1, -0.7]),
        "seed": st.integers(0, 99),
    }
)


@every_backend
@sweep
@given(layout=layouts(), option=options)
def test_exact(backend: str, layout: Layout, option: dict[str, Any]) -> None:
    """out, lse and all gradients within 1e-10 (1e-5 in float32), with NaN wherever the mask does not look."""
    mask, allowed = layout.build()
    assert_exact(make_case(allowed, **option), mask, backend)


@pytest.mark.deep
@pytest.mark.timeout(2400)
@every_backend
@settings(max_examples=300 if INTERPRETED else 1500, suppress_health_check=[HealthCheck.too_slow])
@given(layout=layouts(), option=options)
def test_exact_deep(backend: str, layout: Layout, option: dict[str, Any]) -> None:
    """The same sweep, longer."""
    mask, allowed = layout.build()
    assert_exact(make_case(allowed, **option), mask, backend)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(layout=layouts(), seed=st.integers(0, 99), dlse=st.booleans(), widths=st.sampled_from([(8, 8), (16, 5)]))
def test_precision(
    backend: str,
    dtype: torch.dtype,
    layout: Layout,
    seed: int,
    dlse: bool,
    widths: tuple[int, int],
) -> None:
    """At most twice the error that plain torch makes in the same precision."""
    mask, allowed = layout.build()
    case = make_case(allowed, (2, 1), widths, dtype, dlse=dlse, padding=(1, 2), seed=seed)
    want, got, torchs = expected(case), actual(case, mask, backend), plain(case)
    for name, exact in want.items():
        scale = float(exact[exact.isfinite()].abs().max()) if bool(exact.isfinite().any()) else 0.0
        precision = torch.float32 if name == "lse" else dtype
        allowance = 2 * error(torchs[name], exact) + 2 * torch.finfo(precision).eps * scale + 5e-6
        assert error(got[name], exact) <= allowance, name


@every_backend
@pytest.mark.parametrize("width", [16, 32, 64, 80, 96, 128, 256])
def test_every_channel_counts(backend: str, width: int) -> None:
    """Kernels written for one head width have silently used the first 64 channels of wider heads."""
    sizes = [5, 1, 9]
    mask = IntervalMask.from_cu_seqlens(cumulative(sizes))
    assert_exact(make_case(document_pairs(sizes), widths=(width, width)), mask, backend)


@every_backend
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("nq", "nk"), [([70, 3], [130, 5]), ([130, 0], [70, 4]), ([100], [100]), ([1], [300])])
def test_both_masks_and_unequal_lengths(backend: str, causal: bool, nq: list[int], nk: list[int]) -> None:
    """Backward passes have been wrong for full masks, and for fewer queries than keys."""
    mask = IntervalMask.from_cu_seqlens(cumulative(nq), cumulative(nk), causal=causal)
    assert_exact(make_case(document_pairs(nq, nk, causal)), mask, backend)


@every_backend
@pytest.mark.parametrize("stride", [2, 3])
def test_shards_of_a_sequence(backend: str, stride: int) -> None:
    """Striped and zigzag shards: queries of one rank against keys of another."""
    sizes, T = [60, 3, 87, 150], 300
    whole, cu = document_pairs(sizes), cumulative(sizes)
    zigzag = list(range(50)) + list(range(250, 300))
    for q_at, k_at in (
        (list(range(0, T, stride)), list(range(1, T, stride))),
        (list(range(T)), list(range(0, T, stride))),
        (zigzag, list(range(50, 250))),
        (list(range(50, 250)), zigzag),
    ):
        mask = IntervalMask.from_positions(q_at, k_at, cu[:-1], cu[1:])
        assert_exact(make_case(whole[q_at][:, k_at]), mask, backend)


@every_double_backend
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradcheck(backend: str, softcap: float | None) -> None:
    """Numerical derivatives of both results in q, k, v and the sink."""
    mask = IntervalMask.from_cu_seqlens([0, 2, 3, 7], window=3)
    case = make_case(document_pairs([2, 1, 4], reach=(2, 2)), widths=(3, 2), sink=True)
    assert case.sink is not None
    leaves = tuple(x.requires_grad_() for x in (case.q, case.k, case.v, case.sink))

    def call(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, mask, softcap=softcap, sink=sink, backend=backend)

    assert torch.autograd.gradcheck(call, leaves)


@every_backend
def test_bitwise_repeatable(backend: str) -> None:
    """Two runs give the same bits, backward too."""
    sizes = [200, 1, 17, 40, 100]
    mask = IntervalMask.from_cu_seqlens(cumulative(sizes), window=80)
    case = make_case(torch.ones(358, 358, dtype=torch.bool), dtype=torch.float32, scale=0.3)
    first, second = actual(case, mask, backend), actual(case, mask, backend)
    assert all(torch.equal(first[name], second[name]) for name in first)


@every_backend
def test_non_contiguous_inputs(backend: str) -> None:
    """Slices of a fused projection, transposed heads, columns apart, and an expanded cotangent."""
    sizes = [100, 7, 33]
    mask = IntervalMask.from_cu_seqlens(cumulative(sizes))
    case = make_case(document_pairs(sizes), (2, 2), (8, 8), dlse=False)
    fused = torch.cat([case.q, case.k, case.v], -1).to(exact_dtype(backend))
    strided = Case(*fused.split(8, -1), case.allowed, case.dout, None, case.scale)
    assert_exact(strided, mask, backend)
    case.q, case.k, case.v = fused.split(8, -1)
    strided.q = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    strided.k = case.k.transpose(1, 2).contiguous().transpose(1, 2)
    strided.v = case.v[:, :1].expand(-1, 2, -1)
    strided.dout = torch.ones(1, 1, 1, dtype=fused.dtype).expand(140, 2, 8)
    assert_exact(strided, mask, backend)


@every_backend
@pytest.mark.parametrize(("Tq", "Tk"), [(0, 0), (0, 5), (4, 0)])
def test_empty_inputs(backend: str, Tq: int, Tk: int) -> None:
    """No queries or no keys: torch's flash operator would end the process with an arithmetic fault."""
    mask = IntervalMask.from_cu_seqlens([0, Tq], [0, Tk], causal=False)
    for padding in ((0, 0), (3, 2)):
        for sink in (False, True):
            case = make_case(torch.zeros(Tq, Tk, dtype=torch.bool), padding=padding, sink=sink)
            assert_exact(case, mask, backend)


@every_backend
@pytest.mark.parametrize("cut", ["lse", "out"])
def test_one_result_alone(backend: str, cut: str) -> None:
    """A loss on the lse only, or on out only, with gradients for some inputs only."""
    mask = IntervalMask.from_cu_seqlens([0, 6])
    case = make_case(document_pairs([6]), dtype=exact_dtype(backend))
    if cut == "lse":
        case.dout = torch.zeros_like(case.dout)
    else:
        case.dlse = None
    want = expected(case)
    k = case.k.clone().requires_grad_()
    out, lse = attention(case.q, k, case.v, mask, softmax_scale=case.scale, backend=backend)
    loss = (lse * case.dlse).sum() if case.dlse is not None else (out * case.dout).sum()
    loss.backward()
    assert k.grad is not None
    assert error(k.grad, want["dk"]) < exact_tolerance(backend)


@every_backend
def test_sink_of_minus_infinity_is_no_sink(backend: str) -> None:
    """It takes no probability, and its gradient is 0, not NaN, also at queries without keys."""
    mask = IntervalMask.from_cu_seqlens([0, 4], [0, 2])
    q, k, v = (torch.randn(n, 2, 4) for n in (4, 2, 2))
    sink = torch.full((2,), -float("inf")).requires_grad_()
    out, lse = attention(q, k, v, mask, sink=sink, backend=backend)
    plain_out, plain_lse = attention(q, k, v, mask, backend=backend)
    torch.testing.assert_close((out, lse), (plain_out, plain_lse))
    out.sum().backward()
    assert sink.grad is not None
    assert sink.grad.tolist() == [0.0, 0.0]


def test_torch_memory_is_linear() -> None:
    """A 6,000-token document: the largest tensor that the torch backend saves or plans stays far below T * T."""
    T = 6000
    mask = IntervalMask.from_cu_seqlens([0, T], window=100)
    q = torch.randn(T, 1, 4, requires_grad=True)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        attention(q, q, q, mask, backend="torch")
    assert 0 < max(saved) <= T * 8


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_autocast_does_not_reach_the_arithmetic(backend: str, softcap: float | None) -> None:
    """Under bf16 autocast fp32 inputs keep fp32 results: the precision is the contract's, not the caller's."""
    q, k, v = torch.randn(3, 40, 2, 16, generator=torch.Generator().manual_seed(0))
    mask = IntervalMask.from_cu_seqlens([0, 25, 40])
    wanted = attention(q, k, v, mask, softcap=softcap, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(q, k, v, mask, softcap=softcap, backend=backend)
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(wanted, found))


def test_double_backward_is_refused_where_it_would_be_wrong() -> None:
    """A gradient of a gradient would silently lack terms."""
    q = torch.randn(8, 1, 4, requires_grad=True)
    out, _ = attention(q, q, q, IntervalMask.from_cu_seqlens([0, 8]), backend="torch")
    with pytest.raises(ValueError, match="differentiable once"):
        torch.autograd.grad(out.sum(), q, create_graph=True)
    part = torch.zeros(8, 1, 4, requires_grad=True)
    merged, _ = merge([part, part], [torch.zeros(1, 8)] * 2)
    with pytest.raises(ValueError, match="differentiable once"):
        torch.autograd.grad(merged.sum(), part, create_graph=True)


def test_bad_sinks_and_fractional_boundaries_are_refused() -> None:
    q = torch.randn(4, 2, 4)
    with pytest.raises(ValueError, match="sink holds a NaN or"):
        attention(q, q, q, IntervalMask.from_cu_seqlens([0, 4]), sink=torch.tensor([0.0, float("inf")]))
    with pytest.raises(TypeError):
        IntervalMask.from_documents([0], [1.9], 4)
    with pytest.raises(TypeError):
        IntervalMask.from_cu_seqlens([0, 4], window=2.5)
    with pytest.raises(TypeError):
        IntervalMask.from_cu_seqlens([0, 4], window=(2.5, 0))


@every_backend
def test_flat_inputs_may_be_columns(backend: str) -> None:
    """A sink and a mask's ends that are columns of wider tensors, or one value expanded: strides other than 1."""
    mask = IntervalMask.from_cu_seqlens([0, 9, 40])
    q, k, v = torch.randn(3, 40, 3, 8).unbind(0)
    ends = torch.stack([mask.k_start, mask.k_end], 1)
    columns = IntervalMask.from_rows(ends[:, 0], ends[:, 1], 40)
    for sink in (torch.randn(3, 2)[:, 0], torch.tensor(0.7).expand(3)):
        got = attention(q, k, v, columns, sink=sink, backend=backend)
        want = attention(q, k, v, mask, sink=sink.contiguous(), backend="reference")
        torch.testing.assert_close(got, want)


@every_backend
def test_a_nan_query_shows_in_both_results(backend: str) -> None:
    """An lse that calls such a row empty would let the next merge drop it without a word."""
    mask = IntervalMask.from_cu_seqlens([0, 9, 40])
    q, k, v = torch.randn(3, 40, 2, 8).unbind(0)
    q[20, 1] = float("nan")
    out, lse = attention(q, k, v, mask, backend=backend)
    assert bool(out[20, 1].isnan().all() and lse[1, 20].isnan())
    assert int(out.isnan().any(-1).sum()) == int(lse.isnan().sum()) == 1
