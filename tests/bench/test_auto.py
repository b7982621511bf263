"""The bench of auto's choices: its batches, what a rank measures, how a choice is judged."""

import io
import json

import pytest

from bench import auto as bench_auto
from bench.auto import auto_strategy, batches, judge, summary, time_presets
from bench.ranks import Seconds
from bench.table import Report, Row
from data.sources.mixes import MIXES
from parallel.auto import candidates
from parallel.plan.ir import AttentionShape
from tests.ranks.pool import RankPool


def test_batches_are_thirty_and_full():
    some = batches(False, 0)
    assert len(some) == 30 and {mix for mix, _ in some} == set(MIXES)
    assert all(sum(lengths) in bench_auto.SIZES for _, lengths in some)
    assert [mix for mix, _ in batches(True, 0)] == list(MIXES)
    assert batches(False, 1) != some


def test_every_candidate_is_timed_and_ranks_agree(ranks: RankPool):
    answers = ranks.run(time_presets, [90, 30, 8], auto_strategy(), AttentionShape(4, 2, 8, 8, "fp32"), 2, world=2)
    for prices, turns in answers:
        assert prices == answers[0][0] and list(prices) == list(answers[0][0])
        assert set(turns) == set(prices) == set(candidates())
        assert all(len(some) == 2 and min(map(min, some)) > 0 for some in turns.values())
    assert answers[0][1] == answers[1][1]  # the slower rank's seconds, on both
    turns = answers[0][1]
    assert turns["basp"] == turns["ulysses"] and turns["double_ring"] == turns["zigzag_ring"]  # the same schedules
    assert turns["striped_ring"] != turns["zigzag_ring"]


def some_turns(*walls: float) -> list[Seconds]:
    return [Seconds(wall, wall / 2) for wall in walls]


def test_judging_a_choice():
    """The choice is the cheapest by price; medians of the clock are compared, so one slow turn does no harm, and the
    shortest turns of the processor."""
    turns = {"a": some_turns(1.0, 9.0, 1.1), "b": some_turns(1.0, 0.8, 8.0)}
    row = judge("web", [3, 5], {"a": 2.0, "b": 3.0}, turns)
    assert (row["chosen"], row["fastest"], row["tokens"]) == ("a", "b", 8)
    assert row["regret"] == pytest.approx(0.1) and row["predicted_x"] == pytest.approx(2.0 / 1.1)
    assert row["processor_regret"] == pytest.approx(0.25)


def test_summary_counts_what_is_near_the_fastest():
    stream = io.StringIO()
    walls = [{"a": 1.0, "b": 1.0}, {"a": 1.1, "b": 1.0}, {"a": 1.0, "b": 2.0}]
    turns = [{name: some_turns(wall) for name, wall in batch.items()} for batch in walls]
    rows: list[Row] = [{"regret": regret, "processor_regret": 0.0} for regret in (0.0, 0.1, 0.11, 0.5)]
    summary(Report(True, stream), rows, turns)
    found = json.loads(stream.getvalue())
    assert (found["batches"], found["regret_right"], found["regret_worst"]) == (4, 2, 0.5)
    assert found["processor_regret_right"] == 4
    assert found["one_preset"] == "a" and found["one_preset_mean"] == pytest.approx(0.1 / 3)


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_command(capsys: pytest.CaptureFixture[str]):
    bench_auto.main(["--quick", "--json", "--repeats", "1"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["mix"] for row in rows[:-1]] == list(MIXES) and rows[-1]["batches"] == len(MIXES)
