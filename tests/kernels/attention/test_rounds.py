"""Rounds of a schedule on every backend: blocks of keys in any order give attention over all of them."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.api import attention
from kernels.attention.backends import choose_backend, choose_rounds
from kernels.attention.rounds import Rounds
from kernels.compile.runtime import interpreted
from kernels.mask import IntervalMask
from tests.kernels.oracle import Case, document_pairs, error, every_backend, exact_dtype, expected, make_case

NAMES = ("out", "lse", "dq", "dk", "dv")


def staircase(Tq: int, Tk: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random never-decreasing k_start, k_end [Tq] within [0, Tk], with empty intervals and jumps."""
    g = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, Tk + 1, (2, Tq), generator=g).sort(1).values
    start, end = ends.amin(0), ends.amax(0)
    blind = torch.rand(Tq, generator=g) < 0.2
    return start.int(), torch.where(blind, start, end).cummax(0).values.maximum(start).int()


def block(k_start: Tensor, k_end: Tensor, a: int, b: int) -> IntervalMask:
    """The part of a mask that shows keys [a, b)."""
    lo, hi = k_start.clamp(a, b) - a, k_end.clamp(a, b) - a
    return IntervalMask.from_rows(lo, hi, b - a)


def cut(T: int, n: int, seed: int) -> list[tuple[int, int]]:
    """[0, T) in n blocks, some of them empty, in any order."""
    g = torch.Generator().manual_seed(seed)
    edges = [0, *torch.randint(0, T + 1, (n - 1,), generator=g).sort().values.tolist(), T]
    return [(edges[i], edges[i + 1]) for i in torch.randperm(n, generator=g).tolist()]


def in_rounds(
    rounds: Rounds,
    case: Case,
    blocks: list[tuple[int, int, IntervalMask]],
    head_map: list[int] | None = None,
    from_delta: bool = False,
) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv by one round a block; out begins as NaN."""
    high = torch.float64 if case.q.dtype == torch.float64 else torch.float32
    q, k, v, dout, scale, softcap = case.q, case.k, case.v, case.dout, case.scale, case.softcap
    out = torch.full(dout.shape, math.nan, dtype=high)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=high)
    for a, b, mask in blocks:
        rounds.forward(q, k[a:b], v[a:b], mask, out, lse, scale, softcap, head_map)
    if from_delta:
        stats = rounds.stats_of(rounds.delta(out, dout, lse, case.dlse), lse, dout)
    else:
        stats = rounds.stats(out, dout, lse, case.dlse)
    dq, dk, dv = (torch.zeros(x.shape, dtype=high) for x in (q, k, v))
    for a, b, mask in reversed(blocks):
        rounds.backward(q, k[a:b], v[a:b], dout, stats, mask, dq, dk[a:b], dv[a:b], scale, softcap, head_map)
    return dict(zip(NAMES, (out, lse, dq, dk, dv)))


def assert_near(got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Within 1e-12 in fp64 and 1e-5 in fp32 of the largest number; -inf in the same places."""
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for name in NAMES:
        finite = want[name][want[name].isfinite()]
        size = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
        assert error(got[name], want[name]) <= tolerance * size, (name, error(got[name], want[name]))


def random_case(
    backend: str,
    T: tuple[int, int],
    n: int,
    seed: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    **options: object,
) -> tuple[Case, list[tuple[int, int, IntervalMask]]]:
    """A random staircase with NaN where it shows nothing, cut into n blocks of keys."""
    k_start, k_end = staircase(*T, seed)
    keys = torch.arange(T[1])
    allowed = (keys >= k_start[:, None]) & (keys < k_end[:, None])
    case = make_case(allowed, heads, widths, exact_dtype(backend), seed=seed, **options)  # type: ignore[arg-type]
    return case, [(a, b, block(k_start, k_end, a, b)) for a, b in cut(T[1], n, seed)]


@every_backend
@settings(max_examples=2 if interpreted() else 25, deadline=None)  # a second or two each in the interpreter
@given(
    Tq=st.integers(1, 70),
    Tk=st.integers(1, 70),
    n=st.integers(1, 5),
    seed=st.integers(0, 1000),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (6, 6)]),
    widths=st.sampled_from([(8, 8), (16, 5), (3, 24)]),
    softcap=st.sampled_from([None, 2.0]),
    scale=st.sampled_from([None, -0.7, 0.0]),
    dlse=st.booleans(),
)
def test_any_blocks_in_any_order(
    backend: str,
    Tq: int,
    Tk: int,
    n: int,
    seed: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    softcap: float | None,
    scale: float | None,
    dlse: bool,
) -> None:
    """The dense float64 definition, by stats and by stats_of; what it leaves out is NaN, and so is out at first."""
    case, blocks = random_case(
        backend, (Tq, Tk), n, seed, heads, widths, softcap=softcap, scale=scale, dlse=dlse, padding=(2, 0)
    )
    rounds, want = choose_rounds(backend, case.q), expected(case)
    for from_delta in (False, True):
        got = in_rounds(rounds, case, blocks, from_delta=from_delta)
        assert bool(got["out"][Tq:].isnan().all())  # beyond the mask
        got["out"][Tq:] = 0
        blind = (want["lse"] == -math.inf).T
        assert bool((got["out"][blind] == 0).all())
        assert_near(got, want, case.q.dtype)


@every_backend
@pytest.mark.parametrize("first", [False, True])
def test_documents_large_enough_for_every_kind_of_call(backend: str, first: bool) -> None:
    """Triangles, rectangles, windows and stacked tiles, in blocks that cut documents."""
    sizes = [30, 3, 1, 70, 2, 26] if backend == "triton" else [70, 3, 1, 150, 2, 26]  # seconds in the interpreter
    T = sum(sizes)
    whole = IntervalMask.from_cu_seqlens([0, *torch.tensor(sizes).cumsum(0).tolist()], window=None if first else 90)
    case = make_case(document_pairs(sizes, reach=(None if first else 89, None)), (4, 2), (8, 8), exact_dtype(backend))
    blocks = [(a, b, block(whole.k_start, whole.k_end, a, b)) for a, b in ((50, 97), (0, 50), (97, T))]
    assert_near(in_rounds(choose_rounds(backend, case.q), case, blocks), expected(case), case.q.dtype)


MAPS = [
    ([0, 0, 0, 1, 1, 1], 2),  # equal groups, given
    ([1, 1, 1], 3),  # equal groups over some of the key heads
    ([0, 0, 0, 0, 1, 1], 2),  # heads 3..8 of 14 on 2: groups of two fit
    ([0, 0, 1, 1, 1], 2),  # heads 5..9 of 14 on 2
    ([0, 2, 2], 4),  # one passed over
]


@every_backend
@pytest.mark.parametrize(("head_map", "Hkv"), MAPS)
def test_head_maps(backend: str, head_map: list[int], Hkv: int) -> None:
    """As if every query head had a key head of its own, whose gradients are added up."""
    case, blocks = random_case(backend, (40, 40), 3, 5, (len(head_map), len(head_map)), (8, 6))
    g = torch.Generator().manual_seed(1)
    k, v = (torch.randn(40, Hkv, D, generator=g, dtype=case.q.dtype) for D in (8, 6))
    unseen = ~case.allowed.any(0)
    k[unseen] = v[unseen] = math.nan
    want = expected(replace(case, k=k[:, head_map], v=v[:, head_map]))
    for name, x in (("dk", k), ("dv", v)):
        summed = torch.zeros(x.shape, dtype=torch.float64)
        want[name] = summed.index_add_(1, torch.tensor(head_map), want[name])
    case = replace(case, k=k, v=v)
    got = in_rounds(choose_rounds(backend, case.q), case, blocks, head_map)
    assert_near(got, want, case.q.dtype)


@every_backend
def test_strided_keys_queries_and_buffers(backend: str) -> None:
    """Heads of a wire that also carries others, transposed storage, and results that are slices of larger ones."""
    case, blocks = random_case(backend, (33, 29), 2, 3, (4, 2), (8, 8))
    want = expected(case)
    wire = torch.full((29, 7, 8), math.nan, dtype=case.q.dtype)
    wire[:, 1:3], wire[:, 4:6] = case.k, case.v
    across = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    strided = replace(case, q=across, k=wire[:, 1:3], v=wire[:, 4:6], dout=case.dout.transpose(1, 2).contiguous().mT)
    assert_near(in_rounds(choose_rounds(backend, case.q), strided, blocks), want, case.q.dtype)


@every_backend
@pytest.mark.parametrize("dlse", [False, True])
def test_rows_of_stats(backend: str, dlse: bool) -> None:
    """Queries in two halves and as an index tensor: the same gradients as all at once."""
    case, blocks = random_case(backend, (37, 30), 1, 8, (4, 2), (8, 8), dlse=dlse)
    (_, _, mask), rounds = blocks[0], choose_rounds(backend, case.q)
    want = in_rounds(rounds, case, blocks)
    stats = rounds.stats(want["out"], case.dout, want["lse"], case.dlse)
    for rows in ([slice(0, 11), slice(11, 37)], [slice(0, 37, 2), slice(1, 37, 2)]):
        for chosen in (rows, [torch.arange(37)[r] for r in rows]):
            dq, dk, dv = (torch.zeros_like(want[name]) for name in ("dq", "dk", "dv"))
            for r in chosen:
                part = IntervalMask.from_rows(mask.k_start[r], mask.k_end[r], mask.Tk)
                gq = torch.zeros_like(dq[r])
                rounds.backward(
                    case.q[r], case.k, case.v, case.dout[r], rounds.part(stats, r), part, gq, dk, dv, case.scale
                )
                dq[r] = gq
            assert_near(want | {"dq": dq, "dk": dk, "dv": dv}, want, case.q.dtype)


@every_backend
def test_empty_sides(backend: str) -> None:
    """No queries or no keys: nothing is computed, and out is 0 where there still is no key."""
    dtype = exact_dtype(backend)
    q, k = torch.randn(5, 2, 8, dtype=dtype), torch.randn(5, 2, 8, dtype=dtype)
    rounds = choose_rounds(backend, q)
    out, lse = torch.full((5, 2, 8), math.nan, dtype=dtype), torch.full((2, 5), -math.inf, dtype=dtype)
    lse[:, :3], out[:3] = 2.0, 1.0
    grads = [torch.ones(5, 2, 8, dtype=dtype) for _ in range(3)]
    no_keys = IntervalMask.from_cu_seqlens([0, 5], [0, 0], causal=False)
    rounds.forward(q, k[:0], k[:0], no_keys, out, lse, 1.0)
    assert (out[:3].max(), out[:3].min(), out[3:].abs().max()) == (1, 1, 0)
    torch.testing.assert_close(lse[:, :3], torch.full((2, 3), 2.0, dtype=dtype))
    assert bool((lse[:, 3:] == -math.inf).all())
    stats = rounds.stats(out, torch.ones_like(out), lse)
    rounds.backward(q, k[:0], k[:0], k, stats, no_keys, grads[0], grads[1][:0], grads[2][:0], 1.0)
    no_queries = IntervalMask.from_cu_seqlens([0, 0], [0, 5], causal=False)
    rounds.forward(q[:0], k, k, no_queries, out[:0], lse[:, :0], 1.0)
    none = rounds.part(stats, slice(0, 0))
    rounds.backward(q[:0], k, k, k[:0], none, no_queries, grads[0][:0], grads[1], grads[2], 1.0)
    assert all(bool((x == 1).all()) for x in grads)


@every_backend
def test_no_digits_are_lost_in_bf16(backend: str) -> None:
    """Eight rounds err by no more than one call, since nothing is rounded between them."""
    T = 64
    case = make_case(document_pairs([T]), (2, 1), (16, 16), torch.bfloat16, dlse=False)
    mask = IntervalMask.from_cu_seqlens([0, T])
    blocks = [(a, a + 8, block(mask.k_start, mask.k_end, a, a + 8)) for a in range(0, T, 8)]
    got, want = in_rounds(choose_rounds(backend, case.q), case, blocks), expected(case)
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    out, lse = attention(*leaves, mask, softmax_scale=case.scale, backend=backend)
    once = dict(zip(NAMES, (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, case.dout))))
    for name in NAMES:
        ours, theirs = (float((x[name].double() - want[name]).norm()) for x in (got, once))
        assert ours <= 1.01 * theirs + 1e-5, (name, ours, theirs)


@every_backend
def test_under_autocast_and_autograd(backend: str) -> None:
    """Arithmetic in the contract's precision, and no history, wherever the caller stands."""
    case, blocks = random_case(backend, (20, 20), 2, 4, (2, 1), (8, 8))
    case.q.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = in_rounds(choose_rounds(backend, case.q), case, blocks)
    assert not any(x.requires_grad for x in got.values())
    assert_near(got, expected(replace(case, q=case.q.detach())), case.q.dtype)


@every_backend
def test_refusals(backend: str) -> None:
    """Half-precision sums, buffers of another shape, head maps that do not fit."""
    x, mask = torch.zeros(4, 2, 8), IntervalMask.from_cu_seqlens([0, 4])
    rounds, lse = choose_rounds(backend, x), torch.zeros(2, 4)
    forward = inspect.unwrap(Rounds.forward)  # without the checks of the tests
    for out, log, keys, head_map, message in (
        (x.half(), lse, x, None, r"out must be \(4, 2, 8\) in torch\.float32, .* not \(4, 2, 8\) torch\.float16"),
        (x.clone(), lse[:, :0], x, None, r"lse must be \(2, 4\)"),
        (x.mT.contiguous().mT, lse, x, None, "adjacent in its last dim"),
        (x.clone(), lse, torch.zeros(4, 3, 8), None, "3 key heads do not divide 2 query heads; give a head_map"),
        (x.clone(), lse, x, [0], "names 1 key heads for 2 query heads"),
        (x.clone(), lse, x, [0, 2], r"\[0, 2\] leaves the 2 key heads"),
        (x.clone(), lse, x, [1, 0], r"\[1, 0\] decreases"),
    ):
        with pytest.raises(ValueError, match=message):
            forward(rounds, x, keys, keys, mask, out, log, 1.0, None, head_map)
    grads = [torch.zeros(4, 2, 8) for _ in range(3)]
    stats = rounds.stats(x, x, lse)
    with pytest.raises(ValueError, match=r"dv must be .* not \(4, 2, 8\) torch\.float64"):
        rounds.backward(x, x, x, x, stats, mask, *grads[:2], grads[2].double(), 1.0)
    with pytest.raises(ValueError, match=r"stats are of \[H, Tq\] = \(2, 3\); cut both"):
        rounds.backward(x, x, x, x, rounds.part(stats, slice(3)), mask, *grads, 1.0)
    with pytest.raises(ValueError, match="use one of"):
        choose_rounds("cuda", x)
    assert type(choose_rounds("auto", x)) is type(choose_backend("auto", x).rounds())
