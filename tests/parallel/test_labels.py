"""A run is named by what ran: a preset with an axis of its own says so, whatever the axis and the preset."""

import dataclasses

import pytest

from parallel.strategy import Strategy, load_strategy, preset_names

OTHERS = {
    "sharding": "other", "exchange": "other", "inner_exchange": "other", "head_slices": 3, "batch_groups": 7,
    "weights": "fully_sharded", "pp": 5, "dp": 5, "cp_outer": 5, "cp_inner": 5, "tp": 5, "node_size": 5,
    "buffer_bytes": 5,
}  # fmt: skip


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_called_by_its_name_and_with_what_is_changed(name: str) -> None:
    strategy = load_strategy(name)
    assert strategy.label == name
    for axis, value in OTHERS.items():
        assert dataclasses.replace(strategy, **{axis: value}).label == f"{name} with {axis}={value}"
    planner = dataclasses.replace(strategy.planner, cluster="somewhere")
    assert dataclasses.replace(strategy, planner=planner).label == f"{name} with planner.cluster=somewhere"
    two = dataclasses.replace(strategy, weights="fully_sharded", node_size=3)
    assert two.label == f"{name} with weights=fully_sharded, node_size=3"
    assert two.labelled(["node_size"]) == f"{name} with weights=fully_sharded"


def test_every_axis_has_a_value_of_its_own_here() -> None:
    assert {field.name for field in dataclasses.fields(Strategy)} == {"name", "planner", *OTHERS}


def test_null_and_one_are_the_same_axis_and_a_name_of_ones_own_hides_nothing() -> None:
    assert load_strategy("local", pp=1, dp=1, tp=1).label == "local"
    assert dataclasses.replace(load_strategy("hsap"), inner_exchange=None).label == "hsap with inner_exchange=null"
    assert dataclasses.replace(load_strategy("local"), name="mine", exchange="ring").label == "mine with exchange=ring"


def test_what_runs_is_told_with_its_mesh() -> None:
    strategy = load_strategy("local", exchange="ring")
    mesh = strategy.mesh(4, 4, 4)
    assert strategy.describe(mesh, 1) == "local with exchange=ring: dp 1 x cp_outer 4 x cp_inner 1"
    assert strategy.describe(strategy.mesh(1, 4, 4), 1) == "local with exchange=ring"
