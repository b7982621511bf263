"""What a kernel is compiled for, and what one core (an SM, or a CU) of that chip does in a cycle.

The rates are per core and cycle, so a ratio of two of them needs no clock. Sources: the vendors' architecture papers
and instruction throughput tables; where a chip is rated in TFLOP/s only, the line shows the division.
"""

from dataclasses import dataclass

from triton.backends.compiler import GPUTarget

_NVIDIA_WARPS, _AMD_WARPS = 64, 32


@dataclass(frozen=True)
class Target:
    """A chip, as the static report counts on it.

    `tensor`: dense FLOP per core and cycle by dtype ("fp32" is the matrix product with `input_precision="ieee"`).
    `exp`: special functions (exponentials) per core and cycle. `shared`: bytes of shared memory per core and cycle.
    `global_bytes`: bytes of HBM per core and cycle. `issue`: lanes' worth of one instruction that all schedulers issue
    in a cycle: 4 x 32 on NVIDIA; 4 x 16 on CDNA, whose SIMDs take four cycles for one instruction of a 64-lane wave.
    `registers`, `shared_bytes`, `warps`, `blocks`: what one core holds; `granule`: registers are given in multiples.
    `tensor_memory`: columns of it, which blocks take in powers of two (0: there is none).
    `shared_reserved`: what each block takes on top of what is reported for it (from sm_90 on the report includes it).
    """

    name: str
    gpu: GPUTarget
    tensor: dict[str, int]
    exp: int
    shared: int
    global_bytes: float
    issue: int
    registers: int
    granule: int
    shared_bytes: int
    shared_reserved: int
    warps: int
    blocks: int
    tensor_memory: int = 0


TARGETS: dict[str, Target] = {
    # A100: 312 TFLOP/s / (108 SMs x 1.41 GHz) = 2,048; 64 fp32 lanes; 2,039 GB/s / (108 x 1.41 GHz) = 13.4 B
    "sm_80": Target(
        name="sm_80", gpu=GPUTarget("cuda", 80, 32), tensor={"bf16": 2048, "fp16": 2048, "fp32": 128},
        exp=16, shared=128, global_bytes=13.4, issue=128, registers=65536, granule=8,
        shared_bytes=164 * 1024, shared_reserved=1024, warps=_NVIDIA_WARPS, blocks=32,
    ),
    # H100 SXM: 989 TFLOP/s / (132 x 1.83 GHz) = 4,096; 128 fp32 lanes; 3,350 GB/s / (132 x 1.83 GHz) = 13.9 B
    "sm_90": Target(
        name="sm_90", gpu=GPUTarget("cuda", 90, 32), tensor={"bf16": 4096, "fp16": 4096, "fp32": 256},
        exp=16, shared=128, global_bytes=13.9, issue=128, registers=65536, granule=8,
        shared_bytes=228 * 1024, shared_reserved=0, warps=_NVIDIA_WARPS, blocks=32,
    ),
    # B200: 2,250 TFLOP/s / (148 x 1.85 GHz) = 8,218, so 8,192; the other units as on Hopper; 8,000 GB/s: 29.2 B
    "sm_100": Target(
        name="sm_100", gpu=GPUTarget("cuda", 100, 32), tensor={"bf16": 8192, "fp16": 8192, "fp32": 256},
        exp=16, shared=128, global_bytes=29.2, issue=128, registers=65536, granule=8,
        shared_bytes=228 * 1024, shared_reserved=0, warps=_NVIDIA_WARPS, blocks=32,
        tensor_memory=512,
    ),
    # MI300X: 1,307 TFLOP/s / (304 CUs x 2.1 GHz) = 2,048; fp32 matrix 163.4 TFLOP/s: 256; exp at a quarter of the
    # 64 lanes; 5,300 GB/s / (304 x 2.1 GHz) = 8.3 B; 512 registers a lane on each of 4 SIMDs of 64-lane waves
    "gfx942": Target(
        name="gfx942", gpu=GPUTarget("hip", "gfx942", 64), tensor={"bf16": 2048, "fp16": 2048, "fp32": 256},
        exp=16, shared=128, global_bytes=8.3, issue=64, registers=4 * 512 * 64, granule=8,
        shared_bytes=64 * 1024, shared_reserved=0, warps=_AMD_WARPS, blocks=16,
    ),
}  # fmt: skip


def lanes(target: Target) -> int:
    """Threads of a warp (a wave): 32 on NVIDIA, 64 on CDNA."""
    return target.gpu.warp_size


def occupancy(target: Target, registers: int, shared: int, warps: int, tensor_memory: int = 0) -> tuple[int, float]:
    """Blocks of `warps` warps that one core holds, and the share of its warp slots that they fill.

    Args:
        registers: per thread (on CDNA vector and accumulation registers together).
        shared: bytes of shared memory per block, static (as the tools report them) and dynamic.
        warps: per block.
        tensor_memory: columns per block. Beyond the core's the compiler makes a kernel that only traps.
    """
    rounded = -(-max(registers, 1) // target.granule) * target.granule
    per_simd = target.registers // 4 // (rounded * lanes(target))  # a warp's registers lie in one of the 4 quarters
    by_registers = min(per_simd, target.warps // 4) * 4 // warps
    by_shared = target.shared_bytes // max(shared + target.shared_reserved, 1)
    if tensor_memory:
        by_shared = min(by_shared, target.tensor_memory // (1 << (tensor_memory - 1).bit_length()))
    blocks = min(by_registers, by_shared, target.warps // warps, target.blocks)
    return blocks, blocks * warps / target.warps
