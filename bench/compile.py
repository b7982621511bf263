"""Compiling a Triton kernel for a chip that is not here: a kernel with its arguments' types, and the call that does it.

Triton's compiler needs the types of the arguments, which of them are multiples of 16, and the values of the constants;
no device. Kernels that are decorated while the interpreter is on cannot be compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.compiler import ASTSource

from bench.measure import KernelReport, Tile, measure
from bench.targets import TARGETS


@dataclass(frozen=True)
class KernelSpec:
    """One compilation.

    `arguments` gives each parameter of `fn` (a `@triton.jit` function) in any order: a constexpr its value, any other
    its type ("*bf16", "i32", "fp32", "tensordesc<bf16[64, 128]>"), with ":16" behind it where the value or address is a
    multiple of 16. A parameter of another kind whose value is None is compiled away, as at a launch.
    """

    kernel: str  # fwd, dq, dkdv, delta, merge
    fn: Any
    arguments: Mapping[str, Any] = field(repr=False)
    target: str
    dtype: str
    head_dim: int
    warps: int
    stages: int
    tile: Tile | None = None
    copied: int = 0
    peer: str | None = None

    @property
    def tile_name(self) -> str:
        return f"{self.tile.rows}x{self.tile.columns}" if self.tile else ""

    @property
    def name(self) -> str:
        who = f"{self.peer}:" if self.peer else ""
        return f"{who}{self.kernel}-{self.target}-{self.dtype}-{self.head_dim}-{self.tile_name}"


def compile_spec(spec: KernelSpec) -> Any:
    """What `triton.compile` makes of the spec; raises what the compiler raises, with the spec's name as a note.

    Raises:
        ValueError: the interpreter is on, or the arguments are not the kernel's parameters.
    """
    fn = spec.fn
    if not isinstance(fn, triton.runtime.JITFunction):
        raise ValueError(
            f"{spec.name} is a {type(fn).__name__}, not a compilable kernel; run in a process without TRITON_INTERPRET=1"
        )
    if set(spec.arguments) != set(fn.arg_names):
        odd = sorted(set(spec.arguments) ^ set(fn.arg_names))
        raise ValueError(f"{spec.name}: {len(odd)} arguments differ from the kernel's parameters: {', '.join(odd)}")
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(fn.params):
        value = spec.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        else:
            kind, _, multiple = value.partition(":")
            signature[parameter.name] = kind
            if multiple:
                attributes[(position,)] = [["tt.divisibility", int(multiple)]]
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attributes)
    target = TARGETS[spec.target].gpu
    try:
        return triton.compile(source, target=target, options={"num_warps": spec.warps, "num_stages": spec.stages})
    except Exception as error:
        error.add_note(f"while compiling {spec.name}")
        raise


def report(spec: KernelSpec) -> KernelReport:
    """Compile the spec and measure it."""
    return measure(compile_spec(spec), TARGETS[spec.target], spec.dtype, spec.tile, spec.copied)
