"""Failures that users of attention kernels have met, each shown not to happen here."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from kernels.api import IntervalMask, attention, flash_attn_varlen_func, merge
from tests.kernels.oracle import (
    Case,
    actual,
    assert_exact,
    cumulative,
    document_pairs,
    error,
    every_backend,
    exact_dtype,
    exact_tolerance,
    expected,
    make_case,
)


def rectangle(cu_q: list[int], cu_k: list[int], causal: bool) -> tuple[IntervalMask, torch.Tensor]:
    """The mask and the allowed pairs of rectangular documents."""
    nq, nk = ([b - a for a, b in pairwise(cu)] for cu in (cu_q, cu_k))
    return IntervalMask.from_cu_seqlens(cu_q, cu_k, causal=causal), document_pairs(nq, nk, causal)


@every_backend
@pytest.mark.parametrize("causal", [True, False])
def test_one_query_per_document_and_an_empty_document(backend: str, causal: bool) -> None:
    """A decoding shortcut that takes a longest query of 1 to mean one query in every document miscounts tokens."""
    mask, allowed = rectangle([0, 1, 1, 2], [0, 3, 3, 8], causal)
    assert_exact(make_case(allowed, (9, 3), (64, 64)), mask, backend)
    case = make_case(allowed, (9, 3), (64, 64), torch.bfloat16, dlse=False)
    got = actual(case, mask, backend)
    assert all(error(got[name], want) < 0.05 for name, want in expected(case).items())


@every_backend
def test_empty_query_documents_scaled_down(backend: str) -> None:
    """Keys of a document without queries: their gradients are exactly 0 (a backward kernel read beyond its buffers)."""
    mask, allowed = rectangle([0, 0, 12, 20, 20], [0, 25, 42, 51, 81], True)
    case = make_case(allowed, widths=(256, 256), dtype=exact_dtype(backend))
    assert_exact(case, mask, backend)
    got = actual(case, mask, backend)
    for name in ("dk", "dv"):
        assert got[name][:25].abs().max() == 0
        assert got[name][51:].abs().max() == 0


def test_empty_query_documents_in_full() -> None:
    """The reported sizes: queries [0, 0, 1208, 2048, 2048], keys [0, 2538, 4280, 5120, 8192], width 256."""
    cu_q, cu_k = [0, 0, 1208, 2048, 2048], [0, 2538, 4280, 5120, 8192]
    mask = IntervalMask.from_cu_seqlens(cu_q, cu_k)
    g = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(2048, 1, 256, generator=g) for _ in range(2))
    k, v = (torch.randn(8192, 1, 256, generator=g).requires_grad_() for _ in range(2))
    out, _ = attention(q, k, v, mask, backend="torch")
    dk, dv = torch.autograd.grad(out, (k, v), dout)
    for a, b, c, d in ((0, 1208, 2538, 4280), (1208, 2048, 4280, 5120)):
        late = torch.arange(d - c) > torch.arange(b - a)[:, None] + (d - c) - (b - a)
        bias = torch.zeros(b - a, d - c).masked_fill(late, -math.inf)
        one = torch.nn.functional.scaled_dot_product_attention(q[None, a:b, 0], k[None, c:d, 0], v[None, c:d, 0], bias)
        torch.testing.assert_close(out[None, a:b, 0], one, rtol=1e-4, atol=1e-5)
    for grad in (dk, dv):
        assert bool(grad.isfinite().all())
        assert grad[:2538].abs().max() == 0
        assert grad[5120:].abs().max() == 0
        assert grad[2538:5120].abs().max() > 0


@every_backend
def test_documents_without_keys(backend: str) -> None:
    """Queries whose document has no key: out 0 and lse -inf, neighbours untouched."""
    mask, allowed = rectangle([0, 3, 5, 9], [0, 4, 4, 6], False)
    case = make_case(allowed, dtype=exact_dtype(backend))
    assert_exact(case, mask, backend)
    got = actual(case, mask, backend)
    assert got["out"][3:5].abs().max() == 0
    assert bool((got["lse"][:, 3:5] == -math.inf).all())


@every_backend
def test_causal_with_more_queries_than_keys(backend: str) -> None:
    """Fully masked rows gave NaN in dq: 76, 34 and 146 queries with one key each."""
    mask, allowed = rectangle([0, 76, 110, 256], [0, 1, 2, 3], True)
    assert int(allowed.any(1).sum()) == 3
    case = make_case(allowed, (1, 1), (32, 32), dtype=exact_dtype(backend))
    assert_exact(case, mask, backend)
    assert actual(case, mask, backend)["dq"][:75].abs().max() == 0


@every_backend
def test_a_single_key(backend: str) -> None:
    """Softmax over one key: out = v, dv = dout, and dq = dk = 0 exactly (it was NaN)."""
    case = make_case(document_pairs([1]), (1, 1), (16, 16), torch.float32, dlse=False)
    got = actual(case, IntervalMask.from_cu_seqlens([0, 1]), backend)
    torch.testing.assert_close(got["out"], case.v)
    torch.testing.assert_close(got["dv"], case.dout)
    assert max(got["dq"].abs().max(), got["dk"].abs().max()) < 1e-6


@every_backend
def test_causal_aligns_bottom_right(backend: str) -> None:
    """2 queries on 4 keys are the last two positions: the first sees 3 keys, not 1."""
    q, k, v = torch.zeros(2, 1, 4), torch.zeros(4, 1, 4), torch.arange(4.0)[:, None, None].expand(4, 1, 4)
    out, _ = attention(q, k, v, IntervalMask.from_cu_seqlens([0, 2], [0, 4]), backend=backend)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([1.0, 1.5]))


@every_backend
def test_padding_holds_nan(backend: str) -> None:
    """Rows after cu_seqlens[-1] were never written; recycled memory held NaN, which poisoned the weights' gradients."""
    mask = IntervalMask.from_cu_seqlens([0, 90, 100])
    case = make_case(document_pairs([90, 10]), padding=(28, 28), dtype=exact_dtype(backend))
    assert bool(case.q[100:].isnan().all() and case.k[100:].isnan().all() and case.dout[100:].isnan().all())
    got = actual(case, mask, backend)
    for name in ("out", "dq", "dk", "dv"):
        assert got[name][100:].abs().max() == 0, name
    assert bool((got["lse"][:, 100:] == -math.inf).all())
    weight_grad = torch.einsum("thd,the->de", got["dq"], torch.where(case.q.isnan(), 0, case.q))
    assert bool(weight_grad.isfinite().all())


@every_backend
def test_gradient_slice_of_a_wide_buffer(backend: str) -> None:
    """dout as a column slice of a wide concatenation: the token stride is the buffer's, not H * D."""
    case = make_case(document_pairs([40, 3]), (4, 2), (8, 8), dlse=False, dtype=exact_dtype(backend))
    wide = torch.full((43, 4 * 8 * 7), float("nan"), dtype=case.dout.dtype)
    inside = wide[:, 32:64].unflatten(1, (4, 8))
    inside.copy_(case.dout)
    sliced = Case(case.q, case.k, case.v, case.allowed, inside, None, case.scale)
    assert inside.stride(0) == 224
    assert_exact(sliced, IntervalMask.from_cu_seqlens([0, 40, 43]), backend)


@every_backend
def test_a_part_without_keys_has_lse_minus_infinity(backend: str) -> None:
    """A later part that shows some rows no key must say so: a finite lse there corrupts the merged result."""
    whole = document_pairs([6, 5])
    case = make_case(whole, dlse=False, dtype=exact_dtype(backend))
    parts = []
    for columns in (slice(0, 4), slice(4, 11)):
        at = list(range(11))[columns]
        mask = IntervalMask.from_positions(list(range(11)), at, [0, 6], [6, 11])
        parts.append(attention(case.q, case.k[at], case.v[at], mask, softmax_scale=case.scale, backend=backend))
    assert bool((parts[1][1][:, :4] == -math.inf).all())
    out, lse = merge([p[0] for p in parts], [p[1] for p in parts])
    want = expected(case)
    assert error(out, want["out"]) < exact_tolerance(backend)
    assert error(lse, want["lse"]) < exact_tolerance(backend)


@every_backend
def test_lse_is_a_natural_logarithm(backend: str) -> None:
    """Base-2 values given to a natural-log merge turn a weight of 2.04% into 0.37%."""
    q, k, v = torch.zeros(1, 1, 4), torch.zeros(3136, 1, 4), torch.zeros(3136, 1, 4)
    lses = []
    for n in (3072, 64):
        mask = IntervalMask.from_cu_seqlens([0, 1], [0, n])
        lses.append(attention(q, k[:n], v[:n], mask, backend=backend)[1])
    assert lses[0].item() == pytest.approx(math.log(3072))
    out, _ = merge([torch.zeros(1, 1, 1), torch.ones(1, 1, 1)], lses)
    assert out.item() == pytest.approx(64 / 3136, rel=1e-4)


@every_backend
@pytest.mark.parametrize("logit", [-6e4, 6e4, -1e30])
def test_no_finite_mask_sentinel(backend: str, logit: float) -> None:
    """Masking by a large negative number loses logits below it: equal logits of any size give uniform weights."""
    mask, _ = rectangle([0, 4, 7], [0, 2, 5], True)
    q, k = torch.ones(7, 1, 1), torch.full((5, 1, 1), logit)
    v = torch.arange(5.0)[:, None, None]
    out, lse = attention(q, k, v, mask, softmax_scale=1.0, backend=backend)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([0, 0, 0, 0.5, 2, 2.5, 3]))
    assert lse[0, :2].tolist() == [-math.inf, -math.inf]
    torch.testing.assert_close(lse[0, 2:], torch.tensor([logit] * 5), rtol=1e-4, atol=0)


@every_backend
def test_a_masked_row_is_zero_not_the_mean(backend: str) -> None:
    """With a finite sentinel a row without keys becomes the average of v."""
    mask, _ = rectangle([0, 3], [0, 1], True)
    out, _ = attention(torch.randn(3, 1, 4), torch.randn(1, 1, 4), torch.ones(1, 1, 4), mask, backend=backend)
    assert out[:2].abs().max() == 0


@every_backend
def test_as_many_heads_as_tokens(backend: str) -> None:
    """An lse of [tokens, heads] passes every shape check when H = T, and the numbers are wrong."""
    mask = IntervalMask.from_cu_seqlens([0, 4, 6])
    assert_exact(make_case(document_pairs([4, 2]), (6, 3)), mask, backend)


@every_backend
def test_group_is_not_the_number_of_key_heads(backend: str) -> None:
    """8 query heads on 2 key heads, and v wider than q and k: head maps written for a square case fail here."""
    mask = IntervalMask.from_cu_seqlens([0, 70, 75])
    assert_exact(make_case(document_pairs([70, 5]), (8, 2), (8, 24)), mask, backend)
    assert_exact(make_case(document_pairs([70, 5]), (8, 2), (24, 8)), mask, backend)


@every_backend
@pytest.mark.parametrize(("scale", "softcap"), [(0.1, None), (0.1, 5.0), (1.0, 5.0), (0.0, None), (-0.5, 5.0)])
def test_softmax_scale_reaches_the_backward(backend: str, scale: float, softcap: float | None) -> None:
    """A scale that only the forward honours; and one that turns a mask's -inf into +inf or NaN on its way."""
    mask = IntervalMask.from_cu_seqlens([0, 9, 130])
    case = make_case(document_pairs([9, 121]), widths=(64, 64), scale=scale, softcap=softcap)
    assert_exact(case, mask, backend)


@every_backend
def test_lse_memory_is_heads_times_tokens(backend: str) -> None:
    """A padded lse [documents, heads, longest] costs quadratic memory on one long and many short documents."""
    sizes = [200, *[1] * 200]
    q = torch.randn(400, 2, 4)
    _, lse = attention(q, q, q, IntervalMask.from_cu_seqlens(cumulative(sizes)), backend=backend)
    assert lse.shape == (2, 400)
    assert lse.untyped_storage().nbytes() == 2 * 400 * 4


@every_backend
def test_a_gradient_for_every_input(backend: str) -> None:
    """A custom function that returns one gradient too few fails at the first backward with an option set."""
    mask = IntervalMask.from_cu_seqlens([0, 5])
    for softcap in (None, 2.0):
        for sink in (None, torch.zeros(2, requires_grad=True)):
            q, k, v = (torch.randn(5, 2, 4, requires_grad=True) for _ in range(3))
            out, lse = attention(q, k, v, mask, softcap=softcap, sink=sink, backend=backend)
            (out.sum() + lse.sum()).backward()
            assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v))
            assert sink is None or sink.grad is not None


@every_backend
def test_gradients_add_up_over_parts(backend: str) -> None:
    """Blocks of keys, merged, have the gradients of the whole: each part is differentiated through its lse too."""
    case = make_case(document_pairs([100, 30]), dtype=exact_dtype(backend))
    q, k, v = (x.clone().requires_grad_() for x in (case.q, case.k, case.v))
    outs, lses = [], []
    for a, b in ((0, 50), (50, 120), (120, 130)):
        mask = IntervalMask.from_positions(list(range(130)), list(range(a, b)), [0, 100], [100, 130])
        out, lse = attention(q, k[a:b], v[a:b], mask, softmax_scale=case.scale, backend=backend)
        outs.append(out)
        lses.append(lse)
    assert case.dlse is not None
    grads = torch.autograd.grad(merge(outs, lses), (q, k, v), (case.dout, case.dlse))
    want = expected(case)
    assert max(error(g, want[name]) for g, name in zip(grads, ("dq", "dk", "dv"))) < exact_tolerance(backend)


def test_varlen_call_means_what_users_know() -> None:
    """Bottom-right causal, (left, right) windows, softcap, and padding after cu_seqlens[-1]."""
    nq, nk = [3, 0, 6], [5, 2, 4]
    for causal, window, softcap in ((True, (-1, -1), 0.0), (False, (2, 1), 0.0), (True, (1, 3), 4.0)):
        reach = tuple(None if side < 0 else side for side in window)
        allowed = document_pairs(nq, nk, causal, (reach[0], reach[1]))
        case = make_case(allowed, dlse=False, padding=(2, 3), softcap=softcap or None)
        cu_q, cu_k = (torch.tensor(cumulative(x), dtype=torch.int32) for x in (nq, nk))
        options = {"causal": causal, "window_size": window, "softcap": softcap, "return_attn_probs": True}
        got = flash_attn_varlen_func(case.q, case.k, case.v, cu_q, cu_k, 6, 5, **options)
        assert isinstance(got, tuple)
        want = expected(case)
        assert error(got[0], want["out"]) < 1e-12
        assert error(got[1], want["lse"]) < 1e-12
        assert got[2] is None
        alone = flash_attn_varlen_func(
            case.q, case.k, case.v, cu_q, cu_k, 6, 5, **options | {"return_attn_probs": False}
        )
        assert torch.equal(alone, got[0])
