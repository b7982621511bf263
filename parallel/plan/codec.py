"""Codecs by name, and the bytes of their wires: what a plan must know of compressed traffic, without torch.

A wire is one uint8 tensor: a header, the codes of each group of values, and two fp32 scales a group. A group is
padded to its full length, since a Hadamard transform spreads even a single value over all of its codes.
(TACO, arXiv 2604.24088: groups of 32 to 512 values; `kernels/codec/api.py` writes and reads wires.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

HEADER_BYTES = 16
SCALE_BYTES = 8  # of a group: alpha before the transform, s after it
CODE_BITS = {"e4m3": 8, "e5m2": 8, "e4m3fnuz": 8, "int8": 8, "int4": 4}
GROUPS = (32, 64, 128, 256, 512)
VIEWS = ("hidden", "strided", "tokens")


@dataclass(frozen=True)
class CodecSpec:
    """How values become codes.

    Attributes:
        format: of a code; a key of CODE_BITS.
        group: values that share their scales; one of GROUPS.
        hadamard: an orthonormal Hadamard transform of each group before it is coded.
        alpha: a power of two from the group's RMS before the transform, so that no sum overflows or is flushed.
        view: which values form a group, for [tokens, ...]: consecutive values of a token ("hidden"), values of a token
            that lie a stride apart ("strided"), or one channel of consecutive tokens ("tokens").

    Raises:
        ValueError: an unknown format, group or view.
    """

    format: str = "e4m3"
    group: int = 128
    hadamard: bool = True
    alpha: bool = True
    view: str = "hidden"

    def __post_init__(self) -> None:
        for name, known in (("format", tuple(CODE_BITS)), ("group", GROUPS), ("view", VIEWS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"a codec's {name} cannot be {getattr(self, name)!r}; use one of {', '.join(map(str, known))}"
                )

    def groups(self, shape: Sequence[int]) -> int:
        """Groups of a tensor; its first dim is tokens, the others are a token's values. One dim: values of one token.

        Raises:
            ValueError: a negative size.
        """
        if any(size < 0 for size in shape):
            raise ValueError(f"shape {tuple(shape)} has a negative size; give sizes of 0 or more")
        tokens, width = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
        along, across = (tokens, width) if self.view == "tokens" else (width, tokens)
        return -(-along // self.group) * across

    def wire_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of the wire of a tensor: a multiple of 16, so that wires may lie one behind another."""
        body = self.groups(shape) * (self.group * CODE_BITS[self.format] // 8 + SCALE_BYTES)
        return HEADER_BYTES + -(-body // 16) * 16


CODECS: dict[str, CodecSpec | None] = {
    "none": None,
    "fp8": CodecSpec(),
    "fp8_e5m2": CodecSpec("e5m2"),
    "fp8_fnuz": CodecSpec("e4m3fnuz"),
    "int8": CodecSpec("int8"),
    "int4": CodecSpec("int4"),
}


def codec_named(name: str) -> CodecSpec | None:
    """The codec that a configuration names: a key of CODECS, perhaps with its group behind it ("fp8/256").

    Raises:
        ValueError: an unknown name or group.
    """
    kind, _, group = name.partition("/")
    if kind not in CODECS:
        raise ValueError(f"unknown codec {name!r}; use one of {', '.join(CODECS)}, with /G for groups of G values")
    codec = CODECS[kind]
    if not group:
        return codec
    if codec is None or not group.isdigit():
        raise ValueError(f"codec {name!r} has no group {group!r}; write fp8/256, with a group of {GROUPS}")
    return replace(codec, group=int(group))


def alternatives(codec: CodecSpec, shape: Sequence[int], keep_tokens: bool) -> list[CodecSpec]:
    """The codec, and those with another view or group whose wires of this shape are no longer.

    `keep_tokens` leaves out views in which a group spans tokens, and so documents.
    """
    views = [view for view in VIEWS if not (keep_tokens and view == "tokens")]
    found = [replace(codec, view=view, group=G) for view in views for G in GROUPS]
    return [codec] + [x for x in found if x != codec and x.wire_bytes(shape) <= codec.wire_bytes(shape)]
