"""Each kernel as the compiler needs it described: argument types, compile-time values, alignments, launch options.

For compiling without a device (`triton.compile(ASTSource(...), target=...)`): compile checks and static reports. The
types are those that the kernels' host sides pass on tensors whose strides are multiples of 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels.attention.triton_backward import attention_delta, attention_dkdv, attention_dq
from kernels.attention.triton_forward import attention_forward
from kernels.codec.triton_codec import (
    decode_constants,
    encode_constants,
    fp8_decode,
    fp8_encode,
    fp8_sum_encode,
    launch_options,
    sum_constants,
)
from kernels.codec.wire import Codec
from kernels.compile.tiling import Kernel, Tile, choose_tile, late_sum, padded_width, use_descriptors
from kernels.merge.triton_merge import merge_backward, merge_forward, rows_per_program

ATTENTION: dict[Kernel, Any] = {"fwd": attention_forward, "dq": attention_dq, "dkdv": attention_dkdv}
ELEMENT_SIZES = {"fp32": 4, "fp16": 2, "bf16": 2}
CODEC_KERNELS = ("encode", "decode", "decode_sum", "decode_sum_encode")
HARDWARE_FORMATS = {"sm_90": ("e4m3", "e5m2"), "sm_100": ("e4m3", "e5m2"), "gfx942": ("e4m3fnuz",)}
_CODEC_POINTERS = {
    "CODES": "*u8", "SCALES": "*fp32", "HEAD": "*i32", "CODES_OUT": "*u8", "SCALES_OUT": "*fp32", "HEAD_OUT": "*i32",
}  # fmt: skip
_CODEC_MULTIPLES = ("stride_n", "step_a", "step_b", "far_a", "far_b", "limit")
_FP32_POINTERS = ("LSE", "LSE2", "DELTA", "DLSE", "BASE", "TOTAL")
_INT_POINTERS = ("K_START", "K_END", "Q_START", "Q_END", "ORDER")
_INTS = ("Tq", "Tk", "T", "H", "Hkv", "group", "n")
_FLOATS = ("scale", "scale2", "cap_in", "cap", "cap2")


@dataclass(frozen=True)
class KernelSpec:
    """Arguments of `triton.compiler.ASTSource` (fn, signature, constexprs, attrs) and options of `triton.compile`."""

    fn: Any
    signature: dict[str, Any]
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]


def attention_spec(
    kernel: Kernel,
    head_dim: int,
    dtype: str,
    target: str,
    tile: Tile | None = None,
    gaps: bool = False,
    add: bool = False,
    capped: bool = False,
    sink: bool = False,
    descriptors: bool | None = None,
) -> KernelSpec:
    """One of ATTENTION for D = Dv = head_dim and a dtype of ELEMENT_SIZES on a target such as "sm_90".

    The tile and the use of descriptors are those of the tile table unless given; the options are the kernels' own.
    """
    fn, width = ATTENTION[kernel], padded_width(head_dim)
    tile = tile or choose_tile(kernel, width, ELEMENT_SIZES[dtype], target, gaps, capped)
    constants: dict[str, Any] = {
        "SIGN": 1, "GAPS": gaps, "CAPPED": capped, "ADD": add, "EXACT": dtype == "fp32", "WIDE": False,
        "LATE": late_sum(target), "D": head_dim, "DV": head_dim, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "BLOCK_D": width, "BLOCK_DV": width,
    }  # fmt: skip
    if not (use_descriptors(target) if descriptors is None else descriptors):
        constants |= dict.fromkeys(("K_TILES", "V_TILES", "Q_TILES", "DOUT_TILES"))
    if not sink:
        constants["SINK"] = None
    rows = tile.block_m if kernel == "dkdv" else tile.block_n
    types = {"OUT": "*fp32" if add else f"*{dtype}", "DQ": "*fp32" if add else f"*{dtype}"}
    types |= {"DK": types["DQ"], "DV_": types["DQ"]}
    block = f"{rows}, {width}" if width == head_dim else f"1, {rows}, {width}"
    types |= dict.fromkeys(("K_TILES", "V_TILES", "Q_TILES", "DOUT_TILES"), f"tensordesc<{dtype}[{block}]>")
    return _describe(fn, dtype, types, constants, {"num_warps": tile.warps, "num_stages": tile.stages})


def delta_spec(head_dim: int, dtype: str, rows: int = 32) -> KernelSpec:
    """The delta kernel, with a gradient of lse."""
    constants = {"WIDE": False, "DV": head_dim, "BLOCK_M": rows, "BLOCK_DV": padded_width(head_dim)}
    return _describe(attention_delta, dtype, {}, constants, {"num_warps": 4})


def merge_spec(head_dim: int, dtype: str, backward: bool = False, partials: int = 2) -> KernelSpec:
    """A merge kernel of some separate partials."""
    constants = {
        "WIDE": False, "D": head_dim, "BLOCK_T": rows_per_program(head_dim), "BLOCK_D": padded_width(head_dim)
    }  # fmt: skip
    data, logs = (f"*{dtype}",) * partials, ("*fp32",) * partials
    types: dict[str, Any] = {"OUTS": data, "DOUTS": data, "LSES": logs, "DLSES": logs}
    return _describe(merge_backward if backward else merge_forward, dtype, types, constants, {"num_warps": 4})


def codec_spec(kernel: str, codec: Codec, dtype: str, target: str, hardware: bool = False) -> KernelSpec:
    """One of CODEC_KERNELS on rows whose width is a multiple of the group; sums are in fp32 whatever the dtype.

    `hardware`: with the target's own conversion, for the formats of HARDWARE_FORMATS.
    """
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if kernel == "encode":
        fn, constants = fp8_encode, encode_constants(codec, 0, hardware)
    elif kernel == "decode_sum_encode":
        fn, constants = fp8_sum_encode, sum_constants(codec, 0, hardware)
    else:
        one = kernel == "decode"
        dtype = dtype if one else "fp32"
        fn, constants = fp8_decode, decode_constants(codec, 0, kinds[dtype], one) | {"WIDE": False}
    constants |= {name: 1 for name in ("stride", "far_j") if name in fn.arg_names}
    signature: dict[str, Any] = {}
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, name in enumerate(fn.arg_names):
        pointer = _CODEC_POINTERS.get(name, f"*{dtype}" if name in ("X", "OUT") else "i32")
        signature[name] = "constexpr" if name in constants else pointer
        if signature[name].startswith("*") or name in _CODEC_MULTIPLES:
            attrs[i,] = [["tt.divisibility", 16]]
    options = launch_options(kernel == "decode_sum_encode", target.startswith("sm_"))
    return KernelSpec(fn, signature, constants, attrs, options)


def _describe(
    fn: Any, dtype: str, types: dict[str, Any], constants: dict[str, Any], options: dict[str, int]
) -> KernelSpec:
    """Types by name: what `types` says, else by the naming rules of the kernels' arguments."""
    signature: dict[str, Any] = {}
    for name in fn.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in types:
            signature[name] = types[name]
        elif name in _FP32_POINTERS or name in _INT_POINTERS:
            signature[name] = "*i32" if name in _INT_POINTERS else "*fp32"
        elif name in _FLOATS:
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if name in _INTS or name.startswith("stride") else f"*{dtype}"
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, (name, kind) in enumerate(signature.items()):
        if isinstance(kind, tuple):
            attrs |= {(i, j): [["tt.divisibility", 16]] for j in range(len(kind))}
        elif kind.startswith("*") or name.startswith("stride"):
            attrs[i,] = [["tt.divisibility", 16]]
    used = {name: value for name, value in constants.items() if name in fn.arg_names}
    return KernelSpec(fn, signature, used, attrs, options)
