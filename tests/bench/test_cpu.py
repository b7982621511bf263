"""The CPU bench: contenders that compute the same, honest document lengths, and rows that a program can read."""

from __future__ import annotations

import io
import json

import pytest
import torch

from bench.cpu.__main__ import main
from bench.cpu.attention import attention_section, causal, dense_bias, document_lengths, per_document, per_slice
from bench.table import Report
from data.sources.mixes import MIXES


@pytest.mark.parametrize("mix", [*MIXES, "stdlib"])
def test_lengths_fill_the_tokens(mix: str) -> None:
    """Every mix sums to exactly the tokens asked for, the same way twice."""
    lengths = document_lengths(mix, 3001, 5)
    assert sum(lengths) == 3001
    assert min(lengths) > 0
    assert lengths == document_lengths(mix, 3001, 5)


def test_contenders_agree() -> None:
    """Both loops and the dense mask are the same attention."""
    lengths = [5, 1, 12]
    q, k, v = torch.randn(3, 18, 2, 8).unbind(0)
    want = torch.cat([causal(q[:5], k[:5], v[:5]), v[5:6], causal(q[6:], k[6:], v[6:])])
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    dense = torch.nn.functional.scaled_dot_product_attention(*heads, dense_bias(lengths))[0].transpose(0, 1)
    for got in (per_document(q, k, v, lengths), per_slice(q, k, v, lengths), dense):
        torch.testing.assert_close(got, want)


def test_rows_as_json() -> None:
    """One object a line and nothing else, with every mix and positive ratios."""
    stream = io.StringIO()
    attention_section(Report(as_json=True, stream=stream), [256], 0.0, 0, torch.float32)
    rows = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [row["mix"] for row in rows] == [*MIXES, "stdlib"]
    assert all(row["tokens"] == 256 and row["x_per_doc"] > 0 and row["x_dense"] > 0 for row in rows)
    assert all(0 < row["mask_flops%"] <= 100 * 257 / 512 for row in rows)


def test_rows_as_a_table() -> None:
    """A header, then rows aligned under it."""
    stream = io.StringIO()
    report = Report(as_json=False, stream=stream)
    report.row({"mix": "web", "ours": 1.5})
    report.row({"mix": "a", "ours": 1234.5})
    lines = stream.getvalue().splitlines()
    assert lines[0].split() == ["mix", "ours"]
    assert [line.split() for line in lines[1:]] == [["web", "1.5"], ["a", "1234"]]
    assert len({len(line) for line in lines}) == 1


def test_unknown_dtype_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The message lists what there is."""
    with pytest.raises(SystemExit):
        main(["--dtype", "int8"])
    assert "float32" in capsys.readouterr().err
