"""AMD machine code: a reader of the `amdgcn` assembly that Triton keeps, and what its instructions cost.

The mnemonics are those of the AMD Instinct MI300 instruction set architecture guide.
"""

from __future__ import annotations

import re

from bench.kernels.listing import Function, Instruction, Loop

_LABEL = re.compile(r"^(\.LBB\d+_\d+):")
_ENTRY = re.compile(r"^([A-Za-z_]\w*):")
_LINE = re.compile(r"^\s+([vs]_\w+|ds_\w+|(?:global|buffer|flat|scratch)_\w+)\b\s*([^;]*)(.*)$")
_TENSOR = re.compile(r"v_s?mfma\w*_(\d+)x(\d+)x(\d+)")
_EXP = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")
_FP = re.compile(r"v_(pk_)?\w*_(f16|f32|f64|bf16)(_e\d+|_dpp|_sdwa)?$")
_WAVE = 64


def parse(listing: str) -> dict[str, Function]:
    """The functions of an `amdgcn` text by name; a text without entry labels is one function called ""."""
    functions: dict[str, Function] = {}
    here = Function("")
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            here.labels[label[1]] = len(here.instructions)
        elif entry := _ENTRY.match(line):
            here = functions[entry[1]] = Function(entry[1])
        elif found := _LINE.match(line):
            here.instructions.append(_instruction(found[1], found[2].strip(), found[3]))
    return functions or {"": here}


def _instruction(opcode: str, operands: str, comment: str) -> Instruction:
    jumps = operands.split()[0] if opcode.startswith(("s_branch", "s_cbranch")) else None
    falls = not opcode.startswith(("s_branch", "s_endpgm", "s_setpc"))
    return Instruction(opcode, operands, _unit(opcode, comment), "", jumps, falls)


def _unit(opcode: str, comment: str) -> str:
    if opcode.startswith("scratch_") or "Folded Spill" in comment or "Folded Reload" in comment:
        return "spill"
    if _TENSOR.match(opcode):
        return "tensor"
    if _EXP.match(opcode):
        return "exp"
    if opcode.startswith("ds_"):
        return "shared"
    if opcode.startswith(("global_", "buffer_", "flat_", "s_load", "s_buffer", "s_store")):
        return "global"
    if opcode.startswith(("s_waitcnt", "s_barrier", "s_nop", "s_sleep", "s_setprio", "s_sched")):
        return "sync"
    if opcode.startswith(("s_branch", "s_cbranch", "s_endpgm", "s_setpc")):
        return "branch"
    return "fp" if _FP.match(opcode) and "cmp" not in opcode else "integer"


def resource_usage(listing: str, name: str) -> tuple[int, int, int]:
    """Registers per thread (vector and accumulation), stack bytes and static shared bytes of kernel `name`."""
    found = []
    for key in ("vgpr_count", "private_segment_fixed_size", "group_segment_fixed_size"):
        value = re.search(rf"\.{key}:\s+(\d+)", listing)
        if not value:
            raise ValueError(f"the metadata of kernel {name} has no .{key}; {len(listing)} characters were read")
        found.append(int(value[1]))
    return found[0], found[1], found[2]


def _product_flops(opcode: str) -> int:
    """FLOP of one wave's matrix instruction; a leading block count (4x4x4 of 16 blocks) does not occur in Triton."""
    shape = _TENSOR.match(opcode)
    return 2 * int(shape[1]) * int(shape[2]) * int(shape[3]) if shape else 0


def flops(function: Function, loop: Loop, warps: int) -> int | None:
    """FLOP of one pass of a block of `warps` waves through the loop's matrix instructions."""
    return warps * sum(_product_flops(function.instructions[i].opcode) for i in loop.members)


def shared_bytes(function: Function, loop: Loop, warps: int) -> tuple[int, int]:
    """Bytes that one pass moves through the local data share, without bank conflicts; matrix operands read none."""
    total = 0
    for i in loop.members:
        x = function.instructions[i]
        if x.unit == "shared":
            width = re.search(r"_[bu](8|16|32|64|96|128)", x.opcode)
            pair = 2 if "read2" in x.opcode or "write2" in x.opcode else 1
            total += _WAVE * warps * pair * (int(width[1]) // 8 if width else 4)
    return total, 0


def issued(function: Function, loop: Loop) -> int:
    """Vector instructions of the loop, matrix ones included: the SIMD's one vector port issues them.

    Scalar, memory and branch instructions issue beside them from other waves.
    """
    return sum(function.instructions[i].opcode.startswith("v_") for i in loop.members)


def overlapped(function: Function, loop: Loop) -> list[bool]:
    """For each of the loop's instructions in program order: does it stand between a matrix instruction and its wait?

    A product is in flight until the first other instruction that reads its result, and for as many issue slots of four
    cycles as it occupies the matrix unit (512 FLOP per cycle and SIMD). The loop is walked twice.
    """
    results: dict[str, int] = {}  # register -> slot at which its product is done
    found: list[bool] = []
    slot = 0
    for walk in range(2):
        for i in loop.members:
            x = function.instructions[i]
            slot += 1
            registers = _registers(x.operands)
            if x.unit == "tensor":
                done = slot + _product_flops(x.opcode) // (512 * 4)
                results.update(dict.fromkeys(_registers(x.operands.split(",")[0]), done))
            elif any(r in results for r in registers):
                latest = max(results.get(r, 0) for r in registers)
                results = {r: done for r, done in results.items() if done > latest}
            results = {r: done for r, done in results.items() if done > slot}
            if walk == 1:
                found.append(bool(results))
    return found


def _registers(operands: str) -> list[str]:
    names = []
    for kind, one, first, last in re.findall(r"\b([va])(?:(\d+)|\[(\d+):(\d+)\])", operands):
        span = range(int(one), int(one) + 1) if one else range(int(first), int(last) + 1)
        names += [f"{kind}{n}" for n in span]
    return names


def selects(function: Function, loop: Loop) -> int:
    """None that tell of a mask: exponentials use them too."""
    return 0


def comparisons(function: Function, loop: Loop) -> int:
    """The loop's integer comparisons: bounds, guarded copies and masks."""
    opcodes = [function.instructions[i].opcode for i in loop.members]
    return sum(re.match(r"v_cmpx?_\w+_[iu](16|32|64)", op) is not None for op in opcodes)
