"""The Triton kernels' own promises: buffers, rounds that accumulate, wide strides, order of tiles. Interpreted only."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.compile.runtime import interpreted
from kernels.mask import IntervalMask
from tests.kernels.oracle import Case, assert_exact, cumulative, document_pairs, error, expected, make_case

if not interpreted():
    pytest.skip("test_triton.py runs this file in a process that interprets kernels", allow_module_level=True)

from kernels.attention.problem import Problem
from kernels.attention.triton_backend import attention_triton, backward_into, delta_of, forward_into

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CANARY = 12345.0


def guarded(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A NaN tensor of this shape, and its buffer, which goes on with canaries."""
    n = math.prod(shape)
    buffer = torch.full((n + 64,), CANARY, dtype=dtype)
    buffer[:n] = math.nan
    return buffer[:n].view(shape), buffer[n:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(16, 16), (20, 7)])
def test_writes_every_row_and_nothing_else(dtype: torch.dtype, widths: tuple[int, int]) -> None:
    """Poisoned results: each covered row is written, later rows and what lies after the buffers are not."""
    sizes, (D, Dv) = [33, 1, 0, 40], widths
    mask = IntervalMask.from_cu_seqlens(cumulative(sizes), window=20)
    case = make_case(document_pairs(sizes, reach=(19, 19)), (4, 2), widths, dtype, dlse=False, padding=(3, 2))
    (out, end_out), (lse, end_lse) = guarded(77, 4, Dv, dtype=dtype), guarded(4, 77)
    problem = Problem(case.q, case.k, case.v, [mask], case.scale)
    forward_into(problem, out, lse)
    assert bool(out[:74].isfinite().all() and lse[:, :74].isfinite().all())
    assert bool(out[74:].isnan().all() and lse[:, 74:].isnan().all())
    delta, lse2 = delta_of(out, case.dout, lse, None, 74)
    (dq, end_q), (dk, end_k), (dv, end_v) = (
        guarded(77, 4, D, dtype=dtype), guarded(76, 2, D, dtype=dtype), guarded(76, 2, Dv, dtype=dtype)
    )  # fmt: skip
    backward_into(problem, case.dout, delta, lse2, dq, dk, dv)
    for grad in (dq, dk, dv):
        assert bool(grad[:74].isfinite().all() and grad[74:].isnan().all())
    for end in (end_out, end_lse, end_q, end_k, end_v):
        assert bool((end == torch.tensor(CANARY, dtype=end.dtype)).all())


def blocks(T: int, cuts: list[int]) -> list[tuple[int, int]]:
    edges = [0, *cuts, T]
    return list(pairwise(edges))


@pytest.mark.parametrize(
    ("dtype", "softcap", "widths"),
    [(torch.float32, 3.0, (16, 16)), (torch.float16, None, (16, 16)), (torch.bfloat16, 3.0, (200, 130)),
     *(pytest.param(*case, marks=pytest.mark.deep) for case in (
         (torch.float32, None, (65, 256)), (torch.float16, 3.0, (16, 16)), (torch.bfloat16, None, (16, 16)),
     ))],
)  # fmt: skip
def test_rounds_accumulate(dtype: torch.dtype, softcap: float | None, widths: tuple[int, int]) -> None:
    """Blocks of keys, one after the other, into the same fp32 buffers: the result and gradients of the whole.

    The buffers begin as (NaN, -inf): where no key was seen yet, out may hold anything.
    """
    sizes = [50, 3, 40]
    cu = cumulative(sizes)
    case = make_case(document_pairs(sizes), (4, 2), widths, dtype, softcap=softcap)
    q, k, v, scale = case.q, case.k, case.v, case.scale
    rounds = []
    for a, b in blocks(93, [20, 51, 60]):
        mask = IntervalMask.from_positions(list(range(93)), list(range(a, b)), cu[:-1], cu[1:])
        rounds.append((slice(a, b), Problem(q, k[a:b], v[a:b], [mask], scale, softcap)))
    out, lse = torch.full((93, 4, widths[1]), math.nan), torch.full((4, 93), -math.inf)
    for _, problem in rounds:
        forward_into(problem, out, lse, add=True)
    delta, lse2 = delta_of(out, case.dout, lse, case.dlse, 93)
    dq, dk, dv = torch.zeros(93, 4, widths[0]), torch.zeros(93, 2, widths[0]), torch.zeros(93, 2, widths[1])
    for part, problem in rounds:
        backward_into(problem, case.dout, delta, lse2, dq, dk[part], dv[part], add=True)
    got = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    tolerance = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    for name, want in expected(case).items():
        assert error(got[name], want) < tolerance * max(1.0, float(want[want.isfinite()].abs().max())), name


def test_a_round_without_keys_changes_nothing() -> None:
    """Bitwise, in a sequence of rounds most of which show a query nothing."""
    mask = IntervalMask.from_cu_seqlens([0, 40], [0, 0], causal=False)
    out, lse = torch.randn(40, 2, 8), torch.randn(2, 40)
    before = out.clone(), lse.clone()
    nothing = torch.zeros(0, 2, 8)
    forward_into(Problem(torch.randn(40, 2, 8), nothing, nothing, [mask], 1.0), out, lse, add=True)
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])


def test_accumulating_refuses() -> None:
    """A sink would count once for each round, and half precision would lose digits at each."""
    mask, x = IntervalMask.from_cu_seqlens([0, 4]), torch.zeros(4, 1, 8)
    with pytest.raises(ValueError, match=r"fp32 out and no sink, but out is torch\.float16;"):
        forward_into(Problem(x, x, x, [mask], 1.0), x.half(), torch.zeros(1, 4), add=True)
    with pytest.raises(ValueError, match="no sink"):
        forward_into(Problem(x, x, x, [mask], 1.0, sink=torch.zeros(1)), x.clone(), torch.zeros(1, 4), add=True)


def test_rounds_in_any_order_agree() -> None:
    """Backwards and shuffled, bands of keys that leave some queries without any in between."""
    case = make_case(document_pairs([70]), (2, 1), (16, 16), torch.float32, dlse=False)
    rounds = [
        (slice(a, b), IntervalMask.from_positions(list(range(70)), list(range(a, b)), [0], [70]))
        for a, b in blocks(70, [5, 31, 64])
    ]
    want = expected(case)
    for order in ([3, 2, 1, 0], [2, 0, 3, 1]):
        out, lse = torch.full((70, 2, 16), math.nan), torch.full((2, 70), -math.inf)
        for part, mask in (rounds[i] for i in order):
            forward_into(Problem(case.q, case.k[part], case.v[part], [mask], case.scale), out, lse, add=True)
        assert error(out, want["out"]) < 1e-5
        assert error(lse, want["lse"]) < 1e-5


def test_buffers_that_do_not_fit_are_refused() -> None:
    """Elements apart in the last dim would be read as neighbours; half-precision sums would lose digits each round."""
    mask, x = IntervalMask.from_cu_seqlens([0, 4]), torch.zeros(4, 1, 8)
    apart, rows = torch.zeros(4, 1, 16)[..., ::2], torch.zeros(1, 16)
    with pytest.raises(ValueError, match="k has stride 2 in its last dim and the kernels need 1; copy it"):
        forward_into(Problem(x, apart, x, [mask], 1.0), x.clone(), torch.zeros(1, 4))
    with pytest.raises(ValueError, match="dout has stride 2"):
        delta_of(x, apart, torch.zeros(1, 4), None, 4)
    with pytest.raises(ValueError, match=r"fp32 gradients, but there are some in torch\.float16"):
        backward_into(Problem(x, x, x, [mask], 1.0), x, rows, rows, x.half(), None, None, add=True)


@pytest.mark.parametrize("wide", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("rows", [1, 40])
def test_strides_beyond_int32(wide: str, rows: int) -> None:
    """Token offsets beyond 2**31 elements, and head offsets too; 5 GB of which little is touched."""
    case = make_case(document_pairs([40]), (2, 2), (16, 16), torch.float16, dlse=False)
    small = getattr(case, wide)
    strides = (2 * 31_000_000, 31_000_000, 1) if rows == 1 else (16, 2_300_000_000, 1)
    buffer = torch.empty(39 * strides[0] + strides[1] + 16, dtype=torch.float16)
    big = buffer.as_strided((40, 2, 16), strides)
    big.copy_(small)
    setattr(case, wide, big)
    want = expected(case)
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    mask = IntervalMask.from_cu_seqlens([0, 40])
    out, _ = attention_triton(Problem(*leaves, [mask], case.scale))
    grads = torch.autograd.grad(out, leaves, case.dout)
    for got, name in zip((out.detach(), *grads), ("out", "dq", "dk", "dv")):
        assert error(got, want[name]) < 0.02, name


@pytest.mark.parametrize("T", [31, 64, 65])
def test_descriptors_and_pointers_agree(T: int) -> None:
    """Tiles come through tensor descriptors where strides are multiples of 16 bytes, and through pointers elsewhere."""
    case = make_case(document_pairs([T]), (2, 1), (16, 8), torch.float32)
    mask = IntervalMask.from_cu_seqlens([0, T])
    assert_exact(case, mask, "triton")
    shifted = []
    for x in (case.q, case.k, case.v, case.dout):
        off = torch.full((x.numel() + 1,), math.nan)[1:].view(x.shape)  # 4 bytes after an aligned address
        off.copy_(x)
        assert off.data_ptr() % 16
        shifted.append(off)
    q, k, v, dout = shifted
    assert_exact(Case(q, k, v, case.allowed, dout, case.dlse, case.scale), mask, "triton")


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_rounded_to_nearest(dtype: torch.dtype) -> None:
    """One key: out is v itself; two equal keys: the mean, correctly rounded. The interpreter's own cast truncates."""
    mask = IntervalMask.from_cu_seqlens([0, 1, 2], [0, 1, 3], causal=False)
    q, k = torch.zeros(2, 1, 16, dtype=dtype), torch.zeros(3, 1, 16, dtype=dtype)
    v = torch.randn(3, 1, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    out, _ = attention_triton(Problem(q, k, v, [mask], 1.0))
    assert torch.equal(out[0], v[0])
    assert torch.equal(out[1], ((v[1].double() + v[2].double()) / 2).to(dtype))
