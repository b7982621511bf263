"""Which rank owns which tokens of a packed batch."""

from dataclasses import dataclass
from functools import cached_property

from parallel.plan.layout import PackedLayout
from parallel.plan.mesh import MeshSpec
from parallel.plan.tokens import Range, TokenSet


@dataclass(frozen=True)
class Placement:
    """Tokens over the cp ranks of a mesh: a sharding deals them to units, and `split` ranks share each unit.

    The ranks of a unit hold contiguous parts of it, equal to within a token, so that gathering them (all_to_all inside
    a node) comes out sorted. Ranks are numbered within their cp group: outer * cp_inner + inner.

    Attributes:
        units: one ascending set for each unit; together every token once, padding included.
        split: ranks per unit; 1 or the ranks of an inner group.
        groups: batch groups: equal runs of consecutive units, and so of ranks, each with rows of its own.
    """

    layout: PackedLayout
    mesh: MeshSpec
    units: tuple[TokenSet, ...]
    split: int
    groups: int = 1

    def __post_init__(self) -> None:
        if len(self.units) * self.split != self.mesh.cp:
            raise ValueError(f"{len(self.units)} units of {self.split} ranks do not make up cp={self.mesh.cp} ranks")
        if len(self.units) % self.groups:
            raise ValueError(f"{self.groups} batch groups do not divide {len(self.units)} units")
        held = sum(unit.count for unit in self.units)
        if held != self.layout.total_tokens:
            raise ValueError(f"the units hold {held} tokens of the layout's {self.layout.total_tokens}")

    @property
    def group_units(self) -> int:
        """Units in a batch group."""
        return len(self.units) // self.groups

    @cached_property
    def sets(self) -> tuple[TokenSet, ...]:
        """[cp]: each rank's tokens."""
        if self.split == 1:
            return self.units
        return tuple(
            unit.cut(i * unit.count // self.split, (i + 1) * unit.count // self.split)
            for unit in self.units
            for i in range(self.split)
        )

    def tokens(self, rank: int) -> tuple[Range, ...]:
        """Rank `rank`'s tokens as ranges (start, stop, stride). ValueError for a rank outside the cp group."""
        if not 0 <= rank < self.mesh.cp:
            raise ValueError(f"rank {rank} is outside the {self.mesh.cp} ranks that share the sequence")
        return self.sets[rank].tuples()
