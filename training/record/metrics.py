"""Every number a run reports: its name, unit and meaning, and the file that holds them.

`metrics.jsonl` has one JSON object a step; `step` counts completed optimiser updates from 1.
"""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

from data.batch import PackedBatch
from parallel.plan.ir import CLASSES

METRICS: dict[str, tuple[str, str]] = {
    "train/loss": ("nats/token", "cross entropy: sum over the step's valid tokens / their global count"),
    "train/grad_norm": ("1", "global L2 norm of the gradient before clipping"),
    "train/lr": ("1", "learning rate of the step"),
    "train/tokens": ("tokens", "valid (predicted) tokens since step 1"),
    "train/skipped_steps": ("steps", "steps skipped for a non-finite loss or gradient, since step 1"),
    "eval/loss": ("nats/token", "cross entropy on held-out documents: sum / count over all of them"),
    "eval/bits_per_byte": ("bits/byte", "held-out cross entropy over the bytes predicted"),
    "perf/step_s": ("s", "wall-clock time of the step, data included"),
    "perf/tokens_per_s": ("tokens/s", "tokens of the step, padding left out, over its wall-clock time"),
    "perf/model_tflops": ("TFLOP/s", "the model's FLOPs under the document mask over the step's time"),
    "perf/mfu": ("1", "perf/model_tflops over the device's dense bf16 peak, where it is known"),
    "mem/peak_bytes": ("bytes", "peak memory so far, most of all ranks: the device's allocator, on a CPU the process"),
    "plan/choice": ("preset", "strategy=auto: the preset that the step's last batch ran; null under another strategy"),
    "plan/runner_up": ("preset", "strategy=auto: the preset that came second"),
    "plan/predicted_s": ("s", "strategy=auto: predicted attention of all layers, forward and backward, of the choice"),
    "plan/runner_up_s": ("s", "strategy=auto: the same of the preset that came second"),
    "plan/exposed_s": ("s", "time that the step waited for its plans, which are made while the step before it runs"),
    "plan/imbalance": ("1", "allowed pairs that attention covers on the busiest rank over the mean of ranks, forward"),
    "data/docs_per_row": ("documents", "documents in a packed row, mean"),
    "data/padding": ("1", "share of the step's token slots that hold padding"),
    "data/trained": ("1", "share of the step's tokens, padding left out, that are labels; a prompt's are none"),
    "data/cut_documents": ("documents", "documents cut at a row's end, which go on in another row, since step 1"),
    "data/epoch": ("epochs", "passes over the documents that are trained on to the end, of a mixture by every source"),
    "data/tokens/<source>": (
        "tokens",
        "valid (predicted) tokens of each source since step 1; they sum to train/tokens",
    ),
    "data/epoch/<source>": ("epochs", "passes over each source of a mixture that are trained on to the end"),
    "data/mask_density": ("1", "allowed (query, key) pairs over those of full causal rows"),
    **{
        f"comm/bytes/{traffic}/{link}": ("bytes", f"{traffic} that exchanges of the step moved, all ranks, {where}")
        for traffic in CLASSES
        for link, where in (("self", "within a rank"), ("intra", "within nodes"), ("inter", "across nodes"))
    },
}

# Those that depend on the step's batch alone.
BATCH_METRICS: dict[str, Callable[[PackedBatch], float]] = {
    "data/docs_per_row": lambda batch: batch.num_documents / batch.rows,
    "data/padding": lambda batch: batch.padding_tokens / batch.tokens.numel(),
    "data/trained": lambda batch: batch.label_tokens / max(1, batch.tokens.numel() - batch.padding_tokens),
}


def is_known(name: str) -> bool:
    """Whether METRICS lists the name, or its family: a last part in angle brackets stands for any."""
    return "<" not in name and (name in METRICS or f"{name.rpartition('/')[0]}/<source>" in METRICS)


class MetricsFile:
    """Append-only `metrics.jsonl`, cut to the checkpoint's step when a run resumes.

    Args:
        path: the file; created when absent.
        resume_step: keep only the lines of steps up to this one (0: start anew).

    Attributes:
        lost: steps up to `resume_step` that have no line.
    """

    def __init__(self, path: Path, resume_step: int = 0):
        self.path = path
        kept = [row for row in read_metrics(path) if row["step"] <= resume_step]
        there = {row["step"] for row in kept}
        self.lost = [step for step in range(1, resume_step + 1) if step not in there]
        temporary = path.with_suffix(".jsonl.tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(temporary, path)
        self.history = kept
        self._file = path.open("a", buffering=1)
        self._last = kept[-1]["step"] if kept else 0

    def write(self, step: int, values: dict[str, float | int | str | None]) -> dict:
        """Append the step's object and return it. A NaN or an infinity is written as null.

        Raises:
            KeyError: a name that METRICS does not list.
            ValueError: a step that does not come after the last one.
        """
        unknown = sorted(name for name in values if not is_known(name))
        if unknown:
            raise KeyError(f"metrics {unknown} are not listed in training.record.metrics.METRICS.")
        if step <= self._last:
            raise ValueError(f"step {step} does not come after step {self._last}.")
        finite = {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in values.items()}
        row = {"step": step, **finite}
        self._file.write(json.dumps(row) + "\n")
        self._last = step
        return row

    def close(self) -> None:
        """Flush to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def read_metrics(path: Path) -> list[dict]:
    """The rows of a metrics file, in order; a last line cut short by a kill is dropped.

    Raises:
        ValueError: a damaged line before the last; names it.
    """
    rows: list[dict] = []
    if not path.exists():
        return rows
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        elif number < len(lines):
            raise ValueError(
                f"{path}:{number} is no metrics row ({line[:40]!r}); mend or move the file before resuming"
            )
    return rows
