"""The codec of `kernels/codec/api.py` in a compiler's graph: one operator each for encode, decode and the two sums.

They differ from the functions only in that a codec travels as one word, and results are always new tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.codec.wire import Codec, layout_of


@dataclass(frozen=True)
class Choices:
    """A codec, read from its word; `parallel/plan/codec.py` says what each choice means."""

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
    """`kernels.codec.api.encode`."""
    from kernels.codec.api import encode  # which calls this operator under a compiler

    return encode(x, _read(codec))


@encode_op.register_fake
def _(x: Tensor, codec: str) -> Tensor:
    return _new_wire(x, x.shape, codec)


@torch.library.custom_op("longfold::decode", mutates_args=())
def decode_op(wire: Tensor, codec: str, shape: Sequence[int], dtype: torch.dtype, trusted: bool) -> Tensor:
    """`kernels.codec.api.decode`."""
    from kernels.codec.api import decode

    return decode(wire, _read(codec), shape, dtype, trusted).contiguous()


@decode_op.register_fake
def _(wire: Tensor, codec: str, shape: Sequence[int], dtype: torch.dtype, trusted: bool) -> Tensor:
    return wire.new_empty(tuple(shape), dtype=dtype)


@torch.library.custom_op("longfold::decode_sum", mutates_args=())
def decode_sum_op(wires: Tensor, codec: str, shape: Sequence[int], trusted: bool) -> Tensor:
    """`kernels.codec.api.decode_sum`."""
    from kernels.codec.api import decode_sum

    return decode_sum(wires, _read(codec), shape, trusted).contiguous()


@decode_sum_op.register_fake
def _(wires: Tensor, codec: str, shape: Sequence[int], trusted: bool) -> Tensor:
    return wires.new_empty(tuple(shape), dtype=torch.float32)


@torch.library.custom_op("longfold::decode_sum_encode", mutates_args=())
def decode_sum_encode_op(wires: Tensor, codec: str, shape: Sequence[int], trusted: bool) -> Tensor:
    """`kernels.codec.api.decode_sum_encode`."""
    from kernels.codec.api import decode_sum_encode

    return decode_sum_encode(wires, _read(codec), shape, trusted=trusted)


@decode_sum_encode_op.register_fake
def _(wires: Tensor, codec: str, shape: Sequence[int], trusted: bool) -> Tensor:
    return _new_wire(wires, shape, codec)


def _new_wire(near: Tensor, shape: Sequence[int], codec: str) -> Tensor:
    return near.new_empty(layout_of(_read(codec), shape).size, dtype=torch.uint8)
