"""The measured constants of a cluster: a fit finds what made the times, and ranks can measure them."""

import io

import pytest

from bench.cluster import BLOCKS, SHAPE, WIRES, Times, fit, measure, report_constants
from bench.table import Report
from parallel.price.cluster import Cluster, load_cluster
from tests.ranks.pool import RankPool


def times_of(cluster: Cluster) -> Times:
    """What a machine with exactly these constants would measure."""
    forward, backward = (
        [
            cluster.launch_s + per_pair * sum(n * (n + 1) / 2 + cluster.short_rows * n for n in lengths)
            for lengths in ([0], *BLOCKS)
        ]
        for per_pair in cluster.seconds_per_pair(SHAPE)
    )
    latency, rate = cluster.wire("intra")
    wire, moving = [latency + size / rate for size in WIRES], [2 * size / cluster.copy_bytes_s for size in WIRES]
    return Times(forward, backward, wire, [1e-5 + some for some in moving])


@pytest.mark.parametrize("name", ["cpu2", "h100_8"])
def test_fit_finds_the_constants(name: str):
    cluster = load_cluster(name)
    constants, left = fit(times_of(cluster))
    short = constants["short_rows"]
    assert abs(short - cluster.short_rows) <= 2  # the grid's half step
    assert max(left.values()) < 0.02
    for key in ("forward_flops", "backward_flops", "copy_bytes_s", "intra_bytes_s", "intra_latency_s"):
        assert constants[key] == pytest.approx(getattr(cluster, key), rel=0.03), key
    assert set(constants) == {key for key in vars(cluster) if key not in ("name", "ranks", "node_size")}


def test_ranks_measure_and_the_constants_are_printed(ranks: RankPool):
    answers = ranks.run(measure, 1, BLOCKS[2:4], world=2)
    assert all(min(times.forward + times.backward + times.wire + times.moving) > 0 for times in answers)
    stream = io.StringIO()
    report_constants(Report(False, stream), times_of(load_cluster("cpu2")))
    assert "forward_flops: 3." in stream.getvalue() and "mean relative error" in stream.getvalue()
