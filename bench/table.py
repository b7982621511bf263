"""Rows of a bench as an aligned table, or as JSON lines for a program."""

from __future__ import annotations

import json
import sys
from typing import TextIO

Row = dict[str, str | int | float]


class Report:
    """Prints rows as they come: aligned columns under a header, or one JSON object a line and nothing else.

    Args:
        as_json: rows as JSON lines on `stream`; notes are dropped.
        stream: standard output by default.
    """

    def __init__(self, as_json: bool, stream: TextIO | None = None) -> None:
        self.as_json = as_json
        self.stream = sys.stdout if stream is None else stream
        self.columns: list[str] = []

    def note(self, text: str) -> None:
        """A line of prose for people."""
        if not self.as_json:
            print(text, file=self.stream, flush=True)

    def row(self, row: Row) -> None:
        """One row; a header precedes it where the columns changed."""
        if self.as_json:
            print(json.dumps(row), file=self.stream, flush=True)
            return
        if list(row) != self.columns:
            self.columns = list(row)
            self._line(self.columns)
        self._line([_text(value) for value in row.values()])

    def _line(self, cells: list[str]) -> None:
        widths = [max(len(name), 9) for name in self.columns]
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths)), file=self.stream, flush=True)


def _text(value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)
