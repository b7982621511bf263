"""Tile sizes of each attention kernel by head width, dtype and target, and the order in which tiles launch.

The table's entries are those for which the compiled loops are software-pipelined, spill nothing and issue the fewest
instructions for each tensor-core cycle; `python -m bench.kernels --static` prints what each one costs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kernels.mask import IntervalMask

Kernel = Literal["fwd", "dq", "dkdv"]


@dataclass(frozen=True)
class Tile:
    """block_m queries by block_n keys, on `warps` warps, in `stages` stages of software pipelining."""

    block_m: int
    block_n: int
    warps: int
    stages: int


INTERPRETED = Tile(32, 32, 1, 1)

# target -> (kernel, bytes per element, padded head width) -> tile
TILES: dict[str, dict[tuple[Kernel, int, int], Tile]] = {
    "sm_80": {
        ("fwd", 2, 64): Tile(128, 64, 8, 2),
        ("fwd", 2, 128): Tile(128, 64, 8, 2),
        ("fwd", 2, 256): Tile(64, 32, 8, 2),
        ("dq", 2, 64): Tile(128, 64, 8, 2),
        ("dq", 2, 128): Tile(128, 64, 8, 2),
        ("dq", 2, 256): Tile(64, 32, 8, 2),
        ("dkdv", 2, 64): Tile(64, 128, 8, 2),
        ("dkdv", 2, 128): Tile(32, 128, 8, 2),
        ("dkdv", 2, 256): Tile(16, 64, 8, 2),
    },
    "sm_90": {
        ("fwd", 2, 64): Tile(64, 128, 4, 3),
        ("fwd", 2, 128): Tile(128, 128, 8, 2),
        ("fwd", 2, 256): Tile(128, 64, 8, 2),
        ("dq", 2, 64): Tile(64, 128, 4, 2),
        ("dq", 2, 128): Tile(128, 128, 8, 2),
        ("dq", 2, 256): Tile(128, 32, 8, 2),
        ("dkdv", 2, 64): Tile(64, 64, 4, 2),
        ("dkdv", 2, 128): Tile(64, 64, 4, 2),
        ("dkdv", 2, 256): Tile(32, 64, 8, 2),
    },
    "sm_100": {
        ("fwd", 2, 64): Tile(128, 128, 8, 2),
        ("fwd", 2, 128): Tile(128, 64, 8, 2),
        ("fwd", 2, 256): Tile(128, 32, 8, 2),
        ("dq", 2, 64): Tile(128, 128, 8, 2),
        ("dq", 2, 128): Tile(128, 128, 8, 2),
        ("dq", 2, 256): Tile(128, 32, 8, 2),
        ("dkdv", 2, 64): Tile(64, 128, 8, 2),
        ("dkdv", 2, 128): Tile(64, 128, 8, 2),
        ("dkdv", 2, 256): Tile(64, 32, 8, 2),  # 64 keys: dk and dv fill tensor memory
    },
    "gfx942": {
        ("fwd", 2, 64): Tile(128, 64, 4, 2),
        ("fwd", 2, 128): Tile(128, 32, 4, 2),
        ("fwd", 2, 256): Tile(128, 16, 4, 2),
        ("dq", 2, 64): Tile(64, 32, 4, 2),
        ("dq", 2, 128): Tile(64, 32, 4, 2),
        ("dq", 2, 256): Tile(64, 16, 4, 2),
        ("dkdv", 2, 64): Tile(32, 64, 4, 2),
        ("dkdv", 2, 128): Tile(32, 64, 4, 2),
        ("dkdv", 2, 256): Tile(16, 64, 4, 2),
        ("dq", 4, 256): Tile(16, 16, 4, 2),
    },
}

# fp32 products run on the plain units of NVIDIA's chips (input_precision "ieee"), so registers alone decide; TILES goes
# before
FP32_TILES: dict[tuple[Kernel, int], Tile] = {
    ("fwd", 64): Tile(32, 32, 4, 2),
    ("fwd", 128): Tile(32, 16, 8, 2),
    ("fwd", 256): Tile(16, 16, 8, 2),
    ("dq", 64): Tile(32, 16, 4, 2),
    ("dq", 128): Tile(16, 16, 8, 2),
    ("dq", 256): Tile(16, 16, 8, 2),
    ("dkdv", 64): Tile(16, 32, 4, 2),
    ("dkdv", 128): Tile(16, 16, 8, 2),
    ("dkdv", 256): Tile(16, 16, 8, 2),
}


def choose_tile(
    kernel: Kernel, width: int, element_size: int, target: str, gaps: bool = False, capped: bool = False
) -> Tile:
    """The tile of a kernel for a padded head width (16..256) and an element size in bytes on a target.

    With `gaps` or `capped` the tiles that stream through a loop are half as long: pointers and tests, or the capped
    logits, take registers.

    Widths between entries take the next wider entry. A target that is not in the table takes the nearest older one of
    its maker.
    """
    if target == "interpreter":
        return INTERPRETED
    width = max(width, 64)
    tile = TILES[_nearest(target)].get((kernel, element_size, width)) or FP32_TILES[kernel, width]
    if element_size == 4 or not (gaps or capped):
        return tile
    if kernel == "dkdv":
        return replace(tile, block_m=max(16, tile.block_m // 2))
    return replace(tile, block_n=max(16, tile.block_n // 2))


def _nearest(target: str) -> str:
    """The table's target for a target."""
    if not target.startswith("sm_"):
        return "gfx942"
    older = [known for known in TILES if known.startswith("sm_") and int(known[3:]) <= int(target[3:])]
    return older[-1] if older else "sm_80"


def padded_width(width: int) -> int:
    """The power of two, at least 16, in which the kernels hold a head of this width."""
    return max(16, 1 << (width - 1).bit_length())


def use_descriptors(target: str) -> bool:
    """Whether a target loads tiles through tensor descriptors; the interpreter does, to test them."""
    return target == "interpreter" or (target.startswith("sm_") and int(target[3:]) >= 90)


def late_sum(target: str) -> bool:
    """Whether the forward sums probabilities behind the product that uses them: where products are asynchronous and
    their results lie in registers. The interpreter does, to test it."""
    return target == "interpreter" or target.startswith("sm_9")


def tile_order(mask: IntervalMask, side: str, tile: Tile) -> Tensor:
    """int32 order of the query tiles (side "q") or key tiles ("k"), those with the longest loops first.

    Computed where the mask is, without waiting for it, once for each tile size.
    """
    block, other = (tile.block_m, tile.block_n) if side == "q" else (tile.block_n, tile.block_m)
    key = ("order", side, block, other)
    if key not in mask.cache:
        mask.cache[key] = tile_loops(mask, side, block, other).argsort(descending=True, stable=True).int()
    return mask.cache[key]


def tile_loops(mask: IntervalMask, side: str, block: int, other: int) -> Tensor:
    """How many tiles of `other` each tile of `block` rows visits, as the kernels' `loop_parts` has it."""
    start, end = (mask.k_start, mask.k_end) if side == "q" else (mask.q_start, mask.q_end)
    first = torch.arange(0, start.shape[0], block, device=mask.device)
    last = (first + block - 1).clamp_(max=start.shape[0] - 1)
    begin, stop = start[first], end[last]
    return torch.where(stop > begin, (stop + other - 1) // other - begin // other, 0)
