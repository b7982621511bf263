"""The metrics file: one object a step, known names only, cut when a run resumes."""

import json

import pytest

from training.record.metrics import METRICS, MetricsFile, read_metrics


def test_unknown_name_raises(tmp_path):
    with pytest.raises(KeyError, match="train/los"):
        MetricsFile(tmp_path / "m.jsonl").write(1, {"train/los": 1.0})


def test_steps_only_go_forward(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl")
    file.write(3, {"train/loss": 1.0})
    with pytest.raises(ValueError, match="step 3 does not come after step 3"):
        file.write(3, {"train/loss": 1.0})


def test_resume_cuts_the_file_to_the_checkpoint_and_loses_nothing_before(tmp_path):
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path)
    for step in range(1, 6):
        file.write(step, {"train/loss": float(step)})
    file.close()
    with path.open("a") as f:
        f.write('{"step": 6, "train/lo')  # killed in mid-line
    resumed = MetricsFile(path, resume_step=3)
    assert [r["step"] for r in resumed.history] == [1, 2, 3]
    resumed.write(4, {"train/loss": 0.5})
    resumed.close()
    assert [(r["step"], r["train/loss"]) for r in read_metrics(path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 0.5)]


def test_not_finite_is_null_so_every_line_is_json(tmp_path):
    path = tmp_path / "m.jsonl"
    MetricsFile(path).write(1, {"train/loss": float("nan"), "train/grad_norm": float("inf")})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "step": 1,
        "train/loss": None,
        "train/grad_norm": None,
    }


def test_a_family_takes_any_source_and_nothing_else(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl")
    assert file.write(1, {"data/tokens/web-2": 3})["data/tokens/web-2"] == 3
    for name in ("data/tokens/<source>", "data/tokens", "data/tokens/a/b", "train/loss/web"):
        with pytest.raises(KeyError, match="not listed"):
            file.write(2, {name: 1})


def test_every_metric_has_a_unit_and_a_meaning():
    assert all(unit and len(meaning) > 10 for unit, meaning in METRICS.values())


def test_a_damaged_line_in_the_middle_is_named_not_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\ngarbage\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl:2"):
        MetricsFile(path, resume_step=3)
    assert "step" in path.read_text().splitlines()[2]


@pytest.mark.parametrize(("kept", "lost"), [([1, 2, 3], []), ([1, 3], [2]), ([], [1, 2, 3]), ([2, 3, 4], [1])])
def test_lines_that_were_lost_are_noticed(tmp_path, kept, lost):
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"step": step, "train/loss": 1.0}) + "\n" for step in kept))
    assert MetricsFile(path, resume_step=3).lost == lost
    assert MetricsFile(path).lost == []
