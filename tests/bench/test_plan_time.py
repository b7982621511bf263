"""The planning bench: a row for every preset and mask, on lengths that fill the tokens."""

import io
import json

import pytest

from bench.plan_time import CASES, MASKS, PRESETS, PlanCase, document_lengths, main, planning_section
from bench.table import Report


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lengths_fill_the_tokens(case: PlanCase):
    lengths = document_lengths(case.tokens, case.documents, 3)
    assert len(lengths) == case.documents and sum(lengths) == case.tokens and min(lengths) >= 1
    assert (
        lengths == document_lengths(case.tokens, case.documents, 3) != document_lengths(case.tokens, case.documents, 4)
    )


@pytest.mark.parametrize("row", [True, False])
def test_rows_as_json(row: bool):
    stream = io.StringIO()
    planning_section(Report(True, stream), (PlanCase("small", 4096, 8, 9, row, 10.0),), 1, PRESETS, 0)
    rows = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(r["preset"], r["mask"]) for r in rows] == [(name, mask) for name in PRESETS for mask in MASKS]
    assert all(r["best_ms"] > 0 and r["masks"] > 0 and r["masks_ms"] > 0 for r in rows)


def test_unknown_preset_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--preset", "spiral"])
    assert "zigzag_ring" in capsys.readouterr().err
