"""Placements: what is refused, and who holds what of a unit."""

import pytest

from parallel.plan.layout import PackedLayout
from parallel.plan.mesh import MeshSpec
from parallel.plan.placement import Placement
from parallel.plan.tokens import TokenSet

LAYOUT = PackedLayout.from_lengths([6, 5], row_length=14)
UNITS = (TokenSet.of((0, 3), (10, 14)), TokenSet.of((3, 10)))


def test_ranks_of_a_unit_hold_its_parts_in_order():
    placement = Placement(LAYOUT, MeshSpec(dp=2, cp_outer=2, cp_inner=3), UNITS, 3, 2)
    assert placement.sets == (
        TokenSet.of((0, 2)), TokenSet.of((2, 3), (10, 11)), TokenSet.of((11, 14)),
        TokenSet.of((3, 5)), TokenSet.of((5, 7)), TokenSet.of((7, 10)),
    )  # fmt: skip
    assert placement.group_units == 1
    assert placement.tokens(1) == ((2, 3, 1), (10, 11, 1)) and placement.tokens(5) == ((7, 10, 1),)
    for rank in (-1, 6):
        with pytest.raises(ValueError, match=f"rank {rank} is outside the 6 ranks"):
            placement.tokens(rank)


def test_whole_units():
    placement = Placement(LAYOUT, MeshSpec(cp_outer=2), UNITS, 1)
    assert placement.sets == UNITS and placement.tokens(0) == ((0, 3, 1), (10, 14, 1))
    assert (placement.groups, placement.group_units) == (1, 2)


def test_what_does_not_add_up_is_refused():
    mesh = MeshSpec(cp_outer=2, cp_inner=2)
    with pytest.raises(ValueError, match="2 units of 1 ranks do not make up cp=4 ranks"):
        Placement(LAYOUT, mesh, UNITS, 1)
    with pytest.raises(ValueError, match="3 batch groups do not divide 2 units"):
        Placement(LAYOUT, mesh, UNITS, 2, 3)
    with pytest.raises(ValueError, match="the units hold 7 tokens of the layout's 14"):
        Placement(LAYOUT, MeshSpec(), UNITS[:1], 1)
