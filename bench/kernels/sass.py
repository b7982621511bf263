"""NVIDIA machine code: a reader of `nvdisasm -c`, and what its instructions cost.

The mnemonics are NVIDIA's (CUDA Binary Utilities, instruction set reference); shapes and widths are read from their
suffixes, and the shape of a fifth-generation matrix instruction from its descriptor (PTX ISA, tcgen05 instruction
descriptor), which is an immediate a few lines above.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import triton

from bench.kernels.listing import Function, Instruction, Loop

_LINE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_]*(?:\.[\w.]+)?)\s*(.*?)\s*;")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_SECTION = re.compile(r"\s*\.section\s+\.text\.(\S+?),")
_TARGET = re.compile(r"`\((\S+?)\)")

_UNITS = {
    "tensor": re.compile("(H|HG|I|IG|Q|QG|D|B|BG|O|UTCH|UTCQ|UTCI|UTCO)MMA"),
    "exp": re.compile("MUFU"),  # all special functions share the unit
    "spill": re.compile("LDL|STL"),
    "fp": re.compile(
        "FFMA2?|FMUL2?|FADD2?|FMNMX3?|FSEL|FSETP?|FCHK|FSWZADD|F2FP|H(ADD|MUL|FMA|MNMX|SET|SETP)2|F2[FI]|I2FP?|FRND|"
        "D(ADD|MUL|FMA|SETP)"
    ),
    "shared": re.compile("LDSM?|STSM?|ATOMS|SHFL|LDTM|STTM|UTCCP"),
    "global": re.compile(
        "LD|ST|LDG|STG|LDGSTS|LDGMC|RED|ATOMG?|UTMALDG|UTMASTG|UTMAREDG|UTMAPF|UBLKCP|UBLKRED|LDCU?|ULDC|CCTLL?|PREFETCH"
    ),
    "sync": re.compile(
        "BAR|B2R|WARPGROUP|DEPBAR|LDGDEPBAR|SYNCS|MEMBAR|FENCE|WARPSYNC|ERRBAR|UTCBAR|UTMACMDFLUSH|UTMACCTL|NANOSLEEP|"
        "ELECT|VOTEU?|YIELD|ARRIVES|UCGABAR_(ARV|WAIT)|ACQBULK|USETMAXREG|UTCATOMSWS"
    ),
    "branch": re.compile("BR[AX]|JM[PX]|CALL|RET|EXIT|BSSY|BSYNC|BREAK|BPT|KILL"),
}

# issue slots after which an HMMA has left its pipeline: its latency is about 33 cycles (sm_80, m16n8k16)
_HMMA_LATENCY = 32


def disassemble(cubin: bytes) -> str:
    """The listing of `cubin` by the `nvdisasm` that Triton's wheel carries."""
    return _tool("nvdisasm", "-c", cubin)


def resource_usage(cubin: bytes, name: str) -> tuple[int, int, int]:
    """Registers per thread, stack bytes per thread and static shared bytes of function `name`."""
    text = _tool("cuobjdump", "-res-usage", cubin)
    found = re.search(rf"Function {re.escape(name)}:\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    if not found:
        raise ValueError(f"cuobjdump says nothing of function {name}; it printed {len(text)} characters: {text[:200]}")
    return int(found[1]), int(found[2]), int(found[3])


def _tool(name: str, option: str, cubin: bytes) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, option, file.name], capture_output=True, text=True, check=True).stdout


def parse(listing: str) -> dict[str, Function]:
    """The functions of an `nvdisasm -c` listing by name; a listing without sections is one function called ""."""
    functions: dict[str, Function] = {}
    here = Function("")
    for line in listing.splitlines():
        if section := _SECTION.match(line):
            here = functions[section[1]] = Function(section[1])
        elif label := _LABEL.match(line):
            here.labels[label[1]] = len(here.instructions)
        elif found := _LINE.match(line):
            here.instructions.append(_instruction(found[1] or "", found[2], found[3]))
    return functions or {"": here}


def _instruction(guard: str, opcode: str, operands: str) -> Instruction:
    base = opcode.split(".")[0]
    jumps, falls = None, True
    if base in ("BRA", "JMP", "BRX", "JMX"):
        target = _TARGET.search(operands)
        jumps = target[1] if target else None
        # a uniform branch carries its predicate as an operand: BRA.U UP0, `(.L_x_3)
        falls = bool(guard) or bool(re.match(r"!?U?P\d|!?UR\d", operands)) or ".DIV" in opcode
    elif base in ("EXIT", "RET"):
        falls = bool(guard)
    return Instruction(opcode, operands, _unit(base), guard, jumps, falls)


def _unit(base: str) -> str:
    for unit, names in _UNITS.items():
        if names.fullmatch(base):
            return unit
    return "integer"  # address arithmetic, predicates, moves, uniform registers


@dataclass(frozen=True)
class _Shape:
    """One matrix instruction's M x N x K. `warps` issue it together; the bytes of its operands in shared memory."""

    m: int
    n: int
    k: int
    warps: int | None  # None: one thread of the block issues it for all
    shared: int


def _shape(function: Function, at: int) -> _Shape | None:
    x = function.instructions[at]
    base = x.opcode.split(".")[0]
    if base.startswith("UTC"):
        return _descriptor_shape(function, at)
    if found := re.search(r"\.(\d+)x(\d+)x(\d+)", x.opcode):
        m, n, k = (int(s) for s in found.groups())
        # k elements of an operand row fill 32 bytes in every type; the second operand always comes from shared memory
        from_shared = re.match(r"R\d+\S*, gdesc", x.operands) is not None
        return _Shape(m, n, k, 4, 32 * (n + (m if from_shared else 0)))
    if found := re.search(r"\.(16|8)8(4|8|16|32|64)\b", x.opcode):
        return _Shape(int(found[1]), 8, int(found[2]), 1, 0)
    return None


def _descriptor_shape(function: Function, at: int) -> _Shape | None:
    """M, N and K from the immediate last moved into the `idesc` register of a UTC?MMA."""
    x = function.instructions[at]
    register = re.search(r"idesc\[(UR\d+)\]", x.operands)
    if not register:
        return None
    for y in reversed(function.instructions[:at]):
        if re.match(rf"{register[1]},", y.operands):
            value = re.search(r", (0x[0-9a-f]+)$", y.operands)
            if not y.opcode.startswith("UMOV") or not value:
                return None
            bits = int(value[1], 16)
            m, n, narrow = (bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8, bits >> 7 & 7
            k = 32 if x.opcode.startswith("UTCQ") else 8 if narrow == 2 else 16
            return _Shape(m, n, k, None, 32 * (n + (m if x.operands.startswith("gdesc") else 0)))
    return None


def flops(function: Function, loop: Loop, warps: int) -> int | None:
    """FLOP of one pass of a block of `warps` warps through the loop's matrix instructions; None if one is unreadable.

    Where there are none (fp32 with `ieee`), the FLOP of all FFMA: the products and a few of the softmax.
    """
    total = 0
    for i in loop.members:
        x = function.instructions[i]
        if x.unit == "tensor":
            shape = _shape(function, i)
            if shape is None:
                return None
            total += 2 * shape.m * shape.n * shape.k * (warps // shape.warps if shape.warps else 1)
    if total == 0:
        total = sum(2 * 32 * warps * (1 + function.instructions[i].opcode.startswith("FFMA2")) for i in loop.members
                    if function.instructions[i].opcode.startswith("FFMA"))  # fmt: skip
    return total


def shared_bytes(function: Function, loop: Loop, warps: int) -> tuple[int, int]:
    """Bytes that one pass moves through shared memory, without bank conflicts and without bulk tensor copies.

    Returns:
        (moved by the warps' own loads, stores, shuffles and asynchronous copies; read as operands by matrix
        instructions). Tensor rates are rated with operands in shared memory, so the second is part of their cost.
    """
    moved = operands = 0
    for i in loop.members:
        x = function.instructions[i]
        base = x.opcode.split(".")[0]
        if x.unit == "tensor":
            shape = _shape(function, i)
            if shape:
                operands += shape.shared * (warps // shape.warps if shape.warps else 1)
        elif base in ("LDSM", "STSM"):
            matrices = re.search(r"\.([24])$", x.opcode)
            moved += 128 * (int(matrices[1]) if matrices else 1) * warps
        elif base in ("LDS", "STS", "LDGSTS", "ATOMS", "SHFL"):
            moved += 32 * _width(x.opcode) * warps
    return moved, operands


def _width(opcode: str) -> int:
    """Bytes per thread of a load or store."""
    for suffix, size in ((".128", 16), (".64", 8), (".U16", 2), (".S16", 2), (".U8", 1), (".S8", 1)):
        if opcode.endswith(suffix) or f"{suffix}." in opcode:
            return size
    return 4


def overlapped(function: Function, loop: Loop) -> list[bool]:
    """For each of the loop's instructions in program order: does it stand between a matrix instruction and its wait?

    The loop is walked twice, so that what is in flight over the back edge counts. A product is in flight

    - HGMMA: from its issue until a WARPGROUP.DEPBAR that leaves fewer groups than were committed since (`gsb0`);
    - UTCHMMA: from its issue until a SYNCS try-wait on the barrier that its UTCBAR names; where that barrier's address
      sits in another register by then, the oldest one ends at the next load from tensor memory (LDTM);
    - HMMA: from its issue until the first other instruction that reads its result, and for 32 issue slots at the most:
      the wait is that reader's scoreboard, and the pipeline is no longer than that.
    """
    opcodes = [function.instructions[i].opcode for i in loop.members]
    flight: _Flight = _Groups()
    if any(op.startswith("UTC") for op in opcodes):
        flight = _Barriers()
    elif any(op.startswith("HMMA") for op in opcodes):
        flight = _Registers()
    walks = [[flight.step(function.instructions[i]) for i in loop.members] for _ in range(2)]
    return walks[1]


class _Flight(ABC):
    """What is in flight as the instructions pass."""

    @abstractmethod
    def step(self, x: Instruction) -> bool:
        """Pass one instruction; whether something was in flight when it issued."""


class _Groups(_Flight):
    def __init__(self) -> None:
        self.open, self.committed = False, 0

    def step(self, x: Instruction) -> bool:
        if x.opcode.startswith("WARPGROUP.DEPBAR"):
            left = re.search(r"gsb0, (0x[0-9a-f]+)", x.operands)
            self.committed = min(self.committed, int(left[1], 16) if left else 0)
        elif x.unit == "tensor":
            commits = "gsb0" in x.operands
            self.open, self.committed = not commits, self.committed + commits
        return self.open or self.committed > 0


class _Barriers(_Flight):
    def __init__(self) -> None:
        self.open = self.matched = False
        self.waited: list[str] = []

    def step(self, x: Instruction) -> bool:
        address = re.search(r"\[(\S+?)\]", x.operands)
        if x.unit == "tensor":
            self.open, self.matched = True, False
        elif x.opcode.startswith("UTCBAR") and address:
            self.open = False
            self.waited.append(address[1])
        elif "TRYWAIT" in x.opcode and address and address[1] in self.waited:
            self.matched = True
            self.waited = self.waited[self.waited.index(address[1]) + 1 :]  # products complete in order
        elif x.opcode.startswith("LDTM") and not self.matched:
            self.matched = True
            self.waited = self.waited[1:]
        return self.open or bool(self.waited)


class _Registers(_Flight):
    def __init__(self) -> None:
        self.results: dict[int, int] = {}  # register -> issue slot of the HMMA that writes it
        self.slot = 0

    def step(self, x: Instruction) -> bool:
        self.slot += 1
        registers = [int(r) for r in re.findall(r"\bR(\d+)", x.operands)]
        if x.unit == "tensor":
            self.results.update({registers[0] + n: self.slot for n in range(4)})
        else:
            issued = [self.results[r] for r in registers if r in self.results]
            if issued:  # HMMAs retire in order, so whatever was issued before the awaited one is done
                self.results = {r: slot for r, slot in self.results.items() if slot > max(issued)}
        self.results = {r: slot for r, slot in self.results.items() if self.slot - slot < _HMMA_LATENCY}
        return bool(self.results)


def selects(function: Function, loop: Loop) -> int:
    """The loop's selects between numbers: a mask needs one for each score, anything else a few for each row."""
    return sum(function.instructions[i].opcode.startswith("FSEL") for i in loop.members)


def comparisons(function: Function, loop: Loop) -> int:
    """The loop's integer comparisons and all selects: bounds, guarded copies and masks."""
    return sum(re.match(r"ISETP|F?SEL\b", function.instructions[i].opcode) is not None for i in loop.members)


def issued(function: Function, loop: Loop) -> int:
    """Instructions of the loop: each takes one slot of a warp's scheduler."""
    return len(loop.members)
