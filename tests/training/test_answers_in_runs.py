"""Answers only in whole runs: one process and two ranks lose alike over the predicted tokens; a stopped run goes on."""

import json

import pytest

from parallel.strategy import load_strategy
from tests.training.start.test_ranks import SLOW, rows, train


def test_losses_alone_on_two_ranks_and_resumed(ranks, make_config, tmp_path):
    records = [{"question": "why? " * (1 + n % 9), "answer": "so" * (1 + n % 3)} for n in range(60)]
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"paths": [str(path)], "prompt_key": "question", "text_key": "answer", "eval_fraction": 0.3}
    changes: dict = {"optim": SLOW, "data": data}
    train(make_config(**changes, run={"steps": 4, "dir": str(tmp_path / "one")}))
    alone = rows(tmp_path / "one")
    assert all(0 < row["data/trained"] < 0.5 for row in alone)
    assert alone[-1]["train/tokens"] == sum(alone[-1][key] for key in alone[-1] if key.startswith("data/tokens/"))

    config = make_config(
        **changes, run={"steps": 4, "dir": str(tmp_path / "two")}, strategy=vars(load_strategy("hsap"))
    )
    assert ranks.run(train, config, world=2) == [(4, None)] * 2
    for one, two in zip(alone, rows(tmp_path / "two"), strict=True):
        assert two["train/loss"] == pytest.approx(one["train/loss"], rel=1e-5)
        assert two["train/tokens"] == one["train/tokens"] and two["data/trained"] == one["data/trained"]
    assert two["eval/loss"] == pytest.approx(one["eval/loss"], rel=1e-5)

    for stop in (2, None):
        train(make_config(**changes, run={"steps": 4, "stop_at": stop, "dir": str(tmp_path / "again")}))
    again = rows(tmp_path / "again")
    assert [row["train/loss"] for row in again] == [row["train/loss"] for row in alone]
