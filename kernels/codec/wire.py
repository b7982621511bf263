"""A codec's wire: its header, where its parts lie, and which values of a tensor form a group.

    16 bytes   "LF", version, format | log2 G, stages, view, 0 | number of values, 8 bytes; little-endian
    codes      one group behind another, the last of a row padded to its full length
    scales     (s, alpha) of each group in fp32, then zeros up to a multiple of 16

Whatever names a codec's choices is a codec here (`parallel.plan.codec.CodecSpec` does, and knows the same sizes).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

HEADER = 16
VERSION = 1
FORMATS = {"e4m3": 1, "e5m2": 2, "e4m3fnuz": 3, "int8": 4, "int4": 5}
VIEWS = {"hidden": 0, "strided": 1, "tokens": 2}
_LAYOUT = struct.Struct("<2sBBBBBxQ")


@runtime_checkable
class Codec(Protocol):
    """What a codec is made of; `parallel/plan/codec.py` says what each means."""

    @property
    def format(self) -> str: ...
    @property
    def group(self) -> int: ...
    @property
    def hadamard(self) -> bool: ...
    @property
    def alpha(self) -> bool: ...
    @property
    def view(self) -> str: ...


@dataclass(frozen=True)
class Layout:
    """Where the groups of a tensor lie in it and in its wire.

    Group g holds the values at `(g // per) * step_a + (g % per) * step_b + j * stride`, j < G, of which those are real
    whose `(g // per) * far_a + (g % per) * far_b + j * far_j` is below `limit`; the others are padding.
    """

    groups: int
    codes: int  # bytes of all codes
    size: int  # bytes of the wire
    per: int
    step_a: int
    step_b: int
    stride: int
    far_a: int
    far_b: int
    far_j: int
    limit: int
    tokens: int
    width: int

    @property
    def scales(self) -> int:
        """The byte at which the scales begin."""
        return HEADER + self.codes

    @property
    def pairs(self) -> int:
        """Pairs of scales that there is room for: one for each group and perhaps zeros."""
        return (self.size - self.scales) // 8


def layout_of(codec: Codec, shape: Sequence[int]) -> Layout:
    """The layout of a tensor: its first dim is tokens, the others one token's values; so is a single dim."""
    G = codec.group
    tokens, width = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
    if codec.view == "tokens":
        count, rows = -(-tokens // G), width
        place = (max(rows, 1), G * width, 1, width, G, 0, 1, tokens)
    else:
        count, rows = -(-width // G), tokens
        per = max(count, 1)
        strided = codec.view == "strided"
        place = (per, width, 1, per, 0, 1, per, width) if strided else (per, width, G, 1, 0, G, 1, width)
    groups = count * rows
    codes = groups * G // (2 if codec.format == "int4" else 1)
    size = HEADER + -(-(codes + 8 * groups) // 16) * 16
    return Layout(groups, codes, size, *place, tokens, width)


def header_of(codec: Codec, values: int) -> bytes:
    """The 16 bytes that say what a wire holds."""
    stages = codec.hadamard | codec.alpha << 1
    return _LAYOUT.pack(
        b"LF", VERSION, FORMATS[codec.format], codec.group.bit_length() - 1, stages, VIEWS[codec.view], values
    )


def header_words(codec: Codec, values: int) -> tuple[int, int, int, int]:
    """The header as four int32."""
    return struct.unpack("<4i", header_of(codec, values))


def described(header: bytes) -> str:
    """A header in words."""
    mark, version, kind, log2_group, stages, view, values = _LAYOUT.unpack(header)
    if mark != b"LF":
        return f"no wire of this codec (it begins with {header[:2].hex()}, not {b'LF'.hex()})"
    names = {tag: name for name, tag in FORMATS.items()}
    views = {tag: name for name, tag in VIEWS.items()}
    on = [name for bit, name in enumerate(("hadamard", "alpha")) if stages >> bit & 1]
    return (
        f"version {version}, {names.get(kind, f'format {kind}')}, groups of {1 << min(log2_group, 63)}, "
        f"{' and '.join(on) or 'no stage'}, view {views.get(view, view)}, {values} values"
    )


def check_size(wire: Tensor, codec: Codec, layout: Layout, shape: Sequence[int]) -> None:
    """Raise ValueError unless `wire` (or each row of it) is uint8 of the size that the shape's wire has."""
    if wire.dtype != torch.uint8 or wire.dim() < 1 or wire.shape[-1] != layout.size:
        raise ValueError(
            f"a wire of {tuple(shape)} in {codec.format}, G={codec.group}, is {layout.size} uint8 bytes, but got "
            f"{tuple(wire.shape)} {wire.dtype}; decode with the codec and shape that it was encoded with"
        )


def check_header(wire: Tensor, codec: Codec, values: int) -> None:
    """Raise ValueError unless `wire` (or each row of it) has this codec's header. Waits for the device."""
    want = header_of(codec, values)
    for i, row in enumerate(wire.reshape(-1, wire.shape[-1])[:, :HEADER].cpu()):
        if (got := bytes(row.tolist())) != want:
            raise ValueError(
                f"wire {i} is {described(got)}, but {described(want)} are wanted; encode and decode with one codec"
            )


def grouped(x: Tensor, codec: Codec, layout: Layout) -> Tensor:
    """The values of x as [groups, G], padded with zeros."""
    G, T, C = codec.group, layout.tokens, layout.width
    x = x.reshape(T, C).contiguous()
    if codec.view == "tokens":
        count = -(-T // G)
        return F.pad(x, (0, 0, 0, count * G - T)).view(count, G, C).transpose(1, 2).reshape(-1, G)
    count = -(-C // G)
    x = F.pad(x, (0, count * G - C))
    if codec.view == "strided":
        return x.view(T, G, count).transpose(1, 2).reshape(-1, G)
    return x.view(-1, G)


def ungrouped(x: Tensor, codec: Codec, layout: Layout) -> Tensor:
    """The values [tokens, width] of groups [groups, G]; padding is dropped."""
    G, T, C = codec.group, layout.tokens, layout.width
    if not layout.groups:
        return x.new_empty(T, C)
    if codec.view == "tokens":
        return x.view(-1, C, G).transpose(1, 2).reshape(-1, C)[:T]
    count = -(-C // G)
    x = x.view(T, count, G)
    return (x.transpose(1, 2) if codec.view == "strided" else x).reshape(T, count * G)[:, :C]
