"""What the compiler made of one kernel: its resources, and its inner loops in cycles of each unit of the chip.

A loop's ratios are cycles of a unit over cycles of the tensor cores, for one pass of one block:

    tensor   useful FLOP of the tile / the chip's dense rate for the dtype
    issue    instructions per warp x warps / 4 schedulers
    exp      special functions / 16
    shared   bytes that warps and copies move through shared memory / 128
    operand  the same with what the matrix instructions read there themselves, which the tensor rate already includes
    bound    the largest of issue, exp and shared: at 1 or more the tensor cores wait
    overlap  the share of the loop's exp and fp instructions in program order between a matrix instruction and its wait

Latency, bank conflicts and caches are not counted: these are bounds, and a real chip is slower.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from bench.kernels import gcn, sass
from bench.kernels.listing import CLASSES, Function, Loop, innermost_loops
from bench.kernels.targets import Target, lanes, occupancy


@dataclass(frozen=True)
class LoopPass:
    """One pass of a kernel's inner loop: `products` matrix products of rows x columns x depth."""

    rows: int
    columns: int
    depth: int
    products: int

    @property
    def flops(self) -> int:
        return 2 * self.products * self.rows * self.columns * self.depth


@dataclass(frozen=True)
class LoopReport:
    """An innermost loop with matrix instructions. `tiles`: how many one pass computes (an unrolled loop: more)."""

    kind: str  # "full" or "masked"
    counts: dict[str, int]  # instructions per warp by class
    predicated: int
    products: int  # matrix instructions
    flops: int | None  # of one pass by the instructions' own shapes
    tiles: int
    spills: int
    copies: int  # asynchronous copies into shared memory: none on NVIDIA means no software pipelining
    tensor_cycles: float  # of one tile; so are the cycles below
    issue_cycles: float
    exp_cycles: float
    shared_cycles: float
    operand_cycles: float
    overlap: float

    @property
    def issue_ratio(self) -> float:
        return self.issue_cycles / self.tensor_cycles

    @property
    def bound(self) -> float:
        return max(self.issue_cycles, self.exp_cycles, self.shared_cycles) / self.tensor_cycles

    @property
    def bound_cycles(self) -> float:
        """Cycles of one tile on the unit that takes longest, the tensor cores included."""
        return self.tensor_cycles * max(1.0, self.bound)


@dataclass(frozen=True)
class KernelReport:
    registers: int
    stack: int
    shared: int
    tensor_memory: int  # columns, on Blackwell
    blocks: int  # that one core holds
    occupancy: float  # share of its warp slots
    instructions: int
    spills: int  # anywhere in the kernel
    loops: tuple[LoopReport, ...]

    def loop(self, kind: str) -> LoopReport | None:
        """The costliest loop of this kind by issue, or None."""
        return max((x for x in self.loops if x.kind == kind), key=lambda x: x.issue_cycles, default=None)


def measure(
    compiled: Any, target: Target, dtype: str, tile: LoopPass | None = None, copied: int = 0, others: bool = False
) -> KernelReport:
    """Read what Triton compiled.

    Args:
        compiled: what `triton.compile` returns.
        target: the chip that it was compiled for.
        dtype: a key of `target.tensor`.
        tile: one pass of the inner loop; None where the kernel has no loop worth counting. Its FLOP are the useful
            ones: the instructions may do more, where a layout repeats work.
        copied: bytes that bulk tensor copies, whose size no instruction shows, bring into shared memory for one tile.
        others: the kernel also has loops of other tiles: leave out those whose FLOP are not this tile's.
    """
    machine: ModuleType = gcn if target.gpu.backend == "hip" else sass
    name = compiled.metadata.name
    if machine is gcn:
        text = compiled.asm["amdgcn"]
        registers, stack, static = gcn.resource_usage(text, name)
    else:
        text = sass.disassemble(compiled.asm["cubin"])
        registers, stack, static = sass.resource_usage(compiled.asm["cubin"], name)
    function = machine.parse(text)[name]
    warps = compiled.metadata.num_warps
    columns = getattr(compiled.metadata, "tmem_size", None) or 0
    blocks, share = occupancy(target, registers, static + compiled.metadata.shared, warps, columns)
    loops: list[Loop] = []
    if tile:
        loops = innermost_loops(function) or [x for x in innermost_loops(function, "fp") if _is_product(function, x)]
    if tile and others:
        loops = [x for x in loops if machine.flops(function, x, warps) == tile.flops]
    return KernelReport(
        registers=registers,
        stack=stack,
        shared=static + compiled.metadata.shared,
        tensor_memory=columns,
        blocks=blocks,
        occupancy=share,
        instructions=len(function.instructions),
        spills=sum(x.unit == "spill" for x in function.instructions),
        loops=tuple(
            _loop(machine, function, x, kind, target, dtype, tile, warps, copied)
            for x, kind in zip(
                loops, _kinds(machine, function, loops, tile.rows * tile.columns / warps / lanes(target))
            )
        )
        if tile
        else (),
    )


def _kinds(machine: ModuleType, function: Function, loops: list[Loop], scores: float) -> list[str]:
    """Which loops mask `scores` scores per thread, and which are full.

    A masked loop selects each score. Where the compiler makes predicates of the selects, it still compares for each: so
    it compares that much more than the loop of the kernel that compares least.
    """
    compared = [machine.comparisons(function, loop) for loop in loops]
    masked = [
        machine.selects(function, loop) >= scores or n - min(compared) >= scores / 2 for loop, n in zip(loops, compared)
    ]
    return ["masked" if m else "full" for m in masked]


def _is_product(function: Function, loop: Loop) -> bool:
    """Is most of this loop multiply-adds? So it is where fp32 products run on the fp units; FFMA2 does two in one."""
    opcodes = [function.instructions[i].opcode for i in loop.members]
    fused = sum(op.startswith("FFMA") + op.startswith("FFMA2") for op in opcodes)
    return 2 * fused >= len(loop.members)


def _loop(
    machine: ModuleType,
    function: Function,
    loop: Loop,
    kind: str,
    target: Target,
    dtype: str,
    tile: LoopPass,
    warps: int,
    copied: int,
) -> LoopReport:
    code = [function.instructions[i] for i in loop.members]
    counts = Counter(x.unit for x in code)
    threads = warps * lanes(target)
    scores = tile.rows * tile.columns / threads  # per thread and tile
    flops = machine.flops(function, loop, warps)
    # an unrolled pass computes several tiles; padded widths add to the FLOP alone, repeated work to exponentials too
    tiles = int((flops or 0) / tile.flops)
    if counts["exp"]:
        tiles = min(tiles, round(counts["exp"] / scores))
    tiles = max(1, tiles)
    flying = machine.overlapped(function, loop)
    work = [inside for inside, x in zip(flying, code) if x.unit in ("exp", "fp")]
    moved, operands = machine.shared_bytes(function, loop, warps)
    if any(x.opcode.startswith("UTMALDG") for x in code):
        moved += copied * tiles
    return LoopReport(
        kind=kind,
        counts={unit: counts[unit] for unit in CLASSES},
        predicated=sum(bool(x.guard) for x in code),
        products=counts["tensor"],
        flops=flops,
        tiles=tiles,
        spills=counts["spill"],
        copies=sum(x.opcode.startswith(("LDGSTS", "UTMALDG")) for x in code),
        tensor_cycles=tile.flops / target.tensor[dtype],
        issue_cycles=machine.issued(function, loop) * threads / target.issue / tiles,
        exp_cycles=counts["exp"] * threads / target.exp / tiles,
        shared_cycles=moved / target.shared / tiles,
        operand_cycles=(moved + operands) / target.shared / tiles,
        overlap=sum(work) / len(work) if work else 0.0,
    )
