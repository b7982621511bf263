"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere, and a table at the end."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


class ProgressReport:
    """A context manager that shows steps as they complete.

    Args:
        console: where to; a bar when it is a terminal, else one plain line every `log_every` steps.
        done, total: steps completed so far and the step where this invocation ends.
    """

    def __init__(self, console: Console, done: int, total: int, log_every: int):
        self.console, self.total, self.log_every = console, total, log_every
        self._first, self._began = done, time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("train", total=total, completed=done, text="")

    def __enter__(self) -> "ProgressReport":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, step: int, values: dict[str, float | int | None]) -> None:
        """Show a completed step; evaluations get a line of their own."""
        loss, rate = values.get("train/loss"), values.get("perf/tokens_per_s") or 0.0
        text = f"loss {loss:.4f}  {rate:,.0f} tokens/s" if loss is not None else "skipped: the loss was not finite"
        if self._bar:
            self._bar.update(self._task, completed=step, text=text)
        elif step == self._first + 1 or step % self.log_every == 0 or step == self.total:
            pace = (time.monotonic() - self._began) / max(1, step - self._first)
            left = max(0, self.total - step) * pace
            self.line(f"step {step}/{self.total}  {text}  ETA {int(left // 60)}:{int(left % 60):02d}")
        if "eval/loss" in values:
            self.line(f"step {step}/{self.total}  held-out loss {describe_evaluation(values)}")

    def line(self, text: str) -> None:
        """Print one line, above the bar if there is one."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)


@contextlib.contextmanager
def counting(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for `(done, most)` on a terminal, gone at the end; nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, most: progress.update(task, completed=done, total=most)


def describe_evaluation(values: dict[str, float | int | None]) -> str:
    """'2.1234 nats/token, 3.0634 bits/byte'."""
    loss = values["eval/loss"]
    if loss is None or not math.isfinite(loss):
        return "not finite"
    text = f"{loss:.4f} nats/token"
    bits = values.get("eval/bits_per_byte")
    return text if bits is None else f"{text}, {bits:.4f} bits/byte"


def print_summary(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    """The table at the end of a run."""
    if not console.is_terminal:
        width = max(len(name) for name, _ in rows)
        console.print(title, highlight=False, markup=False)
        for name, value in rows:
            console.print(f"  {name:<{width}}  {value}", highlight=False, soft_wrap=True, markup=False)
        return
    table = Table(title=escape(title), show_header=False)
    for name, value in rows:
        table.add_row(name, escape(value))
    console.print(table, soft_wrap=True)
