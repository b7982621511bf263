"""Slabs of bytes that a rank's temporary buffers and wires share, so that memory stays the same from batch to batch."""

from collections.abc import Sequence

import torch
from torch import Tensor


class BufferPool:
    """Hands out flat uint8 slabs and takes them back. Sizes are rounded up in steps of an eighth, so that layouts that
    differ a little use the same slabs.

    Args:
        poison: fill every slab with NaN bytes when it is handed out (for tests).
    """

    def __init__(self, device: torch.device | str = "cpu", poison: bool = False) -> None:
        self.device, self.poison = torch.device(device), poison
        self._free: dict[int, list[Tensor]] = {}
        self._made: dict[int, int] = {}
        self.total = 0  # bytes ever reserved

    def take(self, size: int) -> Tensor:
        """A slab of at least `size` bytes."""
        rounded = _round_up(size)
        waiting = self._free.get(rounded)
        if waiting:
            slab = waiting.pop()
        else:
            slab = self._new(rounded)
        if self.poison:
            slab.fill_(255)
        return slab

    def reserve(self, slabs: Sequence[tuple[int, int]]) -> None:
        """Make sure that `number` slabs of `bytes` exist, for each (bytes, number)."""
        wanted: dict[int, int] = {}
        for size, number in slabs:
            wanted[_round_up(size)] = wanted.get(_round_up(size), 0) + number
        for size, number in wanted.items():
            for _ in range(number - self._made.get(size, 0)):
                self.give(self._new(size))

    def _new(self, size: int) -> Tensor:
        self.total += size
        self._made[size] = self._made.get(size, 0) + 1
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def give(self, slab: Tensor) -> None:
        """Take a slab back."""
        self._free.setdefault(slab.numel(), []).append(slab)


def _round_up(size: int) -> int:
    step = max(64, 1 << max(0, size.bit_length() - 4))
    return -(-max(size, 1) // step) * step
