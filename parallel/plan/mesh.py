"""The mesh of ranks: five named axes, who sits where, and which links join whom.

The order of ranks is `pp, dp, cp_outer, cp_inner, tp`, the last one fastest, so that the ranks which talk most are
neighbours on a node.

    >>> mesh = MeshSpec(dp=2, cp_outer=2, cp_inner=2, node_size=4)
    >>> mesh.world, mesh.coordinates(5)
    (8, Coordinates(pp=0, dp=1, cp_outer=0, cp_inner=1, tp=0))
    >>> mesh.groups("cp_outer", "cp_inner")
    ((0, 1, 2, 3), (4, 5, 6, 7))
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

AXES = ("pp", "dp", "cp_outer", "cp_inner", "tp")
CP = ("cp_outer", "cp_inner")
LINKS = ("self", "intra", "inter")


class Coordinates(NamedTuple):
    """A rank's place on each axis, from 0."""

    pp: int
    dp: int
    cp_outer: int
    cp_inner: int
    tp: int


@dataclass(frozen=True)
class MeshSpec:
    """Ranks along each axis, and how many ranks share a node (and so its fast links).

    Raises:
        ValueError: an axis or a node of less than one rank.
    """

    pp: int = 1
    dp: int = 1
    cp_outer: int = 1
    cp_inner: int = 1
    tp: int = 1
    node_size: int = 8

    def __post_init__(self) -> None:
        for axis in (*AXES, "node_size"):
            value = getattr(self, axis)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{axis}={value!r}; a mesh needs a whole number of at least 1 on every axis")

    @property
    def sizes(self) -> Coordinates:
        """Ranks along each axis."""
        return Coordinates(self.pp, self.dp, self.cp_outer, self.cp_inner, self.tp)

    @property
    def world(self) -> int:
        """All ranks."""
        return prod(self.sizes)

    @property
    def cp(self) -> int:
        """Ranks that share a sequence: cp_outer * cp_inner."""
        return self.cp_outer * self.cp_inner

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` sits. ValueError for a rank outside the world."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside the mesh's {self.world} ranks")
        place = []
        for size in reversed(self.sizes):
            rank, at = divmod(rank, size)
            place.append(at)
        return Coordinates(*reversed(place))

    def rank(self, place: Sequence[int]) -> int:
        """The rank at `place` (pp, dp, cp_outer, cp_inner, tp). ValueError for a place outside the mesh."""
        number = 0
        for axis, at, size in zip(AXES, place, self.sizes, strict=True):
            if not 0 <= at < size:
                raise ValueError(f"{axis}={at} is outside the mesh's {axis}={size}")
            number = number * size + at
        return number

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The ranks that differ only along `axes`, one tuple for each place on the other axes, in order of ranks.

        Raises:
            ValueError: an unknown axis.
        """
        for axis in axes:
            if axis not in AXES:
                raise ValueError(f"no mesh axis is called {axis!r}; choose among {', '.join(AXES)}")
        sizes = self.sizes
        fixed = [range(1 if axis in axes else size) for axis, size in zip(AXES, sizes)]
        moving = [range(size if axis in axes else 1) for axis, size in zip(AXES, sizes)]
        return tuple(
            tuple(self.rank([b + m for b, m in zip(base, move)]) for move in product(*moving))
            for base in product(*fixed)
        )

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group of `groups(*axes)` that holds `rank`."""
        self.coordinates(rank)
        return next(group for group in self.groups(*axes) if rank in group)

    def cp_index(self, rank: int) -> int:
        """`rank`'s number among the ranks that share its sequence: outer * cp_inner + inner."""
        place = self.coordinates(rank)
        return place.cp_outer * self.cp_inner + place.cp_inner

    def link(self, a: int, b: int) -> str:
        """The class of the link between two ranks: self, intra (one node) or inter."""
        if a == b:
            return "self"
        return "intra" if a // self.node_size == b // self.node_size else "inter"
