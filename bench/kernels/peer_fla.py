"""fla-core (flash-linear-attention, https://github.com/fla-org/flash-linear-attention) compiled for our targets.

`parallel_attn`: causal, with documents by cu_seqlens, at the tiles that its launcher picks for the target. An optional
peer: `pip install --no-deps -r requirements-peers.txt`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from bench.kernels.compile import Case, describe
from bench.kernels.measure import LoopPass

_HEADS, _GROUP = 32, 4


def fla_cases(head_dim: int, dtype: str, target: str) -> list[Case]:
    """The forward, dq and dk/dv kernels of fla-core; none in fp32, where it multiplies in tf32.

    Raises:
        ImportError: fla-core is not installed, or does not hold these kernels.
    """
    try:
        module = importlib.import_module("fla.ops.attn.parallel")
        version = importlib.metadata.version("fla-core")
    except ImportError as error:
        raise ImportError(f"fla-core is not here ({error}); pip install --no-deps -r requirements-peers.txt") from error
    if dtype == "fp32":
        return []
    peer = f"fla-core {version}"
    width = max(16, 1 << (head_dim - 1).bit_length())
    cases = []
    for kernel, name in (("fwd", "fwd_kernel"), ("dq", "bwd_kernel_dq"), ("dkdv", "bwd_kernel_dkv")):
        launched: Any = getattr(module, f"parallel_attn_{name}")
        for rows, columns, warps in _fla_tiles(kernel, head_dim, target):
            fn = launched.fn  # under the heuristics, whose flags are given here
            known = {
                "scale": "fp32", "T": "i32", "cu_seqlens": "*i64:16", "chunk_indices": "*i64:16", "lse": "*fp32:16",
                "delta": "*fp32:16", "g_cumsum": None, "dg_cumsum": None, "sink_bias": None, "W": None, "B": 1,
                "H": _HEADS // _GROUP, "HQ": _HEADS, "G": _GROUP, "K": head_dim, "V": head_dim, "BT": rows,
                "BS": columns, "BK": width, "BV": width, "USE_G": False, "USE_SINK_BIAS": False, "USE_WINDOW": False,
                "IS_VARLEN": True, "dq": "*fp32:16", "dk": "*fp32:16", "dv": "*fp32:16",
            }  # fmt: skip
            arguments = {p: known.get(p, f"*{dtype}:16") for p in fn.arg_names}
            products = {"fwd": 2, "dq": 3, "dkdv": 4}[kernel]
            tile = LoopPass(rows, columns, head_dim, products)
            # its launcher gives no number of stages: the compiler's default is 3 on NVIDIA, 2 on AMD
            spec = describe(fn, arguments, warps, 2 if target == "gfx942" else 3)
            cases.append(Case(kernel, target, dtype, head_dim, spec, tile, peer=peer))
    return cases


def _fla_tiles(kernel: str, head_dim: int, target: str) -> list[tuple[int, int, int]]:
    """(rows, columns, warps) as its launcher chooses, by what it calls hopper, ampere and the rest."""
    if target in ("sm_90", "sm_100"):
        return [(128, 64, 8)]
    if target == "sm_80":
        rows = 128 if kernel == "fwd" or head_dim <= 64 else 64
        return [(rows, 32, 4)]
    return [(128 if kernel == "fwd" else 64, 32, 2)]
