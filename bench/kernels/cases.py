"""Which compilations there are: every kernel x head dim x dtype x target, at the tile that the table chooses.

The compile gate walks all of them (in the short tests `covering_cases`), the static report all but the options.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from bench.kernels.compile import Case
from bench.kernels.measure import LoopPass
from bench.kernels.targets import TARGETS
from kernels.attention.checks import MAX_HEAD_DIM
from kernels.compile.specs import (
    CODEC_KERNELS,
    ELEMENT_SIZES,
    HARDWARE_FORMATS,
    attention_spec,
    codec_spec,
    delta_spec,
    merge_spec,
)
from kernels.compile.tiling import Kernel, Tile, choose_tile, padded_width
from parallel.plan.codec import CODE_BITS, GROUPS, CodecSpec

PRODUCTS: dict[Kernel, int] = {"fwd": 2, "dq": 3, "dkdv": 4}
HEAD_DIMS = (64, 80, 128, 256)
DTYPES = ("bf16", "fp16", "fp32")
OPTIONS = ("add", "capped", "gaps", "sink")
SWITCHED = (("add",), ("sink",), ("capped",), ("gaps",), ("add", "gaps"), ("capped", "gaps"))
# kernel, head dim, dtype
_COVERING: tuple[tuple[Kernel, int, str], ...] = (
    ("fwd", 64, "bf16"), ("dq", 80, "fp16"), ("dkdv", 128, "bf16"), ("fwd", 256, "bf16"), ("dkdv", 256, "bf16"),
    ("fwd", 64, "fp32"),
)  # fmt: skip


def head_dim_argument(text: str) -> int:
    """A head dim of a command line; one that the kernels do not hold is refused."""
    if not text.isdecimal() or not 1 <= int(text) <= MAX_HEAD_DIM:
        raise argparse.ArgumentTypeError(f"head dims lie in 1..{MAX_HEAD_DIM}, not {text!r}")
    return int(text)


def attention_case(
    kernel: Kernel, head_dim: int, dtype: str, target: str, on: Sequence[str] = (), tile: Tile | None = None
) -> Case:
    """A kernel of PRODUCTS at `tile`, by default as a launch chooses it; `on`: those of OPTIONS that are switched on.

    Raises:
        ValueError: an option that is none of OPTIONS.
    """
    if unknown := sorted(set(on) - set(OPTIONS)):
        raise ValueError(f"{unknown[0]!r} is no option of a launch; use one of {', '.join(OPTIONS)}")
    size = ELEMENT_SIZES[dtype]
    switches = {name: name in on for name in OPTIONS}
    tile = tile or choose_tile(kernel, padded_width(head_dim), size, target, switches["gaps"], switches["capped"])
    spec = attention_spec(kernel, head_dim, dtype, target, tile, **switches)
    streamed = tile.block_m if kernel == "dkdv" else tile.block_n
    copied = 2 * streamed * padded_width(head_dim) * size  # keys and values, or queries and dout
    once = LoopPass(tile.block_m, tile.block_n, head_dim, PRODUCTS[kernel])
    return Case(kernel, target, dtype, head_dim, spec, once, copied, option=" ".join(on))


def attention_cases(
    head_dims: Sequence[int] = HEAD_DIMS, dtypes: Sequence[str] = DTYPES, targets: Sequence[str] = tuple(TARGETS)
) -> Iterator[Case]:
    """Forward, dq and dk/dv as `attention` launches them."""
    for target in targets:
        for dtype in dtypes:
            for head_dim in head_dims:
                for kernel in PRODUCTS:
                    yield attention_case(kernel, head_dim, dtype, target)


def row_cases(
    head_dims: Sequence[int] = HEAD_DIMS, dtypes: Sequence[str] = DTYPES, targets: Sequence[str] = tuple(TARGETS)
) -> Iterator[Case]:
    """The kernels that walk rows once and have no matrix product: delta, and merges of partial results."""
    for target in targets:
        for dtype in dtypes:
            for head_dim in head_dims:
                yield Case("delta", target, dtype, head_dim, delta_spec(head_dim, dtype))
                yield Case("merge", target, dtype, head_dim, merge_spec(head_dim, dtype))
                yield Case("merge_backward", target, dtype, head_dim, merge_spec(head_dim, dtype, backward=True))


def option_cases(targets: Sequence[str]) -> Iterator[Case]:
    """What launches switch on, at the widths that have the fewest registers to spare."""
    for target in targets:
        for head_dim in (128, 256):
            for kernel in PRODUCTS:
                for on in SWITCHED:
                    if "sink" not in on or kernel == "fwd":
                        yield attention_case(kernel, head_dim, "bf16", target, on)


def codec_cases(codecs: Sequence[CodecSpec], dtypes: Sequence[str], targets: Sequence[str]) -> Iterator[Case]:
    """The codec's kernels, those that encode also with the target's own conversion where it has one."""
    for target in targets:
        for dtype in dtypes:
            for codec in codecs:
                own = codec.format in HARDWARE_FORMATS.get(target, ())
                for kernel in CODEC_KERNELS:
                    for hardware in (False, True) if own and kernel.endswith("encode") else (False,):
                        spec = codec_spec(kernel, codec, dtype, target, hardware)
                        option = f"{codec.format}{' hardware' if hardware else ''}"
                        yield Case(kernel, target, dtype, codec.group, spec, option=option)


def every_codec() -> list[CodecSpec]:
    """Each group with e4m3 and each format with G = 128."""
    return [CodecSpec(group=G) for G in GROUPS] + [CodecSpec(form) for form in CODE_BITS if form != "e4m3"]


def covering_cases(target: str) -> Iterator[Case]:
    """For one target each kernel, each head dim and each dtype at least once: what a short test affords."""
    for kernel, head_dim, dtype in _COVERING:
        yield attention_case(kernel, head_dim, dtype, target)
    yield from row_cases((128,), ("bf16",), (target,))
    yield from codec_cases((CodecSpec(),), ("bf16",), (target,))
