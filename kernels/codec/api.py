"""A tensor as one wire of about a byte a value, and back: groups of G values in FP8 (or int8, int4) with two scales.

    wire = encode(x, codec)                             # alpha from the RMS, Hadamard transform, s from the absmax
    x = decode(wire, codec, x.shape, x.dtype)
    total = decode_sum(wires, codec, shape)             # n wires to one fp32 sum
    wire = decode_sum_encode(wires, codec, shape)       # the middle of a two-shot all-reduce

One launch each on a GPU; the plain twin, `kernels/codec/torch_codec.py`, defines every byte.

Rules. A group of zeros decodes to zeros. A NaN or an infinity makes every value of its own group NaN, and of no other.
Any other group stays finite, subnormal or huge, unless alpha is off and a transform's sum overflows: then it is NaN.
`decode` saturates at the largest number of its dtype. With `trusted` the header is not read on the host, which would
wait for the device: where it is not the codec's, every value is NaN instead. Nothing here is differentiable.

(TACO, arXiv 2604.24088. Its alpha is 448 / RMS, cut to 1e-3..1e3; here it is a power of two, which cancels exactly, so
that codes do not depend on it. Transforms are linear, so sums are taken before the transform back.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from kernels.codec import torch_codec as fp8_torch
from kernels.codec.wire import Codec, check_header, check_size, layout_of
from kernels.compile.runtime import triton_installed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def encode(
    x: Float[Tensor, "*shape"], codec: Codec, out: UInt8[Tensor, " size"] | None = None
) -> UInt8[Tensor, " size"]:
    """The wire of x, whose first dim is tokens; written to `out` where that is given.

    Raises:
        ValueError: a dtype that is not fp32, bf16 or fp16, or an `out` that does not fit.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"a codec takes fp32, bf16 or fp16, not {x.dtype}; cast first")
    if torch.compiler.is_compiling():
        return _given(encode_op(x, spell(codec)), out)
    out = _target(x, codec, x.shape, out)
    if _fused(x):
        from kernels.codec.triton_codec import encode_triton  # a machine without a GPU may lack Triton

        return encode_triton(x, codec, out)
    return out.copy_(fp8_torch.encode(x, codec))


@torch.no_grad()
def decode(
    wire: UInt8[Tensor, "..."],
    codec: Codec,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    trusted: bool = False,
) -> Float[Tensor, "*shape"]:
    """The tensor of this shape that a wire holds.

    Raises:
        ValueError: a wire of another size, codec or version; an output dtype that is not fp32, bf16 or fp16.
    """
    if dtype not in DTYPES:
        raise ValueError(f"a codec gives fp32, bf16 or fp16, not {dtype}; cast afterwards")
    if torch.compiler.is_compiling():  # the operators check their wires when they run
        return decode_op(wire, spell(codec), shape, dtype, trusted)
    if wire.dim() != 1:
        raise ValueError(f"decode takes one wire, a flat tensor, not {tuple(wire.shape)}; use decode_sum for several")
    wires = _wires(wire[None], codec, shape, trusted)
    if _fused(wire):
        from kernels.codec.triton_codec import decode_triton

        return decode_triton(wires, codec, shape, dtype)
    return fp8_torch.decode(wires[0], codec, shape, dtype)


@torch.no_grad()
def decode_sum(
    wires: UInt8[Tensor, "..."], codec: Codec, shape: Sequence[int], trusted: bool = False
) -> Float32[Tensor, "*shape"]:
    """The sum of n >= 1 wires' tensors, in fp32 throughout.

    Raises:
        ValueError: no wire, or wires of another size, codec or version.
    """
    if torch.compiler.is_compiling():
        return decode_sum_op(wires, spell(codec), shape, trusted)
    wires = _wires(wires, codec, shape, trusted)
    if _fused(wires):
        from kernels.codec.triton_codec import decode_sum_triton

        return decode_sum_triton(wires, codec, shape)
    return fp8_torch.decode_sum(wires, codec, shape)


@torch.no_grad()
def decode_sum_encode(
    wires: UInt8[Tensor, "..."],
    codec: Codec,
    shape: Sequence[int],
    out: UInt8[Tensor, " size"] | None = None,
    trusted: bool = False,
) -> UInt8[Tensor, " size"]:
    """The wire of the sum of n >= 1 wires' tensors: summed in fp32, coded once, without a transform either way.

    alpha of a group is the least of its wires'. `out` must not be one of them.

    Raises:
        ValueError: as `decode_sum`, or an `out` that does not fit.
    """
    if torch.compiler.is_compiling():
        return _given(decode_sum_encode_op(wires, spell(codec), shape, trusted), out)
    wires = _wires(wires, codec, shape, trusted)
    out = _target(wires, codec, shape, out)
    if _fused(wires):
        from kernels.codec.triton_codec import decode_sum_encode_triton

        return decode_sum_encode_triton(wires, codec, shape, out)
    return out.copy_(fp8_torch.decode_sum_encode(wires, codec, shape))


def _given(wire: Tensor, out: Tensor | None) -> Tensor:
    """The wire, copied to `out` where that is given."""
    if out is None:
        return wire
    if out.shape != wire.shape or out.dtype != torch.uint8:
        raise ValueError(
            f"the wire is {wire.numel()} uint8 bytes, and out is {tuple(out.shape)} {out.dtype}; leave it out"
        )
    return out.copy_(wire)


def _fused(x: Tensor) -> bool:
    return x.device.type == "cuda" and triton_installed()


def _wires(wires: Tensor, codec: Codec, shape: Sequence[int], trusted: bool) -> Tensor:
    """The wires, checked, each in one piece and aligned to 16 bytes; copied where they are not."""
    layout = layout_of(codec, shape)
    if wires.dim() != 2 or not len(wires):
        raise ValueError(f"wires must be [n, bytes] with n of 1 or more, not {tuple(wires.shape)}; stack them")
    check_size(wires, codec, layout, shape)
    if not trusted:
        check_header(wires, codec, layout.tokens * layout.width)
    apart = len(wires) == 1 or (wires.stride(0) >= layout.size and wires.stride(0) % 16 == 0)
    if wires.stride(1) != 1 or not apart or wires.data_ptr() % 16:
        return wires.clone(memory_format=torch.contiguous_format)
    return wires


def _target(near: Tensor, codec: Codec, shape: Sequence[int], out: Tensor | None) -> Tensor:
    """`out`, checked, or a new wire on the device of `near`."""
    layout = layout_of(codec, shape)
    if out is None:
        return torch.empty(layout.size, dtype=torch.uint8, device=near.device)
    check_size(out, codec, layout, shape)
    if out.dim() != 1 or not out.is_contiguous() or out.data_ptr() % 16 or out.device != near.device:
        raise ValueError(
            f"out must be flat, in one piece, at an address that 16 divides and on {near.device}, but it has strides "
            f"{out.stride()}, address {out.data_ptr() % 16} mod 16 and device {out.device}; cut it from an aligned slab"
        )
    return out


@dataclass(frozen=True)
class Choices:
    """A codec, read from the word by which it travels to an operator; `parallel/plan/codec.py` says what each choice
    means."""

    format: str
    group: int
    hadamard: bool
    alpha: bool
    view: str


def spell(codec: Codec) -> str:
    """The word that stands for `codec`: "e4m3/128/11/hidden"."""
    return f"{codec.format}/{codec.group}/{codec.hadamard:d}{codec.alpha:d}/{codec.view}"


def _read(word: str) -> Choices:
    form, group, stages, view = word.split("/")
    return Choices(form, int(group), stages[0] == "1", stages[1] == "1", view)


@torch.library.custom_op("longfold::encode", mutates_args=())
def encode_op(x: Tensor, codec: str) -> Tensor:
    """`encode` as one operator in a compiler's graph."""
    return encode(x, _read(codec))


@encode_op.register_fake
def _(x: Tensor, codec: str) -> Tensor:
    return _new_wire(x, x.shape, codec)


@torch.library.custom_op("longfold::decode", mutates_args=())
def decode_op(wire: Tensor, codec: str, shape: Sequence[int], dtype: torch.dtype, trusted: bool) -> Tensor:
    """`decode` as one operator in a compiler's graph."""
    return decode(wire, _read(codec), shape, dtype, trusted).contiguous()


@decode_op.register_fake
def _(wire: Tensor, codec: str, shape: Sequence[int], dtype: torch.dtype, trusted: bool) -> Tensor:
    return wire.new_empty(tuple(shape), dtype=dtype)


@torch.library.custom_op("longfold::decode_sum", mutates_args=())
def decode_sum_op(wires: Tensor, codec: str, shape: Sequence[int], trusted: bool) -> Tensor:
    """`decode_sum` as one operator in a compiler's graph."""
    return decode_sum(wires, _read(codec), shape, trusted).contiguous()


@decode_sum_op.register_fake
def _(wires: Tensor, codec: str, shape: Sequence[int], trusted: bool) -> Tensor:
    return wires.new_empty(tuple(shape), dtype=torch.float32)


@torch.library.custom_op("longfold::decode_sum_encode", mutates_args=())
def decode_sum_encode_op(wires: Tensor, codec: str, shape: Sequence[int], trusted: bool) -> Tensor:
    """`decode_sum_encode` as one operator in a compiler's graph."""
    return decode_sum_encode(wires, _read(codec), shape, trusted=trusted)


@decode_sum_encode_op.register_fake
def _(wires: Tensor, codec: str, shape: Sequence[int], trusted: bool) -> Tensor:
    return _new_wire(wires, shape, codec)


def _new_wire(near: Tensor, shape: Sequence[int], codec: str) -> Tensor:
    return near.new_empty(layout_of(_read(codec), shape).size, dtype=torch.uint8)
