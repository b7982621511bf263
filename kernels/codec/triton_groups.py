"""What the codec's kernels share on the device: the transform of a group, its sums and maxima, codes by bits.

Values of B groups of G are a cube here: [2, 2, ..., 2], the groups' own axes last. The value across an axis comes from
an integer sum over it: x ^ partner costs nothing in one thread and one shuffle between two, and no step needs shared
memory. `torch_codec.py` and `bits.py` are the plain twins; each step here rounds as theirs do.
"""

from __future__ import annotations

import triton.language as tl

from kernels.compile.runtime import jit

INF_BITS = tl.constexpr(0x7F800000)
SIZE_BITS = tl.constexpr(0x7FFFFFFF)
INT_MAGIC = tl.constexpr(12582912.0)
FLOOR = tl.constexpr(2.0**-100)


@jit
def transform(x, RANK: tl.constexpr, LOG: tl.constexpr):
    """Hadamard transform, not normalised, over the last LOG axes of a cube of RANK axes."""
    for i in tl.static_range(LOG):  # pyright: ignore[reportGeneralTypeIssues]
        bits = x.to(tl.int32, bitcast=True)
        partner = (tl.sum(bits, axis=RANK - 1 - i, keep_dims=True) - bits).to(tl.float32, bitcast=True)
        sign = tl.reshape(1.0 - 2.0 * tl.arange(0, 2).to(tl.float32), [1] * (RANK - 1 - i) + [2] + [1] * i)
        x = tl.fma(x, sign, partner)  # a + b, a - b: the product is exact
    return x


@jit
def sum_of_squares(x, RANK: tl.constexpr, LOG: tl.constexpr):
    """Of each group, as a tree of neighbours; the groups' axes keep size 1."""
    x = x * x
    for i in tl.static_range(LOG):  # pyright: ignore[reportGeneralTypeIssues]
        x = tl.sum(x, axis=RANK - 1 - i, keep_dims=True)
    return x


@jit
def largest_bits(x, RANK: tl.constexpr, LOG: tl.constexpr):
    """The largest |x| of each group as the bits of its fp32, where NaN > inf > numbers."""
    size = x.to(tl.int32, bitcast=True) & SIZE_BITS
    for i in tl.static_range(LOG):  # pyright: ignore[reportGeneralTypeIssues]
        size = tl.max(size, axis=RANK - 1 - i, keep_dims=True)
    return size


@jit
def alpha_of(squares, G: tl.constexpr):
    """The power of two that brings the RMS to 2^8..2^9, from the exponent of the mean square."""
    exponent = (squares * (1.0 / G)).to(tl.int32, bitcast=True) >> 23
    return ((127 + 8 - ((exponent - 127) >> 1)) << 23).to(tl.float32, bitcast=True)


@jit
def to_codes(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr, SIGNED_ZERO: tl.constexpr,
             HARDWARE: tl.constexpr):  # fmt: skip
    """int32 codes of fp32 numbers within the format's range; MANTISSA 0: integers in two's complement of 32 bits.

    HARDWARE: the target's own conversion, for formats that it has.
    """
    if MANTISSA == 0:
        code = (x + INT_MAGIC).to(tl.int32, bitcast=True)
    elif HARDWARE:
        if MANTISSA == 2:
            code = x.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
        elif SIGNED_ZERO:
            code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        else:
            code = x.to(tl.float8e4b8).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & SIZE_BITS
        shift: tl.constexpr = 23 - MANTISSA
        magic: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
        first: tl.constexpr = 2 ** (shift - 1) - 1 - ((127 - BIAS) << 23)
        tiny = (size.to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True) & 0xFF
        normal = tl.minimum((size + first + ((size >> shift) & 1)) >> shift, TOP)
        code = tl.where(size < (128 - BIAS) << 23, tiny, normal)
        sign = (bits >> 24) & 0x80
        if not SIGNED_ZERO:
            sign = tl.where(code == 0, 0, sign)
        code = code | sign
    return code


@jit
def from_codes(code, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """fp32 values of int32 codes, those of a float format times 2^-k: its bits moved up into half precision."""
    if MANTISSA == 0:
        x = ((code ^ 2 ** (BITS - 1)) - 2 ** (BITS - 1)).to(tl.float32)
    else:
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << (10 - MANTISSA))
        x = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return x
