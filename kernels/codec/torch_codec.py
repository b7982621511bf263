"""The codec's arithmetic in plain torch: the twin that defines every byte of a wire. `api.py` has its rules.

All in fp32, each operation rounded on its own, sums as trees of neighbours, so that another implementation can agree
bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from kernels.codec.bits import LARGEST, from_codes, to_codes
from kernels.codec.wire import HEADER, Codec, Layout, grouped, header_of, layout_of, ungrouped

FLOOR = 2.0**-100  # the least amax that scales are made of: 448 / FLOOR and FLOOR / 448 are normal numbers
INF_BITS = 0x7F800000


def hadamard(x: Float32[Tensor, "n G"]) -> Float32[Tensor, "n G"]:
    """The Hadamard transform of each row in Sylvester's order, not normalised: twice is G times the row."""
    for i in range(x.shape[1].bit_length() - 1):
        pairs = x.view(x.shape[0], x.shape[1] >> i + 1, 2, 1 << i)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        x = torch.stack((a + b, a - b), 2).view(x.shape)
    return x


def norm_of(group: int) -> float:
    """1 / sqrt(G), in fp32."""
    return float(torch.tensor(1 / group**0.5, dtype=torch.float32, device="cpu"))


def encode(x: Float[Tensor, "*shape"], codec: Codec) -> UInt8[Tensor, " size"]:
    """The wire of x."""
    layout = layout_of(codec, x.shape)
    y = grouped(x.float(), codec, layout)
    alpha = torch.ones_like(y[:, :1])
    if codec.alpha:
        alpha = _alpha(y)
        y = y * alpha
    if codec.hadamard:
        y = hadamard(y)
    return _wire(y, alpha, norm_of(codec.group) if codec.hadamard else 1.0, codec, layout, x.numel())


def decode(
    wire: UInt8[Tensor, " size"], codec: Codec, shape: Sequence[int], dtype: torch.dtype
) -> Float[Tensor, "*shape"]:
    """The tensor of a wire; saturates at the dtype's largest number."""
    layout = layout_of(codec, shape)
    y, alpha = _sum(wire[None], codec, layout, shape)
    limit = torch.finfo(dtype).max
    return ungrouped(_values(y, alpha, codec).clamp(-limit, limit), codec, layout).to(dtype).reshape(tuple(shape))


def decode_sum(wires: UInt8[Tensor, "n size"], codec: Codec, shape: Sequence[int]) -> Float32[Tensor, "*shape"]:
    """The sum of n wires' tensors."""
    layout = layout_of(codec, shape)
    return ungrouped(_values(*_sum(wires, codec, layout, shape), codec), codec, layout).reshape(tuple(shape))


def decode_sum_encode(wires: UInt8[Tensor, "n size"], codec: Codec, shape: Sequence[int]) -> UInt8[Tensor, " size"]:
    """The wire of the sum of n wires' tensors, summed where they are: in transformed values."""
    layout = layout_of(codec, shape)
    y, alpha = _sum(wires, codec, layout, shape)
    return _wire(y, alpha, 1.0, codec, layout, layout.tokens * layout.width)


def _alpha(y: Tensor) -> Tensor:
    """[groups, 1]: the power of two that brings each group's RMS to 2^8..2^9, between 2^-56 and 2^72."""
    squares = y * y
    while squares.shape[1] > 1:
        squares = squares[:, 0::2] + squares[:, 1::2]
    exponent = (squares * (1 / y.shape[1])).view(torch.int32) >> 23  # of an overflow 255, of a NaN too
    return (127 + 8 - (exponent - 127 >> 1) << 23).view(torch.float32)


def _wire(y: Tensor, alpha: Tensor, norm: float, codec: Codec, layout: Layout, values: int) -> Tensor:
    """Codes and scales of y [groups, G], of which `norm` times is what the codes stand for."""
    wire = torch.zeros(layout.size, dtype=torch.uint8, device=y.device)
    wire[:HEADER] = torch.frombuffer(bytearray(header_of(codec, values)), dtype=torch.uint8)
    if not layout.groups:
        return wire
    amax = (y.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True)  # as integers NaN > inf > numbers
    bad = amax >= INF_BITS
    top = amax.view(torch.float32).clamp(min=FLOOR)
    largest = torch.full_like(top, LARGEST[codec.format])  # by a number torch divides with its reciprocal
    s = torch.where(bad, torch.nan, top * norm / largest)
    codes = to_codes(torch.where(bad, 0, y) * (largest / torch.where(bad, 1, top)), codec.format)
    if codec.format == "int4":
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    wire[HEADER : layout.scales] = codes.reshape(-1)
    wire[layout.scales : layout.scales + 8 * layout.groups] = torch.cat((s, alpha), 1).view(torch.uint8).reshape(-1)
    return wire


def _sum(wires: Tensor, codec: Codec, layout: Layout, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Transformed values [groups, G] of the sum, in units of 1 / alpha, with the least alpha [groups, 1] of all."""
    want = torch.frombuffer(bytearray(header_of(codec, layout.tokens * layout.width)), dtype=torch.uint8)
    good = (wires[:, :HEADER] == want.to(wires.device)).all(1)
    scales = wires[:, layout.scales : layout.scales + 8 * layout.groups].clone().view(torch.float32)
    s, alphas = scales.view(len(wires), layout.groups, 2, 1).unbind(2)
    s = torch.where(good[:, None, None], s, torch.nan)
    alpha = alphas.amin(0)
    total = None
    for wire, scale, own in zip(wires, s, alphas):
        codes = wire[HEADER : layout.scales].view(layout.groups, layout.codes // max(layout.groups, 1))
        if codec.format == "int4":
            codes = torch.stack((codes & 15, codes >> 4), 2).view(layout.groups, codec.group)
        part = from_codes(codes, codec.format) * (scale * (alpha / own))
        total = part if total is None else total + part
    assert total is not None
    return total, alpha


def _values(y: Tensor, alpha: Tensor, codec: Codec) -> Tensor:
    norm = 1.0
    if codec.hadamard:
        y, norm = hadamard(y), norm_of(codec.group)
    return y * (norm / alpha)
