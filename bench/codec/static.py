"""The codec's kernels as compiled: instructions and bytes a value, beside a plain copy compiled in the same run.

Instructions are those of one thread over the values that it has. Loops over wires are counted once, so the sums are of
two wires. `read` and `written` are bytes a value of the widest accesses, which move the data; narrower ones move scales
and the header, by a few threads (on CDNA the header is one wide access more). `access` is the bytes of the widest and
how many there are of it in a thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import triton.language as tl

from bench.kernels import gcn, sass
from bench.kernels.cases import codec_cases
from bench.kernels.compile import Case, compile_case
from bench.kernels.listing import Function, Instruction
from bench.kernels.targets import TARGETS, lanes
from bench.table import Row
from kernels.codec.triton_codec import VALUES, WARPS
from kernels.compile.runtime import jit
from kernels.compile.specs import KernelSpec
from parallel.plan.codec import CodecSpec


@jit
def copy(X, OUT, n, BLOCK: tl.constexpr):
    """OUT = X."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.load(X + at, mask=at < n, other=0.0), mask=at < n)


def copy_case(target: str, dtype: str) -> Case:
    """The peer: what any kernel that reads and writes each value must issue."""
    types = {"X": f"*{dtype}", "OUT": f"*{dtype}", "n": "i32", "BLOCK": "constexpr"}
    attrs = {(i,): [["tt.divisibility", 16]] for i in range(3)}
    return Case("copy", target, dtype, 0, KernelSpec(copy, types, {"BLOCK": VALUES}, attrs, {"num_warps": WARPS}))


def static_rows(codecs: Sequence[CodecSpec], dtype: str, targets: Sequence[str]) -> Iterator[Row]:
    """A row for each kernel of each codec and target, and one for the copy."""
    for target in targets:
        for case in (copy_case(target, dtype), *codec_cases(codecs, (dtype,), (target,))):
            yield _row(case)


def _row(case: Case) -> Row:
    compiled = compile_case(case)
    name, target = compiled.metadata.name, TARGETS[case.target]
    if target.gpu.backend == "hip":
        text = compiled.asm["amdgcn"]
        function = gcn.parse(text)[name]
        registers, stack, _ = gcn.resource_usage(text, name)
    else:
        function = sass.parse(sass.disassemble(compiled.asm["cubin"]))[name]
        registers, stack, _ = sass.resource_usage(compiled.asm["cubin"], name)
    threads = WARPS * lanes(target)
    read, written = (accesses(function, store) for store in (False, True))
    count = sum(x.opcode not in ("NOP", "s_nop", "s_endpgm", "s_code_end") for x in function.instructions)
    return {
        "kernel": case.kernel,
        "target": case.target,
        "format": case.option or "-",
        "group": case.head_dim,
        "per_value": round(count * threads / VALUES, 1),
        "shuffles": round(sum(_shuffles(x) for x in function.instructions) * threads / VALUES, 1),
        "read": round(read[0] * read[1] * threads / VALUES, 2),
        "written": round(written[0] * written[1] * threads / VALUES, 2),
        "access": f"{read[0]}x{read[1]} {written[0]}x{written[1]}",
        "registers": registers,
        "spills": sum(x.unit == "spill" for x in function.instructions),
        "stack": stack,
        "shared": compiled.metadata.shared,
    }


def accesses(function: Function, store: bool) -> tuple[int, int]:
    """Bytes of the widest global load or store of a thread, and how many of them it has."""
    names = (r"STG|global_store|buffer_store", r"LDG(?!STS)|global_load|buffer_load")[not store]
    sizes = [_bytes(x.opcode) for x in function.instructions if re.match(names, x.opcode)]
    return max(sizes), sizes.count(max(sizes))


def _bytes(opcode: str) -> int:
    """16 of LDG.E.128 and global_load_dwordx4."""
    wide = re.search(r"dwordx([234])|\.(64|128)\b", opcode)
    if wide:
        return 4 * int(wide[1]) if wide[1] else int(wide[2]) // 8
    narrow = re.search(r"[._][USus]?(?:byte|short|8|16)", opcode)
    if narrow:
        return 1 if re.search(r"byte|8", narrow[0]) else 2
    return 4


def _shuffles(instruction: Instruction) -> bool:
    return bool(re.match(r"SHFL|ds_bpermute|ds_swizzle|v_permlane", instruction.opcode)) or "_dpp" in instruction.opcode
