"""Compiling a Triton kernel for a chip that is not here, and measuring what comes out.

Triton's compiler needs the types of the arguments, which of them are multiples of 16, and the values of the constants;
no device. Kernels that are decorated while the interpreter is on cannot be compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.compiler import ASTSource

from bench.kernels.measure import KernelReport, LoopPass, measure
from bench.kernels.targets import TARGETS
from kernels.compile.specs import KernelSpec


@dataclass(frozen=True)
class Case:
    """One compilation: a kernel as it is launched for a head dim, a dtype and a target.

    `tile` is one pass of its inner loop (None: no such loop), `copied` the bytes that tensor descriptors load in it.
    `shared_kernel`: the kernel has loops of other tiles as well, which are left out. `option`: what is switched on.
    """

    kernel: str  # fwd, dq, dkdv, delta, merge, merge_backward, or a codec's, whose group is `head_dim`
    target: str
    dtype: str
    head_dim: int
    spec: KernelSpec = field(repr=False)
    tile: LoopPass | None = None
    copied: int = 0
    peer: str | None = None
    shared_kernel: bool = False
    option: str = ""

    @property
    def warps(self) -> int:
        return self.spec.options.get("num_warps", 4)

    @property
    def stages(self) -> int:
        return self.spec.options.get("num_stages", 3)

    @property
    def tile_name(self) -> str:
        return f"{self.tile.rows}x{self.tile.columns}" if self.tile else ""

    @property
    def name(self) -> str:
        who = f"{self.peer}: " if self.peer else ""
        return (
            f"{who}{self.kernel} {self.target} {self.dtype} D={self.head_dim} {self.tile_name} {self.option}".rstrip()
        )


def describe(fn: Any, arguments: Mapping[str, Any], warps: int, stages: int) -> KernelSpec:
    """The spec of a kernel from its arguments by name.

    A constexpr has its value; any other its type ("*bf16", "i32", "fp32"), with ":16" behind it where the value or
    address is a multiple of 16. One whose value is None is compiled away, as at a launch.

    Raises:
        ValueError: the arguments are not the kernel's parameters.
    """
    if set(arguments) != set(fn.arg_names):
        odd = sorted(set(arguments) ^ set(fn.arg_names))
        raise ValueError(f"{fn.__name__}: {len(odd)} names are not both arguments and parameters: {', '.join(odd)}")
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(fn.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        else:
            signature[parameter.name], _, multiple = value.partition(":")
            if multiple:
                attributes[(position,)] = [["tt.divisibility", int(multiple)]]
    return KernelSpec(fn, signature, constants, attributes, {"num_warps": warps, "num_stages": stages})


def compile_case(case: Case) -> Any:
    """What `triton.compile` makes of the case; raises what the compiler raises, with the case's name as a note.

    Raises:
        ValueError: the interpreter is on.
    """
    spec = case.spec
    if not isinstance(spec.fn, triton.runtime.JITFunction):
        kind = type(spec.fn).__name__
        raise ValueError(f"{case.name} is a {kind} and cannot be compiled; use a process without TRITON_INTERPRET=1")
    source = ASTSource(fn=spec.fn, signature=spec.signature, constexprs=spec.constexprs, attrs=spec.attrs)
    try:
        return triton.compile(source, target=TARGETS[case.target].gpu, options=spec.options)
    except Exception as error:
        error.add_note(f"while compiling {case.name}")
        raise


def report(case: Case) -> KernelReport:
    """Compile the case and measure it."""
    target = TARGETS[case.target]
    return measure(compile_case(case), target, case.dtype, case.tile, case.copied, case.shared_kernel)
