"""torch's flex_attention kernels without a device: its Triton template, rendered for a causal document mask.

Inductor fills this template while it traces on a GPU. What it would fill in for static shapes is plain text: sizes and
strides as numbers, the options as constants, and the mask as an expression; so it is filled in here. Tiles are the
defaults that torch 2.13 takes for the chip (`torch/_inductor/template_heuristics/triton.py`, without max_autotune).
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.kernels.compile import Case, describe
from bench.kernels.measure import LoopPass

_HEADS, _GROUP, _TOKENS, _BLOCK = 32, 4, 16384, 128
# (target, head dim) -> block_m, block_n, stages, warps of the forward
_FORWARD = {
    ("sm_80", 64): (128, 64, 3, 4), ("sm_80", 128): (128, 64, 3, 8), ("sm_80", 256): (32, 64, 3, 4),
    ("sm_90", 64): (128, 128, 3, 4), ("sm_90", 128): (128, 64, 3, 8), ("sm_90", 256): (64, 32, 3, 4),
    ("sm_100", 64): (128, 128, 3, 4), ("sm_100", 128): (128, 64, 3, 8), ("sm_100", 256): (64, 32, 3, 4),
}  # fmt: skip
# (target, head dim) -> block_m1, block_n1 (dk/dv), block_m2, block_n2 (dq), stages, warps of the backward
_BACKWARD = {
    ("sm_80", 64): (64, 64, 64, 64, 2, 4), ("sm_80", 128): (64, 64, 64, 64, 2, 4),
    ("sm_80", 256): (64, 64, 64, 64, 2, 4),
    ("sm_90", 64): (64, 128, 128, 64, 3, 8), ("sm_90", 128): (64, 128, 128, 64, 3, 8),
    ("sm_90", 256): (64, 64, 64, 64, 2, 4),
    ("sm_100", 64): (64, 128, 128, 64, 3, 4), ("sm_100", 128): (64, 128, 128, 64, 3, 4),
    ("sm_100", 256): (64, 64, 64, 64, 1, 4),
}  # fmt: skip


def flex_cases(head_dim: int, dtype: str, target: str) -> list[Case]:
    """Forward, dq and dk/dv; the last two are loops of one kernel. Half precision and head dims of the tables alone.

    Raises:
        ImportError: this torch has no such template, or another one.
    """
    if dtype == "fp32" or (target, head_dim) not in _FORWARD:
        return []
    import torch

    peer = f"torch {torch.__version__.split('+')[0]} flex"
    rows, columns, stages, warps = _FORWARD[target, head_dim]
    fn = _kernel("forward", head_dim, (("BLOCK_M", rows), ("BLOCK_N", columns)))
    cases = [Case("fwd", target, dtype, head_dim, describe(fn, _arguments(fn, dtype), warps, stages),
                  LoopPass(rows, columns, head_dim, 2), peer=peer)]  # fmt: skip
    m1, n1, m2, n2, stages, warps = _BACKWARD[target, head_dim]
    blocks = (("BLOCK_M1", m1), ("BLOCK_N1", n1), ("BLOCK_M2", m2), ("BLOCK_N2", n2))
    fn = _kernel("backward", head_dim, blocks)
    spec = describe(fn, _arguments(fn, dtype), warps, stages)
    for kernel, tile in (("dq", LoopPass(m2, n2, head_dim, 3)), ("dkdv", LoopPass(m1, n1, head_dim, 4))):
        cases.append(Case(kernel, target, dtype, head_dim, spec, tile, peer=peer, shared_kernel=True))
    return cases


def _arguments(fn: Any, dtype: str) -> dict[str, str]:
    floats, halves = ("LSE", "DELTA", "MAX"), ("Q", "K", "V", "DO", "DQ", "DV", "STORED")
    bare = {p: p.removeprefix("arg_") for p in fn.arg_names}
    return {p: "*fp32:16" if n in floats else f"*{dtype}:16" if n in halves else "*i32:16" for p, n in bare.items()}


@lru_cache
def _kernel(kind: str, head_dim: int, blocks: tuple[tuple[str, int], ...]) -> Any:
    """The jitted entry of the rendered template."""
    text = "import triton\nimport triton.language as tl\n\n\n" + _render(kind, head_dim, dict(blocks))
    with tempfile.TemporaryDirectory() as folder:  # triton reads a kernel's source from its file when it decorates
        path = Path(folder) / f"flex_{kind}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load the rendered template from {path}")
        module: ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module.flex_kernel


def _render(kind: str, head_dim: int, blocks: dict[str, int]) -> str:
    """The template's source with sizes, strides, options and a causal document mask filled in."""
    try:
        import jinja2
        from torch._inductor.kernel.flex.common import load_flex_template
    except ImportError as error:
        raise ImportError(f"torch's flex_attention template is not here ({error})") from error
    parts = ("flex_attention", "utilities", "common") if kind == "forward" else ("flex_backwards", "utilities")
    source = "".join(load_flex_template(part) for part in parts)
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
    environment.filters["indent_except_first"] = _indent_except_first
    writer = _Writer(head_dim, _options(kind, head_dim, blocks))
    try:
        return environment.from_string(source).render(HAS_FULL_BLOCKS=True, USE_TMA=False, **writer.hooks())
    except jinja2.UndefinedError as error:
        raise ImportError(f"torch's flex_attention template asks for something else than 2.13's: {error}") from error


def _options(kind: str, head_dim: int, blocks: dict[str, int]) -> dict[str, Any]:
    width = 1 << (head_dim - 1).bit_length()
    options: dict[str, Any] = {
        "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False, "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False, "FLOAT32_PRECISION": "'ieee'", "IS_DIVISIBLE": True,
        "SM_SCALE": head_dim**-0.5, "GQA_SHARED_HEADS": _GROUP, "HAS_FULL_BLOCKS": True, "QK_HEAD_DIM": head_dim,
        "QK_HEAD_DIM_ROUNDED": width, "V_HEAD_DIM": head_dim, "V_HEAD_DIM_ROUNDED": width,
        "SAFE_HEAD_DIM": width == head_dim, "SPARSE_Q_BLOCK_SIZE": _BLOCK, "SPARSE_KV_BLOCK_SIZE": _BLOCK,
        "INDEX_DTYPE": "tl.int32",
    }  # fmt: skip
    return options | blocks


class _Writer:
    """What the template calls: argument lists, sizes, strides, the mask and the store, for q, k, v [1, H, T, D].

    The tensors are views of packed [T, H, D], as documents are kept.
    """

    def __init__(self, head_dim: int, options: dict[str, Any]) -> None:
        self.head_dim, self.options = head_dim, options
        self.arguments: list[str] = []

    def hooks(self) -> dict[str, Callable[..., str]]:
        names = ("def_kernel", "size", "stride", "gen_argdefs", "gen_defines", "modification", "store_output")
        return {name: getattr(self, name) for name in names}

    def def_kernel(self, *names: str) -> str:
        self.arguments = [f"arg_{name}" for name in (*names, "DOCUMENT", "STORED")]
        local = "\n    ".join(f"{name} = arg_{name}" for name in names)
        return f"@triton.jit\ndef flex_kernel({', '.join(self.arguments)}):\n    {self.gen_defines()}\n    {local}"

    def gen_argdefs(self) -> str:
        return ", ".join(self.arguments)

    def gen_defines(self) -> str:
        return "\n    ".join(f"{name} : tl.constexpr = {value}" for name, value in self.options.items())

    def _shape(self, name: str) -> tuple[int, ...]:
        blocks = _TOKENS // _BLOCK
        if name.endswith("NUM_BLKS"):
            return (1, 1, blocks)
        if name.endswith("IDX"):
            return (1, 1, blocks, blocks)
        heads = _HEADS // _GROUP if name in ("K", "V", "DV") else _HEADS
        return (1, heads, _TOKENS, self.head_dim)

    def size(self, name: str, dim: int) -> str:
        return str(self._shape(name)[dim])

    def stride(self, name: str, dim: int | None = None) -> str:
        shape = self._shape(name)
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        if shape[-1] == self.head_dim and len(shape) == 4 and not name.endswith("IDX"):
            strides = [math.prod(shape), self.head_dim, shape[1] * self.head_dim, 1]
        return str(strides[dim]) if dim is not None else ", ".join(map(str, strides))

    def modification(self, subgraph_number: int, output_name: str | None, **names: Any) -> str:
        if output_name == "post_mod_scores":
            return f"post_mod_scores = {names['score']}"
        if output_name == "grad_scores":
            return f"grad_scores = {names['grad_score_mod']}"
        if output_name == "mask_mod_output":
            m, n = names["m"], names["n"]
            return f"mask_mod_output = ({m} >= {n}) & (tl.load(arg_DOCUMENT + {m}) == tl.load(arg_DOCUMENT + {n}))"
        return "pass"  # no gradient flows to the document ids

    def store_output(self, indices: tuple[str, ...], value: str, mask: str, **rest: Any) -> str:
        _, head, row, column = indices
        heads = _HEADS if "hq" in head else _HEADS // _GROUP
        at = f"{head} * {self.head_dim} + {row} * {heads * self.head_dim} + {column}"
        return f"tl.store(arg_STORED + {at}, {value}, {mask})"


def _indent_except_first(text: str, levels: int) -> str:
    first, *rest = text.split("\n")
    return "\n".join([first, *("    " * levels + line.strip() for line in rest)])
