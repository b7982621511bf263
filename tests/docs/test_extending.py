"""docs/extending.md runs from top to bottom: what it adds is proved, equals dense attention, and trains."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from data.sources.kinds import SOURCES
from data.sources.table import OPENERS
from parallel.exchange import EXCHANGES
from parallel.sharding import SHARDINGS
from training.config import Config
from training.loop import train
from training.optim.build import BUILDERS
from training.optim.kinds import OPTIMIZERS
from training.record.metrics import BATCH_METRICS, METRICS, read_metrics

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
TABLES = (SHARDINGS, EXCHANGES, SOURCES, OPENERS, METRICS, BATCH_METRICS, OPTIMIZERS, BUILDERS)


@pytest.fixture
def page() -> Iterator[dict]:
    """The page's names after all of its blocks have run; the tables are as before afterwards."""
    before = [dict(table) for table in TABLES]
    names: dict = {"__name__": "page"}
    try:
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S), 1):
            exec(compile(code, f"{PAGE.name}, block {number}", "exec"), names)
        yield names
    finally:
        for table, rows in zip(TABLES, before):
            table.clear()
            table.update(rows)  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_page_runs_and_what_it_adds_trains(page: dict, make_config: Callable[..., Config]):
    """`page` raises where a plan is not proved or differs from dense attention."""
    config = make_config(optim={"name": "sgd", "momentum": 0.5, "lr": 0.1}, run={"steps": 3})
    rows = read_metrics(train(config, Console(quiet=True)).folder / "metrics.jsonl")
    assert len(rows) == 3 and all(1 <= row["data/longest_document"] <= 96 for row in rows)
    assert page["check"](page["load_strategy"]("ring", exchange="direct", sharding="dealt")).rounds["forward"] == 1
