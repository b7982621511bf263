"""Merges of partial attention results as Triton kernels: any number of partials in one pass, forward and backward.

(Online softmax: Milakov and Gimelshein, arXiv 1805.02867.) `kernels.merge.merge` is the plain twin and defines correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from kernels.attention.checks import first_order
from kernels.attention.triton_tiles import load_rows, store_rows
from kernels.compile.runtime import interpreted, jit, on_device_of
from kernels.compile.tiling import padded_width

SEPARATE = 8  # up to this many partials are read where they lie; more are stacked first


@jit
def _live_lse(LSES, at, live):
    """A partial's lse, where +inf (some kernels' mark for a row without keys) counts as -inf."""
    lse = tl.load(LSES + at, mask=live, other=-float("inf"))
    return tl.where(lse == float("inf"), -float("inf"), lse)


@jit
def merge_forward(OUTS, LSES, OUT, LSE, BASE, TOTAL, n, T, H, stride_n, stride_t, stride_h, stride_ln,
                  WIDE: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """OUT [T, H, D] and LSE [H, T] of all partials; exp(BASE) * TOTAL [H, T] is the sum of their exponentials.

    OUTS, LSES: tuples of buffers, each of n partials [T, H, D] and fp32 [H, T], stride_n and stride_ln apart. OUT has
    the partials' strides. OUT and LSE may be one of the partials: a program reads all of its rows before it writes.
    """
    program = tl.program_id(0)
    h = program % H
    first = program // H * BLOCK_T
    rows = first + tl.arange(0, BLOCK_T)
    live = rows < T
    at = h.to(tl.int64) * T + rows
    base = tl.full([BLOCK_T], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for i in tl.static_range(len(OUTS)):
        for j in range(n):
            step = tl.cast(j, tl.int64)
            lse = _live_lse(LSES[i], step * stride_ln + at, live)
            top = tl.maximum(base, lse)
            safe = tl.where(top == -float("inf"), 0.0, top)  # (-inf) - (-inf) would be NaN
            keep = tl.exp(base - safe)
            weight = tl.exp(lse - safe)
            x = load_rows(OUTS[i] + step * stride_n + h.to(tl.int64) * stride_h, first, stride_t, live, True, D,
                          BLOCK_T, BLOCK_D, WIDE).to(tl.float32)  # fmt: skip
            x = tl.where((weight == 0)[:, None], 0.0, x * weight[:, None])  # a NaN lse stays one
            acc = acc * keep[:, None] + x
            total = total * keep + weight
            base = top
    some = tl.where(total == 0, 1.0, total)
    acc /= some[:, None]
    store_rows(OUT + h.to(tl.int64) * stride_h, first, T, stride_t, acc, None, False, D, BLOCK_T, BLOCK_D, WIDE)
    tl.store(LSE + at, base + tl.log(some), mask=live)
    if BASE is not None:
        tl.store(BASE + at, base, mask=live)
        tl.store(TOTAL + at, total, mask=live)


@jit
def _shares(OUTS, LSES, i: tl.constexpr, step, at, first, live, base, some, h, stride_n, stride_t, stride_h, stride_ln,
            WIDE: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """A partial's weight in the result, and the partial itself, 0 where it weighs nothing."""
    weight = tl.exp(_live_lse(LSES[i], step * stride_ln + at, live) - base) / some
    x = load_rows(OUTS[i] + step * stride_n + h.to(tl.int64) * stride_h, first, stride_t, live, True, D, BLOCK_T,
                  BLOCK_D, WIDE).to(tl.float32)  # fmt: skip
    return weight, tl.where((weight == 0)[:, None], 0.0, x)


@jit
def merge_backward(OUTS, LSES, BASE, TOTAL, DOUT, DLSE, DOUTS, DLSES, n, T, H, stride_n, stride_t, stride_h, stride_ln,
                   WIDE: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """DOUTS = weight * DOUT and DLSES = weight * (DLSE + DOUT . (out_i - out)) of every partial.

    DOUT [T, H, D] has the partials' strides, DLSE is fp32 [H, T] or None; a partial that weighs nothing gets 0.
    """
    program = tl.program_id(0)
    h = program % H
    first = program // H * BLOCK_T
    rows = first + tl.arange(0, BLOCK_T)
    live = rows < T
    at = h.to(tl.int64) * T + rows
    base = tl.load(BASE + at, mask=live, other=-float("inf"))
    base = tl.where(base == -float("inf"), 0.0, base)
    total = tl.load(TOTAL + at, mask=live, other=0.0)
    some = tl.where(total == 0, 1.0, total)
    dout = load_rows(DOUT + h.to(tl.int64) * stride_h, first, stride_t, live, True, D, BLOCK_T, BLOCK_D,
                     WIDE).to(tl.float32)  # fmt: skip
    delta = tl.zeros([BLOCK_T], tl.float32)
    for i in tl.static_range(len(OUTS)):
        for j in range(n):
            weight, x = _shares(OUTS, LSES, i, tl.cast(j, tl.int64), at, first, live, base, some, h, stride_n, stride_t,
                                stride_h, stride_ln, WIDE, D, BLOCK_T, BLOCK_D)  # fmt: skip
            delta += tl.where(weight == 0, 0.0, weight * tl.sum(dout * x, 1))
    if DLSE is not None:
        delta -= tl.load(DLSE + at, mask=live, other=0.0)
    for i in tl.static_range(len(OUTS)):
        for j in range(n):
            step = tl.cast(j, tl.int64)
            weight, x = _shares(OUTS, LSES, i, step, at, first, live, base, some, h, stride_n, stride_t, stride_h,
                                stride_ln, WIDE, D, BLOCK_T, BLOCK_D)  # fmt: skip
            change = tl.where(weight == 0, 0.0, weight * (tl.sum(dout * x, 1) - delta))
            tl.store(DLSES[i] + step * stride_ln + at, change, mask=live)
            grad = tl.where((weight == 0)[:, None], 0.0, dout * weight[:, None])
            store_rows(DOUTS[i] + step * stride_n + h.to(tl.int64) * stride_h, first, T, stride_t, grad, None, False, D,
                       BLOCK_T, BLOCK_D, WIDE)  # fmt: skip


def merge_triton(
    outs: Sequence[Float[Tensor, "T H D"]], lses: Sequence[Float[Tensor, "H T"]]
) -> tuple[Float[Tensor, "T H D"], Float[Tensor, "H T"]]:
    """`kernels.merge.merge.merge` of checked partials, in fp32, without float64."""
    out, lse = _Merge.apply(*outs, *lses)
    return out, lse


def merge_into_triton(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """`kernels.merge.merge.merge_into` of checked results in fp32; out and lse are contiguous."""
    _launch_forward((out, part.contiguous()), (lse, part_lse.float().contiguous()), 1, out, lse, None, None)


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *partials: Tensor) -> tuple[Tensor, Tensor]:
        outs, lses = partials[: len(partials) // 2], partials[len(partials) // 2 :]
        T, H, _ = outs[0].shape
        ctx.types = [lse.dtype for lse in lses]
        lses = tuple(lse.float() for lse in lses)
        ctx.n, outs, lses = (1, outs, lses) if len(outs) <= SEPARATE else (len(outs), *map(_stacked, (outs, lses)))
        outs, lses = (tuple(x.contiguous() for x in group) for group in (outs, lses))
        out = torch.empty_like(outs[0] if ctx.n == 1 else outs[0][0])
        lse, base, total = (outs[0].new_empty(H, T, dtype=torch.float32) for _ in range(3))
        _launch_forward(outs, lses, ctx.n, out, lse, base, total)
        ctx.save_for_backward(*outs, *lses, base, total)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        dout, dlse = grads
        *partials, base, total = ctx.saved_tensors
        outs, lses = tuple(partials[: len(partials) // 2]), tuple(partials[len(partials) // 2 :])
        T, H, D = outs[0].shape[-3:]
        dout = outs[0].new_zeros(T, H, D) if dout is None else dout.contiguous()
        dlse = None if dlse is None else dlse.float().contiguous()
        douts, dlses = (tuple(torch.empty_like(x) for x in group) for group in (outs, lses))
        if T:
            with on_device_of(dout):
                merge_backward[_grid(T, H, D)](
                    outs, lses, base, total, dout, dlse, douts, dlses, ctx.n, T, H, T * H * D, H * D, D, T * H,
                    **_constants(D),
                )  # fmt: skip
        if ctx.n > 1:
            douts, dlses = douts[0].unbind(0), dlses[0].unbind(0)
        return (*douts, *(g.to(kind) for g, kind in zip(dlses, ctx.types)))


def _launch_forward(
    outs: tuple[Tensor, ...],
    lses: tuple[Tensor, ...],
    n: int,
    out: Tensor,
    lse: Tensor,
    base: Tensor | None,
    total: Tensor | None,
) -> None:
    T, H, D = out.shape
    if T:
        with on_device_of(out):
            merge_forward[_grid(T, H, D)](
                outs, lses, out, lse, base, total, n, T, H, T * H * D, H * D, D, T * H, **_constants(D)
            )  # fmt: skip


def _stacked(tensors: tuple[Tensor, ...]) -> tuple[Tensor]:
    """One buffer of all tensors: the one that they are views of, in order, or a copy."""
    first, size = tensors[0], tensors[0].numel()
    together = first.is_contiguous() and all(
        x.is_contiguous()
        and x.data_ptr() == first.data_ptr() + i * size * first.element_size()
        and x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for i, x in enumerate(tensors)
    )
    if together:
        return (first.as_strided((len(tensors), *first.shape), (size, *first.stride())),)
    return (torch.stack(tensors),)


def rows_per_program(D: int) -> int:
    """Tokens that a program holds: as many as leave its registers unspilled."""
    return 32 if D <= 64 else 16


def _grid(T: int, H: int, D: int) -> tuple[int]:
    return (-(-T // rows_per_program(D)) * H,)


def _constants(D: int) -> dict[str, Any]:
    return {"WIDE": interpreted(), "D": D, "BLOCK_T": rows_per_program(D), "BLOCK_D": padded_width(D)}
