"""The codec of `kernels/fp8.py` in a compiler's graph: one operator each for encode, decode and the two sums.

They differ from the functions only in that a codec travels as its five choices, and results are always new tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.wire import Codec, layout_of


@dataclass(frozen=True)
class Choices:
    """A codec's choices as an operator takes them; `parallel/plan/codec.py` says what each means."""

    format: str
    group: int
    hadamard: bool
    alpha: bool
    view: str


def choices(codec: Codec) -> tuple[str, int, bool, bool, str]:
    """The arguments that stand for `codec`."""
    return codec.format, codec.group, codec.hadamard, codec.alpha, codec.view


@torch.library.custom_op("longfold::encode", mutates_args=())
def encode_op(x: Tensor, format: str, group: int, hadamard: bool, alpha: bool, view: str) -> Tensor:
    """`kernels.fp8.encode`."""
    from kernels.fp8 import encode  # which calls this operator under a compiler

    return encode(x, Choices(format, group, hadamard, alpha, view))


@encode_op.register_fake
def _(x: Tensor, format: str, group: int, hadamard: bool, alpha: bool, view: str) -> Tensor:
    return _new_wire(x, x.shape, Choices(format, group, hadamard, alpha, view))


@torch.library.custom_op("longfold::decode", mutates_args=())
def decode_op(
    wire: Tensor,
    format: str,
    group: int,
    hadamard: bool,
    alpha: bool,
    view: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    trusted: bool,
) -> Tensor:
    """`kernels.fp8.decode`."""
    from kernels.fp8 import decode

    return decode(wire, Choices(format, group, hadamard, alpha, view), shape, dtype, trusted).contiguous()


@decode_op.register_fake
def _(
    wire: Tensor,
    format: str,
    group: int,
    hadamard: bool,
    alpha: bool,
    view: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    trusted: bool,
) -> Tensor:
    return wire.new_empty(tuple(shape), dtype=dtype)


@torch.library.custom_op("longfold::decode_sum", mutates_args=())
def decode_sum_op(
    wires: Tensor,
    format: str,
    group: int,
    hadamard: bool,
    alpha: bool,
    view: str,
    shape: Sequence[int],
    trusted: bool,
) -> Tensor:
    """`kernels.fp8.decode_sum`."""
    from kernels.fp8 import decode_sum

    return decode_sum(wires, Choices(format, group, hadamard, alpha, view), shape, trusted).contiguous()


@decode_sum_op.register_fake
def _(
    wires: Tensor,
    format: str,
    group: int,
    hadamard: bool,
    alpha: bool,
    view: str,
    shape: Sequence[int],
    trusted: bool,
) -> Tensor:
    return wires.new_empty(tuple(shape), dtype=torch.float32)


@torch.library.custom_op("longfold::decode_sum_encode", mutates_args=())
def decode_sum_encode_op(
    wires: Tensor,
    format: str,
    group: int,
    hadamard: bool,
    alpha: bool,
    view: str,
    shape: Sequence[int],
    trusted: bool,
) -> Tensor:
    """`kernels.fp8.decode_sum_encode`."""
    from kernels.fp8 import decode_sum_encode

    return decode_sum_encode(wires, Choices(format, group, hadamard, alpha, view), shape, trusted=trusted)


@decode_sum_encode_op.register_fake
def _(
    wires: Tensor,
    format: str,
    group: int,
    hadamard: bool,
    alpha: bool,
    view: str,
    shape: Sequence[int],
    trusted: bool,
) -> Tensor:
    return _new_wire(wires, shape, Choices(format, group, hadamard, alpha, view))


def _new_wire(near: Tensor, shape: Sequence[int], codec: Choices) -> Tensor:
    return near.new_empty(layout_of(codec, shape).size, dtype=torch.uint8)
