"""Which key head each query head attends, where the two need not form equal groups (a rank's share of 14 heads on 2).

The kernels know equal groups only. A map that forms them over neighbouring key heads becomes a view; any other repeats
key heads, in the largest groups that fit, and their gradients are added up afterwards in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class KeyHeads:
    """`units[i]` is the key head of the i-th of len(units) equal groups of query heads; never decreasing."""

    units: tuple[int, ...]

    @property
    def neighbours(self) -> bool:
        """Whether the groups' key heads are consecutive, so that nothing need be copied."""
        return all(b == a + 1 for a, b in pairwise(self.units))

    def take(self, x: Float[Tensor, "Tk Hkv D"]) -> Float[Tensor, "Tk units D"]:
        """The key heads of the groups: a view (x itself where it is all of them) or a copy."""
        if self.neighbours:
            return x if len(self.units) == x.shape[1] else x[:, self.units[0] : self.units[-1] + 1]
        return torch.cat([x[:, unit : unit + 1] for unit in self.units], 1)

    def gradient(self, grad: Float[Tensor, "Tk Hkv D"]) -> Float[Tensor, "Tk units D"]:
        """Where the groups' gradients add up: a view of `grad`, or zeros for `add_back` to add to it."""
        return self.take(grad) if self.neighbours else grad.new_zeros(grad.shape[0], len(self.units), grad.shape[2])

    def add_back(self, grad: Float[Tensor, "Tk Hkv D"], part: Float[Tensor, "Tk units D"]) -> None:
        """Add the groups' gradients to those of their key heads; nothing to do where `part` is a view of `grad`."""
        if self.neighbours:
            return
        first = 0
        for unit, repeats in groupby(self.units):
            n = len(list(repeats))
            grad[:, unit] += part[:, first : first + n].sum(1)  # no atomics, unlike index_add on a GPU
            first += n


def key_heads(H: int, Hkv: int, head_map: Sequence[int] | Tensor | None) -> KeyHeads:
    """The key heads of H query heads; `head_map` [H] names each one's, and None means equal groups over all Hkv.

    A map on an accelerator is read on the host, which waits for it: give a list or a CPU tensor.

    Raises:
        ValueError: no map where Hkv does not divide H, or a map of the wrong length, range or order.
    """
    heads = head_map.tolist() if isinstance(head_map, Tensor) else head_map
    return _key_heads(H, Hkv, None if heads is None else tuple(heads))


@lru_cache
def _key_heads(H: int, Hkv: int, head_map: tuple[int, ...] | None) -> KeyHeads:
    if head_map is None:
        if Hkv == 0 or H % Hkv:
            raise ValueError(f"{Hkv} key heads do not divide {H} query heads; give a head_map of {H} key heads")
        return KeyHeads(tuple(range(Hkv)))
    if len(head_map) != H:
        raise ValueError(f"head_map names {len(head_map)} key heads for {H} query heads; give one for each")
    if not all(0 <= head < Hkv for head in head_map):
        raise ValueError(f"head_map {list(head_map)} leaves the {Hkv} key heads; they count from 0 to {Hkv - 1}")
    if any(b < a for a, b in pairwise(head_map)):
        raise ValueError(f"head_map {list(head_map)} decreases; sort the query heads by their key heads")
    group = math.gcd(*(len(list(run)) for _, run in groupby(head_map)))
    return KeyHeads(head_map[::group])
