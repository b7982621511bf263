"""The training loop of one process: steps, evaluations, checkpoints, and an orderly end."""

import json
import math
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from data.batch import PackedBatch
from data.bigram import bigram_bits_per_byte
from data.loader import PackedLoader
from models.decoder import Decoder
from models.flops import flops_per_step, parameter_count
from training.checkpoint import load_checkpoint, load_state, save_checkpoint
from training.config import Config, ConfigError, NonFinite, to_plain
from training.folder import RunFolder, read_json, write_json
from training.hardware import peak_memory_bytes, peak_tflops, pick_device
from training.interrupt import StopRequest
from training.metrics import MetricsFile
from training.optim import build_optimizer, gradient_norm, learning_rate
from training.progress import ProgressReport, describe_evaluation, print_summary
from training.step import NonFiniteLoss, StepLoss, evaluate, forward_backward
from training.tracking import Tracker


@dataclass
class Counters:
    """What accumulates from step 1 on and travels in the checkpoint."""

    tokens: int = 0
    skipped_steps: int = 0
    cut_documents: int = 0


@dataclass
class Outcome:
    """How an invocation ended: the last completed step, why it stopped (None: it reached the end), the run folder."""

    step: int
    stopped_by: str | None
    folder: Path
    summary: dict = field(default_factory=dict)


def train(config: Config, console: Console) -> Outcome:
    """Train from the newest complete checkpoint, or from step 1, to `run.steps` (or `run.stop_at`).

    Raises:
        ConfigError: the configuration, the data or the run folder cannot be used.
        NonFiniteLoss: a loss or a gradient was not finite, and `run.nonfinite=stop`; no checkpoint was touched.
    """
    with StopRequest() as stop, RunFolder(config) as folder:
        if folder.checkpoint and load_state(folder.checkpoint)["step"] == config.run.steps and folder.summary.exists():
            summary = read_json(folder.summary)
            print_outcome(console, config, folder.path, summary, "already finished")
            return Outcome(config.run.steps, None, folder.path, summary)
        return Trainer(config, folder, stop, console).run()


def open_loaders(config: Config) -> tuple[PackedLoader, PackedLoader | None]:
    """The train split and, unless `data.eval_fraction` is 0, the held-out one; a finite corpus is read once."""
    vocab, seed = config.model.vocab_size, config.run.seed
    train = PackedLoader(config.data, vocab, seed, split="train")
    if config.data.eval_fraction == 0:
        return train, None
    shared = train.source if train.source.size is not None else None
    return train, PackedLoader(config.data, vocab, seed, split="eval", source=shared)


class Trainer:
    """The parts of a run, built or restored, and the loop over them."""

    def __init__(self, config: Config, folder: RunFolder, stop: StopRequest, console: Console):
        self.config, self.folder, self.stop, self.console = config, folder, stop, console
        self.device = pick_device(config.run.device)
        for notice in folder.notices:
            console.print(notice, highlight=False, markup=False)
        self.loader, self.held_out = open_loaders(config)
        self.model = Decoder(config.model, seed=config.run.seed).to(self.device)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.counters, self.step = Counters(), 0
        if folder.checkpoint:
            self._restore(folder.checkpoint)
        folder.record_start()
        self.metrics = MetricsFile(folder.metrics, resume_step=self.step)
        self.tracker = Tracker(config.wandb, folder.path, folder.path.name, to_plain(config), self.metrics.history)

    def _restore(self, checkpoint: Path) -> None:
        state = load_state(checkpoint)
        load_checkpoint(checkpoint, self.model, self.optimizer)
        self.loader.load_state_dict(state["loader"])
        self.counters, self.step = Counters(**state["counters"]), state["step"]

    def run(self) -> Outcome:
        """Loop until the horizon, `run.stop_at` or a signal; save; print the table."""
        run = self.config.run
        last = run.stop_at or run.steps
        if last < self.step:
            raise ConfigError(
                f"run.stop_at={last} lies before the checkpoint's step {self.step}; raise it, or leave it out."
            )
        self._print_start(last)
        saved = self.step
        failed = True
        try:
            with ProgressReport(self.console, self.step, last, run.log_every) as progress:
                while self.step < last and self.stop.reason is None:
                    row = self._one_step()
                    progress.step(self.step, row)
                    if run.save_every and self.step % run.save_every == 0:
                        saved = self._save()
            if saved != self.step:
                self._save()
            failed = False
        finally:
            self.metrics.close()
            self.tracker.finish(exit_code=int(failed))
        return self._finish(last)

    def _one_step(self) -> dict:
        began = time.perf_counter()
        step = self.step + 1
        batch = self.loader.batch(self.step)
        lr = learning_rate(self.config.optim, step, self.config.run.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        found = forward_backward(self.model, batch, self.config.run.accumulate, self.config.run.precision)
        norm = float(gradient_norm(self.model, self.config.optim.clip_norm))
        if math.isfinite(found.loss) and math.isfinite(norm):
            self.optimizer.step()
        else:
            self._refuse_step(step, batch, found, norm)
        self.optimizer.zero_grad(set_to_none=True)
        self.step = step
        self.counters.tokens += batch.label_tokens
        self.counters.cut_documents += batch.cut_documents
        values = {
            "train/loss": found.loss,
            "train/grad_norm": norm,
            "train/lr": lr,
            **self._measures(batch, time.perf_counter() - began),
        }
        values |= self._evaluation()
        row = self.metrics.write(step, values)
        self.tracker.log(row)
        return row

    def _refuse_step(self, step: int, batch: PackedBatch, found: StepLoss, norm: float) -> None:
        names = list(dict.fromkeys(found.bad_documents or [d.name for d in batch.documents]))
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        what = f"loss {found.loss}" if not math.isfinite(found.loss) else f"gradient norm {norm}"
        message = f"step {step}: {what} is not finite; documents: {shown}"
        if self.config.run.nonfinite is NonFinite.stop:
            raise NonFiniteLoss(f"{message}. Lower optim.lr, or skip such steps with run.nonfinite=skip.")
        self.counters.skipped_steps += 1
        self.console.print(f"{message}; skipped", highlight=False, markup=False)

    def _measures(self, batch: PackedBatch, seconds: float) -> dict[str, float | int | None]:
        windows = self.config.model.layer_windows()
        pairs = {w: batch.layout.pairs(causal=True, window=w) for w in set(windows)}
        slots = batch.tokens.numel()
        tokens = slots - batch.padding_tokens
        tflops = flops_per_step(self.config.model, tokens, pairs) / seconds / 1e12
        peak = peak_tflops(self.device)
        full = batch.rows * batch.seq_len * (batch.seq_len + 1) / 2
        return {
            "train/tokens": self.counters.tokens,
            "train/skipped_steps": self.counters.skipped_steps,
            "perf/step_s": seconds,
            "perf/tokens_per_s": tokens / seconds,
            "perf/model_tflops": tflops,
            **({"perf/mfu": tflops / peak} if peak else {}),
            "mem/peak_bytes": peak_memory_bytes(self.device),
            "data/docs_per_row": batch.num_documents / batch.rows,
            "data/padding": batch.padding_tokens / slots,
            "data/cut_documents": self.counters.cut_documents,
            "data/epoch": self.loader.epoch,
            "data/mask_density": batch.layout.pairs(causal=True) / full,
        }

    def _evaluation(self) -> dict[str, float | None]:
        run = self.config.run
        if self.held_out is None or (
            self.step != run.steps and not (run.eval_every and self.step % run.eval_every == 0)
        ):
            return {}
        # a signal ends an evaluation in mid-run; the last one, which the summary needs, only a second signal
        stop = (lambda: self.stop.reason is not None) if self.step != run.steps else (lambda: False)
        result = evaluate(self.model, self.held_out, run.precision, stop)
        if result is None:
            return {}
        values: dict[str, float | None] = {"eval/loss": result.loss}
        if result.bits_per_byte is not None:
            values["eval/bits_per_byte"] = result.bits_per_byte
        return values

    def _save(self) -> int:
        state = {
            "config": to_plain(self.config),
            "loader": self.loader.state_dict(),
            "counters": asdict(self.counters),
        }
        save_checkpoint(self.folder.checkpoints, self.step, self.model, self.optimizer, state, self.config.run.keep)
        return self.step

    def _print_start(self, last: int) -> None:
        count = parameter_count(self.config.model)
        where = f"resuming after step {self.step}" if self.step else "starting"
        documents = self.loader.source.size
        corpus = "documents without end" if documents is None else f"{documents:,} documents"
        self.console.print(
            f"{where}: {count.total:,} parameters on {self.device}, {self.config.data.rows} rows of "
            f"{self.config.data.seq_len:,} tokens a step, {corpus}, to step {last}; {self.folder.path}",
            highlight=False,
            markup=False,
        )

    def _finish(self, last: int) -> Outcome:
        path, total = self.folder.path, self.config.run.steps
        if self.step < total:
            reason = self.stop.reason or f"run.stop_at={last}"
            saved = f"saved in {path}; the same command goes on from there" if self.step else "before the first step"
            self.console.print(
                f"stopped by {reason} after step {self.step} of {total}, {saved}.",
                highlight=False,
                markup=False,
            )
            return Outcome(self.step, self.stop.reason or "stop_at", path)
        summary = self._summary()
        write_json(self.folder.summary, summary)
        print_outcome(self.console, self.config, path, summary, "finished")
        return Outcome(self.step, None, path, summary)

    def _summary(self) -> dict:
        rows = [json.loads(line) for line in self.folder.metrics.read_text().splitlines()]
        bigram = None
        if self.held_out is not None and "eval/bits_per_byte" in rows[-1]:
            few = {} if self.loader.source.size is not None else {"max_tokens": 1 << 20}  # drawing documents takes time
            bigram = bigram_bits_per_byte(self.loader, self.held_out, **few)
        return {
            "step": self.step,
            "train_loss": rows[-1]["train/loss"],
            "eval_loss": rows[-1].get("eval/loss"),
            "eval_bits_per_byte": rows[-1].get("eval/bits_per_byte"),
            "bigram_bits_per_byte": bigram,
            "tokens_per_s": statistics.median(row["perf/tokens_per_s"] for row in rows),
            "tokens": rows[-1]["train/tokens"],
            "skipped_steps": rows[-1]["train/skipped_steps"],
        }


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
