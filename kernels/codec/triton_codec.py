"""The codec as Triton kernels: one launch to encode, to decode (and sum), to sum and encode again.

`torch_codec.py` is the plain twin, which these equal byte for byte; `api.py` has the rules and checks.
Products and sums must not fuse (`enable_fp_fusion`), or bytes would depend on the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from kernels.attention.triton_tiles import round_to_bf16
from kernels.codec.bits import FLOAT8, LARGEST
from kernels.codec.torch_codec import norm_of
from kernels.codec.triton_groups import (
    FLOOR,
    INF_BITS,
    alpha_of,
    from_codes,
    largest_bits,
    sum_of_squares,
    to_codes,
    transform,
)
from kernels.codec.wire import HEADER, Codec, Layout, header_words, layout_of
from kernels.compile.runtime import interpreted, jit, on_device_of

VALUES = 4096  # of one program, on WARPS warps
WARPS = 4
REGISTERS = 96  # of a thread of fp8_sum_encode: left alone, ptxas aims at 72 on sm_100 and spills two
_VARY = ["n_low", "n_high"]  # else Triton would compile anew for sizes of 1 and multiples of 16


@jit
def _places(first, groups, per, step_a, step_b, stride, far_a, far_b, far_j, limit, G: tl.constexpr, B: tl.constexpr):
    """Where the values of B groups lie in the tensor, and which of them are real; `kernels.codec.wire.Layout`."""
    g = first + tl.arange(0, B)
    j = tl.arange(0, G)
    a = (g // per).to(tl.int64)
    b = (g % per).to(tl.int64)
    at = (a * step_a + b * step_b)[:, None] + (j.to(tl.int64) * stride)[None, :]
    real = (a * far_a + b * far_b)[:, None] + (j.to(tl.int64) * far_j)[None, :] < limit
    return at, real & (g < groups)[:, None]


@jit
def _write(y, alpha, NORM: tl.constexpr, CODES, SCALES, HEAD, first, groups, pairs, word0: tl.constexpr,
           word1: tl.constexpr, n_low, n_high, G: tl.constexpr, B: tl.constexpr, RANK: tl.constexpr, LOG: tl.constexpr,
           BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr, LARGEST_: tl.constexpr,
           SIGNED_ZERO: tl.constexpr, HARDWARE: tl.constexpr):  # fmt: skip
    """Codes and scales of a cube of which NORM times is what the codes stand for; the first program adds the header."""
    bits = largest_bits(y, RANK, LOG)
    bad = bits >= INF_BITS
    top = tl.where(bad, 1.0, tl.maximum(bits.to(tl.float32, bitcast=True), FLOOR))
    s = tl.where(bad, float("nan"), tl.div_rn(top * NORM, tl.full(top.shape, LARGEST_, tl.float32)))
    y = tl.where(bad, 0.0, y) * tl.div_rn(tl.full(top.shape, LARGEST_, tl.float32), top)
    code = to_codes(y, MANTISSA, BIAS, TOP, SIGNED_ZERO, HARDWARE)
    width: tl.constexpr = G * BITS // 8
    if BITS == 4:
        low = tl.reshape(4 * tl.arange(0, 2), [1] * (RANK - 1) + [2])
        code = tl.sum((code & 15) << low, axis=RANK - 1)
    g = first + tl.arange(0, B)
    at = g.to(tl.int64)[:, None] * width + tl.arange(0, width)[None, :]
    tl.store(CODES + at, tl.reshape(code, [B, width]).to(tl.uint8), mask=(g < groups)[:, None])
    pair = tl.join(tl.where(g < groups, tl.reshape(s, [B]), 0.0), tl.where(g < groups, tl.reshape(alpha, [B]), 0.0))
    tl.store(SCALES + g.to(tl.int64)[:, None] * 2 + tl.arange(0, 2)[None, :], pair, mask=(g < pairs)[:, None])
    if first == 0:
        tl.store(HEAD, word0)
        tl.store(HEAD + 1, word1)
        tl.store(HEAD + 2, n_low)
        tl.store(HEAD + 3, n_high)


@jit
def _read(CODES, SCALES, HEAD, n, first, groups, stride_n, word0: tl.constexpr, word1: tl.constexpr, n_low, n_high,
          G: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, HALF: tl.constexpr,
          ALPHA: tl.constexpr, ONE: tl.constexpr):  # fmt: skip
    """(values [B, G] summed over n wires in units of 1 / alpha, alpha [B] the least of the wires'); ONE: n is 1."""
    g = first + tl.arange(0, B)
    live = g < groups
    alpha = tl.full([B], 1.0, tl.float32)
    if ALPHA:
        alpha = tl.load(SCALES + g.to(tl.int64) * 2 + 1, mask=live, other=1.0)
        if not ONE:
            for i in range(1, n):
                step = tl.cast(i, tl.int64) * (stride_n // 4)
                alpha = tl.minimum(alpha, tl.load(SCALES + step + g.to(tl.int64) * 2 + 1, mask=live, other=1.0))
    total = _part(CODES, SCALES, HEAD, tl.cast(0, tl.int64), g, live, alpha, word0, word1, n_low, n_high, G, B, BITS,
                  MANTISSA, HALF, ALPHA and not ONE)  # fmt: skip
    if not ONE:
        for i in range(1, n):
            total += _part(CODES, SCALES, HEAD, tl.cast(i, tl.int64) * stride_n, g, live, alpha, word0, word1, n_low,
                           n_high, G, B, BITS, MANTISSA, HALF, ALPHA)  # fmt: skip
    return total, alpha


@jit
def _part(CODES, SCALES, HEAD, offset, g, live, alpha, word0: tl.constexpr, word1: tl.constexpr, n_low, n_high,
          G: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, HALF: tl.constexpr,
          RATIO: tl.constexpr):  # fmt: skip
    """One wire's transformed values [B, G] in units of 1 / alpha; NaN where its header is another's."""
    words = offset // 4
    good = (tl.load(HEAD + words) == word0) & (tl.load(HEAD + words + 1) == word1)
    good &= (tl.load(HEAD + words + 2) == n_low) & (tl.load(HEAD + words + 3) == n_high)
    s = tl.load(SCALES + words + g.to(tl.int64) * 2, mask=live, other=0.0)
    if RATIO:
        own = tl.load(SCALES + words + g.to(tl.int64) * 2 + 1, mask=live, other=1.0)
        s = s * tl.div_rn(alpha, own)
    s = tl.where(good, s, float("nan")) * HALF
    width: tl.constexpr = G * BITS // 8
    at = offset + g.to(tl.int64)[:, None] * width + tl.arange(0, width)[None, :]
    code = tl.load(CODES + at, mask=live[:, None], other=0).to(tl.int32)
    if BITS == 4:
        code = tl.reshape(tl.join(code & 15, code >> 4), [B, G])
    return from_codes(code, BITS, MANTISSA) * s[:, None]


@jit(do_not_specialize=_VARY)
def fp8_encode(X, CODES, SCALES, HEAD, n_low, n_high, groups, pairs, per, step_a, step_b, stride, far_a, far_b, far_j,
               limit, word0: tl.constexpr, word1: tl.constexpr, G: tl.constexpr, B: tl.constexpr, RANK: tl.constexpr,
               LOG: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr,
               LARGEST_: tl.constexpr, SIGNED_ZERO: tl.constexpr, HARDWARE: tl.constexpr, HADAMARD: tl.constexpr,
               ALPHA: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    """The wire of X. CODES (uint8), SCALES (fp32) and HEAD (int32) are parts of it."""
    first = tl.program_id(0) * B
    at, real = _places(first, groups, per, step_a, step_b, stride, far_a, far_b, far_j, limit, G, B)
    x = tl.load(X + at, mask=real, other=0.0).to(tl.float32)  # at once: the interpreter computes bf16 on raw bits
    y = tl.reshape(x, [2] * RANK)
    alpha = tl.full([2] * (RANK - LOG) + [1] * LOG, 1.0, tl.float32)
    if ALPHA:
        alpha = alpha_of(sum_of_squares(y, RANK, LOG), G)
        y = y * alpha
    if HADAMARD:
        y = transform(y, RANK, LOG)
    _write(y, alpha, NORM, CODES, SCALES, HEAD, first, groups, pairs, word0, word1, n_low, n_high, G, B, RANK, LOG,
           BITS, MANTISSA, BIAS, TOP, LARGEST_, SIGNED_ZERO, HARDWARE)  # fmt: skip


@jit(do_not_specialize=_VARY)
def fp8_decode(CODES, SCALES, HEAD, OUT, n, stride_n, n_low, n_high, groups, per, step_a, step_b, stride, far_a, far_b,
               far_j, limit, word0: tl.constexpr, word1: tl.constexpr, G: tl.constexpr, B: tl.constexpr,
               RANK: tl.constexpr, LOG: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, HALF: tl.constexpr,
               HADAMARD: tl.constexpr, ALPHA: tl.constexpr, NORM: tl.constexpr, LIMIT: tl.constexpr,
               ONE: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """OUT = the tensor of one wire, or the sum of n that lie stride_n bytes apart; LIMIT: saturate there."""
    first = tl.program_id(0) * B
    y, alpha = _read(CODES, SCALES, HEAD, n, first, groups, stride_n, word0, word1, n_low, n_high, G, B, BITS, MANTISSA,
                     HALF, ALPHA, ONE)  # fmt: skip
    if HADAMARD:
        y = tl.reshape(transform(tl.reshape(y, [2] * RANK), RANK, LOG), [B, G])
    if HADAMARD or ALPHA:
        y = y * tl.div_rn(tl.full([B], NORM, tl.float32), alpha)[:, None]
    if LIMIT is not None:
        y = tl.clamp(y, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if WIDE and OUT.dtype.element_ty == tl.bfloat16:
        y = round_to_bf16(y)
    at, real = _places(first, groups, per, step_a, step_b, stride, far_a, far_b, far_j, limit, G, B)
    tl.store(OUT + at, y.to(OUT.dtype.element_ty), mask=real)


@jit(do_not_specialize=_VARY)
def fp8_sum_encode(CODES, SCALES, HEAD, CODES_OUT, SCALES_OUT, HEAD_OUT, n, stride_n, n_low, n_high, groups, pairs,
                   word0: tl.constexpr, word1: tl.constexpr, G: tl.constexpr, B: tl.constexpr, RANK: tl.constexpr,
                   LOG: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr,
                   LARGEST_: tl.constexpr, SIGNED_ZERO: tl.constexpr, HARDWARE: tl.constexpr, HALF: tl.constexpr,
                   ALPHA: tl.constexpr):  # fmt: skip
    """The wire of the sum of n wires; it stays transformed, so the kernel has no transform."""
    first = tl.program_id(0) * B
    y, alpha = _read(CODES, SCALES, HEAD, n, first, groups, stride_n, word0, word1, n_low, n_high, G, B, BITS, MANTISSA,
                     HALF, ALPHA, False)  # fmt: skip
    _write(tl.reshape(y, [2] * RANK), alpha, 1.0, CODES_OUT, SCALES_OUT, HEAD_OUT, first, groups, pairs, word0, word1,
           n_low, n_high, G, B, RANK, LOG, BITS, MANTISSA, BIAS, TOP, LARGEST_, SIGNED_ZERO, HARDWARE)  # fmt: skip


def encode_triton(x: Tensor, codec: Codec, out: Tensor) -> Tensor:
    """`kernels.codec.api.encode` into a checked `out`."""
    layout = layout_of(codec, x.shape)
    x = x.contiguous()
    with on_device_of(x):
        fp8_encode[_grid(codec, layout)](
            x, *_parts(out, layout), *_counts(codec, layout), layout.groups, layout.pairs, *_place(layout),
            **encode_constants(codec, x.numel()), **_options(),
        )  # fmt: skip
    return out


def decode_triton(wires: Tensor, codec: Codec, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`kernels.codec.api.decode` of one checked wire [1, bytes]."""
    return _decode(wires, codec, shape, dtype, True)


def decode_sum_triton(wires: Tensor, codec: Codec, shape: Sequence[int]) -> Tensor:
    """`kernels.codec.api.decode_sum` of checked wires."""
    return _decode(wires, codec, shape, torch.float32, False)


def _decode(wires: Tensor, codec: Codec, shape: Sequence[int], dtype: torch.dtype, one: bool) -> Tensor:
    layout = layout_of(codec, shape)
    out = torch.empty(tuple(shape), dtype=dtype, device=wires.device)
    if out.numel():
        with on_device_of(wires):
            fp8_decode[_grid(codec, layout)](
                *_parts(wires, layout), out, len(wires), wires.stride(0), *_counts(codec, layout), layout.groups,
                *_place(layout), **decode_constants(codec, out.numel(), dtype, one), **_options(),
            )  # fmt: skip
    return out


def decode_sum_encode_triton(wires: Tensor, codec: Codec, shape: Sequence[int], out: Tensor) -> Tensor:
    """`kernels.codec.api.decode_sum_encode` of checked wires into a checked `out`."""
    layout = layout_of(codec, shape)
    with on_device_of(wires):
        fp8_sum_encode[_grid(codec, layout)](
            *_parts(wires, layout), *_parts(out, layout), len(wires), wires.stride(0), *_counts(codec, layout),
            layout.groups, layout.pairs, **sum_constants(codec, layout.tokens * layout.width), **_options(True),
        )  # fmt: skip
    return out


def encode_constants(codec: Codec, values: int, hardware: bool = False) -> dict[str, Any]:
    """Compile-time values of `fp8_encode`; `hardware` uses the target's own conversion."""
    norm = norm_of(codec.group) if codec.hadamard else 1.0
    stages = {"HADAMARD": codec.hadamard, "ALPHA": codec.alpha, "NORM": norm}
    return _shape_constants(codec, values) | _format_constants(codec, hardware) | stages


def decode_constants(codec: Codec, values: int, dtype: torch.dtype, one: bool) -> dict[str, Any]:
    """Compile-time values of `fp8_decode` to a dtype; `one` for a single wire, which saturates."""
    norm = norm_of(codec.group) if codec.hadamard else 1.0
    limit = torch.finfo(dtype).max if one else None
    more = {"HADAMARD": codec.hadamard, "ALPHA": codec.alpha, "NORM": norm, "LIMIT": limit, "ONE": one}
    return _shape_constants(codec, values) | more | {"HALF": _half(codec), "WIDE": interpreted()}


def sum_constants(codec: Codec, values: int, hardware: bool = False) -> dict[str, Any]:
    """Compile-time values of `fp8_sum_encode`."""
    more = {"HALF": _half(codec), "ALPHA": codec.alpha}
    return _shape_constants(codec, values) | _format_constants(codec, hardware) | more


def _shape_constants(codec: Codec, values: int) -> dict[str, Any]:
    G = codec.group
    log, rank = G.bit_length() - 1, VALUES.bit_length() - 1
    kind = FLOAT8.get(codec.format)
    word0, word1, _, _ = header_words(codec, values)
    return {
        "word0": word0, "word1": word1, "G": G, "B": VALUES // G, "RANK": rank, "LOG": log,
        "BITS": 4 if codec.format == "int4" else 8, "MANTISSA": kind.mantissa if kind else 0,
    }  # fmt: skip


def _format_constants(codec: Codec, hardware: bool) -> dict[str, Any]:
    kind = FLOAT8.get(codec.format)
    return {
        "BIAS": kind.bias if kind else 0, "TOP": kind.top if kind else 0, "LARGEST_": LARGEST[codec.format],
        "SIGNED_ZERO": kind.signed_zero if kind else True, "HARDWARE": hardware,
    }  # fmt: skip


def _half(codec: Codec) -> float:
    return FLOAT8[codec.format].half if codec.format in FLOAT8 else 1.0


def _grid(codec: Codec, layout: Layout) -> tuple[int]:
    return (max(1, -(-layout.pairs * codec.group // VALUES)),)


def _parts(wire: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and header of a wire, or of all rows of wires, where they lie."""
    head, body = wire[..., :HEADER].view(torch.int32), wire[..., layout.scales :]
    return wire[..., HEADER:], body.view(torch.float32), head


def _place(layout: Layout) -> tuple[int, ...]:
    return (layout.per, layout.step_a, layout.step_b, layout.stride, layout.far_a, layout.far_b, layout.far_j,
            layout.limit)  # fmt: skip


def _counts(codec: Codec, layout: Layout) -> tuple[int, int]:
    return header_words(codec, layout.tokens * layout.width)[2:]


def launch_options(sums_to_wire: bool, cuda: bool) -> dict[str, Any]:
    """What the compiler is told of a launch; `sums_to_wire` is fp8_sum_encode's."""
    limit = {"maxnreg": REGISTERS} if sums_to_wire and cuda else {}
    return {"num_warps": WARPS, "enable_fp_fusion": False, **limit}


def _options(sums_to_wire: bool = False) -> dict[str, Any]:
    return {} if interpreted() else launch_options(sums_to_wire, torch.version.hip is None)
