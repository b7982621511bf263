"""Numbers to 8-bit codes and back by integer arithmetic on their bits: round to nearest even, saturating.

The bytes are those of torch's cast of the clamped value, on every device and without a conversion unit; without the
clamp, casts overflow differently by format and version. (Formats: OCP OFP8, revision 1.0; e4m3fnuz as on AMD CDNA3,
with a bias of 8 and no negative zero.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor


@dataclass(frozen=True)
class Float8:
    """An 8-bit floating format: bits of the mantissa, exponent bias, largest value and its code, torch's dtype.

    `half` is 2^k such that a code's bits, moved up into a half-precision number, are the value times 2^-k.
    """

    mantissa: int
    bias: int
    largest: float
    top: int
    dtype: torch.dtype
    half: float
    signed_zero: bool = True

    @property
    def magic(self) -> float:
        """Adding it to a value below the smallest normal rounds that to the format's smallest step."""
        return 2.0 ** (24 - self.bias - self.mantissa)


FLOAT8 = {
    "e4m3": Float8(3, 7, 448.0, 0x7E, torch.float8_e4m3fn, 256.0),
    "e5m2": Float8(2, 15, 57344.0, 0x7B, torch.float8_e5m2, 1.0),
    "e4m3fnuz": Float8(3, 8, 240.0, 0x7F, torch.float8_e4m3fnuz, 128.0, signed_zero=False),
}
LARGEST = {name: kind.largest for name, kind in FLOAT8.items()} | {"int8": 127.0, "int4": 7.0}
INT_MAGIC = 12582912.0  # 1.5 x 2^23: in a sum with it, a number below 2^22 is an integer in the low bits


def to_codes(x: Float[Tensor, "*shape"], format: str) -> UInt8[Tensor, "*shape"]:
    """Codes of finite fp32 numbers, clamped to the format's range; int4 leaves a nibble in each byte.

    The code of a NaN is that of the largest value: it has none of its own in every format.
    """
    x = x.float()
    if format not in FLOAT8:
        largest = LARGEST[format]
        code = (x.clamp(-largest, largest) + INT_MAGIC).view(torch.int32)
        return (code & (0xFF if format == "int8" else 0xF)).to(torch.uint8)
    kind = FLOAT8[format]
    bits = x.view(torch.int32)
    size = bits & 0x7FFFFFFF
    shift = 23 - kind.mantissa
    tiny = (size.view(torch.float32) + kind.magic).view(torch.int32) & 0xFF  # the magic's own low byte is 0
    first = (1 << (shift - 1)) - 1 - ((127 - kind.bias) << 23)
    normal = (size + first + (size >> shift & 1)) >> shift
    code = torch.where(size < (128 - kind.bias) << 23, tiny, normal.clamp(max=kind.top))
    sign = bits >> 24 & 0x80
    return (code | (sign if kind.signed_zero else torch.where(code == 0, 0, sign))).to(torch.uint8)


def from_codes(codes: UInt8[Tensor, "*shape"], format: str) -> Float[Tensor, "*shape"]:
    """fp32 values of codes that `to_codes` makes; a float format's codes for NaN and infinity come out as numbers."""
    if format not in FLOAT8:
        code = codes.to(torch.int32)
        half = 128 if format == "int8" else 8
        return ((code ^ half) - half).float()
    kind = FLOAT8[format]
    code = codes.to(torch.int32)
    bits = (code & 0x80) << 8 | (code & 0x7F) << (10 - kind.mantissa)
    return bits.to(torch.int16).view(torch.float16).float() * kind.half
