"""How an invocation ended: well, with a table that says so, or by a rank that failed."""

from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from training.config import Config
from training.record.progress import describe_evaluation, print_summary


@dataclass
class Outcome:
    """How an invocation ended: the last completed step, why it stopped (None: it reached the end), the run folder."""

    step: int
    stopped_by: str | None
    folder: Path
    summary: dict = field(default_factory=dict)


class RankFailed(RuntimeError):
    """A rank failed, and with it the job. Its traceback has been printed."""


class PeerLost(RuntimeError):
    """Another rank left or did not answer: what failed is there, not here."""


def print_outcome(console: Console, config: Config, path: Path, summary: dict, how: str) -> None:
    """The table at the end of a run."""
    rows = [
        ("steps", f"{summary['step']} ({summary['tokens']:,} predicted tokens)"),
        ("training loss", "not finite" if summary["train_loss"] is None else f"{summary['train_loss']:.4f} nats/token"),
    ]
    if summary["eval_loss"] is not None:
        found = {"eval/loss": summary["eval_loss"], "eval/bits_per_byte": summary["eval_bits_per_byte"]}
        rows.append(("held-out loss", describe_evaluation(found)))
    if summary["bigram_bits_per_byte"] is not None:
        rows.append(("a bigram table", f"{summary['bigram_bits_per_byte']:.4f} bits/byte on the same held-out text"))
    rows.append(("speed", f"{summary['tokens_per_s']:,.0f} tokens/s, median"))
    if summary["skipped_steps"]:
        rows.append(("skipped steps", f"{summary['skipped_steps']} with a loss or gradient that was not finite"))
    rows.append(("run folder", str(path)))
    print_summary(console, f"{config.run.name}: {how}", rows)
