"""Ranks, coordinates, groups and links; what a strategy makes of a number of ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.plan.mesh import AXES, MeshSpec
from parallel.strategy import load_strategy, preset_names

sizes = st.integers(1, 3)


@given(sizes, sizes, sizes, sizes, sizes)
def test_ranks_and_coordinates(pp: int, dp: int, cp_outer: int, cp_inner: int, tp: int):
    mesh = MeshSpec(pp, dp, cp_outer, cp_inner, tp, node_size=4)
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(mesh.world)] == list(range(mesh.world))
    for axes in ([axis] for axis in AXES):
        groups = mesh.groups(*axes)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
        assert {len(group) for group in groups} == {getattr(mesh, axes[0])}
    for group in mesh.groups("cp_outer", "cp_inner"):
        assert [mesh.cp_index(rank) for rank in group] == list(range(mesh.cp))
        assert mesh.group_of(group[0], "cp_outer", "cp_inner") == group


def test_neighbours_talk_most():
    mesh = MeshSpec(dp=2, cp_outer=2, cp_inner=4, node_size=8)
    assert mesh.groups("cp_inner")[0] == (0, 1, 2, 3) and mesh.groups("cp_outer")[0] == (0, 4)
    assert mesh.groups("dp")[0] == (0, 8)
    assert (mesh.link(0, 0), mesh.link(0, 7), mesh.link(7, 8)) == ("self", "intra", "inter")


def test_what_is_no_mesh_is_refused():
    for bad in ({"dp": 0}, {"cp_inner": -2}, {"node_size": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            MeshSpec(**bad)
    mesh = MeshSpec(dp=2)
    with pytest.raises(ValueError, match="rank 2 is outside the mesh's 2 ranks"):
        mesh.coordinates(2)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank {rank} is outside the mesh's 2 ranks"):
            mesh.group_of(rank, "dp")
    with pytest.raises(ValueError, match="dp=5"):
        mesh.rank((0, 5, 0, 0, 0))
    with pytest.raises(ValueError, match="'cp'"):
        mesh.groups("cp")


@pytest.mark.parametrize(
    ("name", "world", "key_heads", "wanted"),
    [
        ("local", 4, 2, (4, 1, 1)),
        ("ring", 4, 2, (1, 4, 1)),
        ("ulysses", 4, 2, (1, 1, 4)),
        ("usp", 8, 2, (1, 4, 2)),
        ("usp", 8, 8, (1, 1, 8)),
        ("usp", 12, 8, (1, 3, 4)),
        ("usp", 6, 1, (1, 6, 1)),
        ("double_ring", 16, 8, (1, 2, 8)),
        ("llama3", 3, 2, (1, 3, 1)),
    ],
)
def test_null_axes_are_filled(name: str, world: int, key_heads: int, wanted: tuple[int, int, int]):
    mesh = load_strategy(name).mesh(world, 16, key_heads)
    assert (mesh.dp, mesh.cp_outer, mesh.cp_inner) == wanted and mesh.world == world


def test_given_axes_are_kept():
    assert load_strategy("ring", dp=2).mesh(8, 4, 4).sizes == (1, 2, 4, 1, 1)
    assert load_strategy("ring", cp_outer=2).mesh(8, 4, 4).sizes == (1, 4, 2, 1, 1)
    assert load_strategy("usp", cp_inner=2).mesh(8, 4, 4).sizes == (1, 1, 4, 2, 1)
    assert load_strategy("usp", cp_outer=2).mesh(4, 32, 8).sizes == (1, 1, 2, 2, 1)  # the inside first, then replicas
    assert load_strategy("double_ring", cp_outer=2).mesh(8, 32, 8).sizes == (1, 1, 2, 4, 1)
    assert load_strategy("hsap").mesh(12, 12, 6).sizes == (1, 1, 6, 2, 1)  # groups of 6 would straddle nodes of 8
    assert load_strategy("double_ring", node_size=4).mesh(6, 4, 4).sizes == (1, 1, 3, 2, 1)
    assert load_strategy("ulysses", dp=2).mesh(8, 4, 4).sizes == (1, 2, 1, 4, 1)
    assert load_strategy("ulysses", cp_inner=2).mesh(8, 4, 4).sizes == (1, 4, 1, 2, 1)


@pytest.mark.parametrize(
    ("name", "axes", "world", "match"),
    [
        ("ring", {"dp": 3}, 8, "8 ranks do not divide by dp=3"),
        ("ring", {"dp": 2, "cp_outer": 2}, 8, "set strategy.dp=4"),
        ("local", {"dp": 2}, 8, "strategy.dp=8"),
        ("ulysses", {}, 8, "cannot share 4 query heads"),
        ("ulysses", {"cp_outer": 2}, 4, "usp"),
        ("ring", {"cp_inner": 2}, 4, "inner_exchange"),
        ("usp", {"tp": 2}, 4, "strategy.tp=2"),
        ("usp", {"cp_inner": 0}, 4, "cp_inner=0"),
        ("ring", {"head_slices": 2}, 4, "all_gather"),
        ("distflash", {"sharding": "zigzag"}, 4, "contiguous"),
        ("llama3", {"inner_exchange": "ring"}, 4, "laps"),
        ("local", {"sharding": "zigzag"}, 1, "keeps it on one rank"),
        ("local", {"batch_groups": "auto"}, 1, "keeps it on one rank"),
        ("ring", {"sharding": "spiral"}, 4, "'spiral' is unknown"),
        ("ring", {"exchange": "rings"}, 4, "'rings' is unknown"),
        ("ring", {"weights": "shared"}, 4, "'shared' is unknown"),
        ("ring", {"colour": 1}, 4, "no axis 'colour'"),
        ("rong", {}, 4, "'rong' is unknown"),
    ],
)
def test_refusals_have_numbers_and_a_way_out(name: str, axes: dict, world: int, match: str):
    with pytest.raises(ValueError, match=match):
        load_strategy(name, **axes).mesh(world, 4, 2)


def test_every_preset_loads():
    for name in preset_names():
        strategy = load_strategy(name)
        assert strategy.name == name
        strategy.mesh(4, 4, 2)
