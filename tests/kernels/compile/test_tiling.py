"""Which tiles are visited, in what order, and which tile a kernel takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from data.sources.mixes import draw_lengths
from kernels.api import IntervalMask, attention
from kernels.compile.runtime import interpreted
from kernels.compile.tiling import TILES, Tile, choose_tile, padded_width, tile_loops, tile_order
from tests.kernels.oracle import cumulative, document_pairs


def visited(mask: IntervalMask, side: str, block: int, other: int) -> int:
    return int(tile_loops(mask, side, block, other).sum())


@pytest.mark.parametrize("mix", ["wlb", "web", "code"])
@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("kernel", ["fwd", "dq", "dkdv"])
def test_work_skipped(mix: str, side: str, kernel: str) -> None:
    """At 16K tokens, within 15% of the fewest tiles that can hold each row tile's span of keys."""
    tile = choose_tile(kernel, 128, 2, "sm_90")  # pyright: ignore[reportArgumentType]
    block, other = (tile.block_m, tile.block_n) if side == "q" else (tile.block_n, tile.block_m)
    mask = IntervalMask.from_cu_seqlens(cumulative(draw_lengths(mix, 16384, 0)))
    start, end = (mask.k_start, mask.k_end) if side == "q" else (mask.q_start, mask.q_end)
    spans = [int(end[min(a + block, 16384) - 1] - start[a]) for a in range(0, 16384, block)]
    least = sum(-(-span // other) for span in spans)
    assert least <= visited(mask, side, block, other) <= 1.15 * least


def test_visited_tiles_hold_every_pair_and_none_is_idle() -> None:
    """Against the dense mask: tiles without a pair are visited only where the row tile's span has a hole."""
    sizes = [37, 0, 1, 80, 200, 3]
    mask, pairs = IntervalMask.from_cu_seqlens(cumulative(sizes), window=50), document_pairs(sizes, reach=(49, 49))
    for block, other in ((32, 16), (16, 64)):
        counts = tile_loops(mask, "q", block, other).tolist()
        for n, a in enumerate(range(0, 321, block)):
            columns = pairs[a : a + block].any(0).nonzero().flatten()
            assert counts[n] == int(columns.max()) // other - int(columns.min()) // other + 1


def test_heaviest_first_once() -> None:
    """A permutation of the tiles by falling length of their loops, stable, kept on the mask."""
    mask = IntervalMask.from_cu_seqlens(cumulative([300, 10, 150, 2]))
    for side in ("q", "k"):
        tile = Tile(32, 16, 4, 2)
        order = tile_order(mask, side, tile)
        loops = tile_loops(mask, side, *((32, 16) if side == "q" else (16, 32)))
        assert order.dtype == torch.int32
        assert sorted(order.tolist()) == list(range(loops.shape[0]))
        taken = loops[order.long()].tolist()
        assert taken == sorted(taken, reverse=True)
        assert tile_order(mask, side, tile) is order


def test_a_mask_without_pairs_visits_nothing() -> None:
    """Documents without keys, and no tokens at all."""
    assert visited(IntervalMask.from_cu_seqlens([0, 100], [0, 0], causal=False), "q", 32, 32) == 0
    assert tile_loops(IntervalMask.from_cu_seqlens([0]), "q", 32, 32).tolist() == []


def test_every_width_and_type_has_a_tile() -> None:
    """For each target, tiles whose sides the matrix units take; stages of software pipelining always."""
    for target in (*TILES, "sm_120", "gfx950"):
        for kernel in ("fwd", "dq", "dkdv"):
            for width in (1, 16, 64, 80, 128, 200, 256):
                for size in (2, 4):
                    tile = choose_tile(kernel, padded_width(width), size, target)
                    assert min(tile.block_m, tile.block_n) >= 16
                    assert tile.stages >= 2


def test_streamed_side_is_half_as_long_with_gaps_or_a_cap() -> None:
    """Once, not for each of them; fp32 tiles are at their least already."""
    for target in TILES:
        for kernel in ("fwd", "dq", "dkdv"):
            plain = choose_tile(kernel, 128, 2, target)
            shorter = {choose_tile(kernel, 128, 2, target, *on) for on in ((True, False), (False, True), (True, True))}
            side = "block_m" if kernel == "dkdv" else "block_n"
            assert shorter == {replace(plain, **{side: max(16, getattr(plain, side) // 2)})}
            assert choose_tile(kernel, 128, 4, target, True, True) == choose_tile(kernel, 128, 4, target)


def test_gaps() -> None:
    """Tokens that nothing touches: known on the CPU and remembered by copies; on a device taken to be there."""
    whole = IntervalMask.from_cu_seqlens([0, 5, 9])
    assert not whole.has_gaps()
    assert IntervalMask.from_cu_seqlens([0, 5], [0, 3]).has_gaps()
    assert IntervalMask.from_cu_seqlens([0, 5], [0, 9], window=2).has_gaps()
    assert IntervalMask.from_documents([0, 6], [5, 9], 10).has_gaps()
    assert not whole.to("meta").has_gaps()
    assert IntervalMask(*(torch.zeros(3, dtype=torch.int32, device="meta") for _ in range(4))).has_gaps()


def test_triton_refuses() -> None:
    """float64, naming torch; and the CPU outside the interpreter, with the way out."""
    mask, x = IntervalMask.from_cu_seqlens([0, 4]), torch.zeros(4, 1, 8)
    with pytest.raises(ValueError, match=r"'triton' computes fp32, fp16 and bf16, not float64; use one of torch"):
        attention(x.double(), x.double(), x.double(), mask, backend="triton")
    if not interpreted():
        with pytest.raises(ValueError, match=r"TRITON_INTERPRET=1 before the start\); use one of torch, reference"):
            attention(x, x, x, mask, backend="triton")
