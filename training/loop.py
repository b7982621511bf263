"""The training loop, the same on every rank: steps, evaluations, checkpoints, and an orderly end."""

import contextlib
import dataclasses
import json
import math
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals

from rich.console import Console
from torch import Tensor

from data.batch import PackedBatch
from data.bigram import bigram_bits_per_byte
from data.loader import PackedLoader
from models.decoder import Decoder
from models.flops import flops_per_step, parameter_count
from models.hf.weights import read_weights
from models.initialise import Distribute, initialise
from training.config import Config, ConfigError, NonFinite, to_plain
from training.interrupt import StopRequest
from training.optim.build import build_optimizer, gradient_norm, set_rates
from training.outcome import Outcome, print_outcome
from training.record.checkpoint import load_checkpoint, load_state, snapshot, write_checkpoint
from training.record.folder import RunFolder, read_json, shared_folder, write_json
from training.record.hardware import peak_memory_bytes, peak_tflops
from training.record.metrics import BATCH_METRICS, MetricsFile
from training.record.progress import ProgressReport, counting
from training.record.tracking import Tracker, tag
from training.share import Share
from training.step import NonFiniteLoss, evaluate, forward_backward
from training.team import Team


@dataclass
class Counters:
    """What accumulates from step 1 on and travels in the checkpoint."""

    tokens: int = 0
    skipped_steps: int = 0
    cut_documents: int = 0
    source_tokens: dict[str, int] = field(default_factory=dict)  # by the source's label


def train(config: Config, console: Console, team: Team | None = None) -> Outcome:
    """Train from the newest complete checkpoint, or from step 1, to `run.steps` (or `run.stop_at`).

    Every rank of `team` (one process by default) calls this; rank 0 alone prints, writes and owns the run folder.

    Raises:
        ConfigError: the configuration, the data or the run folder cannot be used; on every rank.
        NonFiniteLoss: a loss or a gradient was not finite, and `run.nonfinite=stop`; no checkpoint was touched.
    """
    team = team or Team(config)
    with StopRequest() as stop, contextlib.ExitStack() as held:
        with team.patience():
            folder = held.enter_context(shared_folder(config, team))
            finished = team.first_decides(lambda: _finished(config, folder))
            trainer = None if finished else Trainer(config, folder, stop, console, team)
        if trainer:
            return trainer.run()
        print_outcome(console, config, folder.path, finished or {}, "already finished")
        return Outcome(config.run.steps, None, folder.path, finished or {})


def _finished(config: Config, folder: RunFolder) -> dict | None:
    """The summary of a run that has reached its last step."""
    at_end = folder.checkpoint and load_state(folder.checkpoint)["step"] == config.run.steps
    return read_json(folder.summary) if at_end and folder.summary.exists() else None


def open_loaders(config: Config) -> tuple[PackedLoader, PackedLoader | None]:
    """The train split and, unless `data.eval_fraction` is 0, the held-out one; a finite corpus is read once."""
    vocab, seed = config.model.vocab_size, config.run.seed
    train = PackedLoader(config.data, vocab, seed, split="train", prefix=config.model.prefix)
    if config.data.eval_fraction == 0:
        return train, None
    return train, PackedLoader(config.data, vocab, seed, "eval", train.source, config.model.prefix)


class Trainer:
    """The parts of a run, built or restored, and the loop over them."""

    def __init__(self, config: Config, folder: RunFolder, stop: StopRequest, console: Console, team: Team):
        self.config, self.folder, self.stop, self.console, self.team = config, folder, stop, console, team
        self.device = team.device
        for notice in folder.notices:
            console.print(notice, highlight=False, markup=False)
        self.loader, self.held_out = team.together(lambda: open_loaders(config))
        self.model = Decoder(config.model, device="meta")
        self.share = Share(self.model, team, config.strategy, self._fill)
        self.optimizer = build_optimizer(self.model, config.optim, config.run.precision)
        self.counters, self.step = Counters(), 0
        self._compiled = not config.model.compile  # whether the graphs of a step are there
        self._upcoming: PackedBatch | None = None
        self._loader_state: dict | None = None
        self.stopped_by: str | None = None  # the signal that all ranks agreed to stop at
        if folder.checkpoint:
            checkpoint = folder.checkpoint
            team.together(lambda: self._restore(checkpoint))
        self.metrics: MetricsFile | None = None  # rank 0's, as the tracker is
        self.tracker: Tracker | None = None
        team.first_decides(self._open_records)

    def _fill(self, model: Decoder, place: Distribute) -> None:
        """First weights, the same on every rank: a checkpoint's where the run starts from one, else random ones."""
        config = self.config
        if config.model.path is None or self.folder.checkpoint:
            return initialise(model, config.model, config.run.seed, place)
        return read_weights(model, Path(config.model.path), place)

    def _open_records(self) -> None:
        self.folder.record_start(self.team.world)
        self.metrics = MetricsFile(self.folder.metrics, resume_step=self.step)
        if lost := self.metrics.lost:
            self.console.print(
                f"{self.folder.metrics} has no line for {len(lost)} of the {self.step} steps up to the checkpoint (the "
                f"first is step {lost[0]}): they were lost, and the run goes on without them",
                highlight=False,
                markup=False,
            )
        config, path = self.config, self.folder.path
        wandb = dataclasses.replace(config.wandb, tags=[*(config.wandb.tags or []), tag(config.strategy.label)])
        self.tracker = Tracker(wandb, path, path.name, to_plain(config), self.metrics.history)

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
        self._signalled()
        saved = self.step
        failed = True
        try:
            with ProgressReport(self.console, self.step, last, run.log_every) as progress:
                while self.step < last and self.stopped_by is None:
                    progress.step(self.step + 1, self._one_step())
                    if run.save_every and self.step % run.save_every == 0:
                        saved = self._save()
            if saved != self.step:
                self._save()
            failed = False
        finally:
            if self.metrics and self.tracker:
                self.metrics.close()
                self.tracker.finish(exit_code=int(failed))
        return self._finish(last)

    def _one_step(self) -> dict:
        began = time.perf_counter()
        step = self.step + 1
        batch = self._next_batch()
        run = self.config.run
        lr = set_rates(self.optimizer, self.config.optim, step, run.steps)
        # the first step compiles its graphs, for which ranks take their own time
        with contextlib.nullcontext() if self._compiled else self.team.patience():
            found = forward_backward(self.model, batch, run.accumulate, run.precision, self.share)
            figures = self.share.take_figures()
            mine = [found.loss, self.stop.number, peak_memory_bytes(self.device), *figures.values()]
            losses, signals, peaks, work, exposed, *sent = self.team.gather(mine).T
        self._compiled = True
        loss = float(losses.sum())
        self._note_stop(signals)
        norm = float(gradient_norm(self.model, self.config.optim.clip_norm))
        if math.isfinite(loss) and math.isfinite(norm):
            self.optimizer.step()
        else:
            self._refuse_step(step, batch, loss, norm, found.bad_documents)
        self.optimizer.zero_grad(set_to_none=True)
        self.step = step
        self.counters.tokens += batch.label_tokens
        self.counters.cut_documents += batch.cut_documents
        for source, count in batch.source_tokens().items():
            self.counters.source_tokens[source] = self.counters.source_tokens.get(source, 0) + count
        values = {
            "train/loss": loss,
            "train/grad_norm": norm,
            "train/lr": lr,
            "mem/peak_bytes": int(peaks.max()),
            "plan/imbalance": float(work.max() / work.mean()) if work.any() else 1.0,
            **self.share.choice(),
            "plan/exposed_s": float(exposed.max()),
            **{name: int(sizes.sum()) for name, sizes in zip(list(figures)[2:], sent)},
            **self._measures(batch, time.perf_counter() - began),
        }
        values |= self._evaluation()
        if self.metrics and self.tracker:
            self.tracker.log(self.metrics.write(step, values))
        return values

    def _next_batch(self) -> PackedBatch:
        """The step's batch. Where exchanges are planned, the one after it is drawn as well, and planned meanwhile."""
        batch = self._upcoming if self._upcoming else self.loader.batch(self.step)
        self._loader_state = self.loader.state_dict()  # where the stream stands after this step
        self._upcoming = None
        if self.share.context and self.step + 1 < self.config.run.steps:
            self._upcoming = self.loader.batch(self.step + 1)
            self.share.prepare(self._upcoming, self.config.run.accumulate, self.config.run.precision)
        return batch

    def _signalled(self) -> bool:
        """Whether any rank has had a signal; asked of all ranks at once, so that all stop after the same step."""
        self._note_stop(self.team.gather([self.stop.number]))
        return self.stopped_by is not None

    def _note_stop(self, numbers: Tensor) -> None:
        if self.stopped_by is None and numbers.any():
            self.stopped_by = Signals(int(numbers.max())).name

    def _refuse_step(self, step: int, batch: PackedBatch, loss: float, norm: float, bad: list[str]) -> None:
        """All ranks come here at the same step, as the loss and the norm are the same on all."""
        named = [name for names in self.team.gather_objects(bad) for name in names]
        names = list(dict.fromkeys(named or [d.name for d in batch.documents]))
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
        message = f"step {step}: {what} is not finite; documents: {shown}"
        if self.config.run.nonfinite is NonFinite.stop:
            raise NonFiniteLoss(f"{message}. Lower optim.lr, or skip such steps with run.nonfinite=skip.")
        self.counters.skipped_steps += 1
        self.console.print(f"{message}; skipped", highlight=False, markup=False)

    def _measures(self, batch: PackedBatch, seconds: float) -> dict[str, float | int | None]:
        pairs = {mask: batch.layout.pairs(mask) for mask in set(self.config.model.layer_masks())}
        slots = batch.tokens.numel()
        tokens = slots - batch.padding_tokens
        tflops = flops_per_step(self.config.model, tokens, pairs) / seconds / 1e12
        peak = peak_tflops(self.device)  # of one device
        full = batch.rows * batch.seq_len * (batch.seq_len + 1) / 2
        epochs = self._loader_state["epochs"] if self._loader_state else self.loader.epochs
        return {
            "train/tokens": self.counters.tokens,
            "train/skipped_steps": self.counters.skipped_steps,
            "perf/step_s": seconds,
            "perf/tokens_per_s": tokens / seconds,
            "perf/model_tflops": tflops,
            **({"perf/mfu": tflops / (peak * self.team.world)} if peak else {}),
            **{name: measure(batch) for name, measure in BATCH_METRICS.items()},
            "data/cut_documents": self.counters.cut_documents,
            "data/epoch": min(epochs.values()),
            **({f"data/epoch/{source}": done for source, done in epochs.items()} if len(epochs) > 1 else {}),
            **{f"data/tokens/{source}": count for source, count in self.counters.source_tokens.items()},
            "data/mask_density": batch.layout.pairs() / full,
        }

    def _evaluation(self) -> dict[str, float | None]:
        run = self.config.run
        if self.held_out is None or (
            self.step != run.steps and not (run.eval_every and self.step % run.eval_every == 0)
        ):
            return {}
        # a signal ends an evaluation in mid-run; the last one, which the summary needs, only a second signal
        stop = self._signalled if self.step != run.steps else lambda: False
        with self.team.patience():
            result = evaluate(self.model, self.held_out, run.precision, stop, self.share)
        self.share.take_figures()  # a step's figures leave the evaluation's out
        if result is None:
            return {}
        values: dict[str, float | None] = {"eval/loss": result.loss}
        if result.bits_per_byte is not None:
            values["eval/bits_per_byte"] = result.bits_per_byte
        return values

    def _save(self) -> int:
        state = {
            "config": to_plain(self.config),
            "loader": self._loader_state or self.loader.state_dict(),
            "counters": dataclasses.asdict(self.counters),
        }
        folder, keep = self.folder.checkpoints, self.config.run.keep
        with self.team.patience():
            tensors = snapshot(self.model, self.optimizer, keep=self.team.first)
            self.team.first_decides(lambda: write_checkpoint(folder, self.step, tensors, state, keep))
        return self.step

    def _print_start(self, last: int) -> None:
        count = parameter_count(self.config.model)
        source = f"starting from {self.config.model.path}" if self.config.model.path else "starting"
        where = f"resuming after step {self.step}" if self.step else source
        ranks = f"{self.team.world} x " if self.team.world > 1 else ""
        mesh, config = self.team.mesh, self.config
        rows = config.data.rows // (mesh.dp * config.run.accumulate)
        how = f" ({config.strategy.describe(mesh, rows)})" if self.team.world > 1 else ""
        corpus = self.loader.describe()
        self.console.print(
            f"{where}: {count.total:,} parameters on {ranks}{self.device}{how}, {self.config.data.rows} rows of "
            f"{self.config.data.seq_len:,} tokens a step, {corpus}, to step {last}; {self.folder.path}",
            highlight=False,
            markup=False,
        )

    def _finish(self, last: int) -> Outcome:
        path, total = self.folder.path, self.config.run.steps
        if self.step < total:
            reason = self.stopped_by or f"run.stop_at={last}"
            saved = f"saved in {path}; the same command goes on from there" if self.step else "before the first step"
            self.console.print(
                f"stopped by {reason} after step {self.step} of {total}, {saved}.",
                highlight=False,
                markup=False,
            )
            return Outcome(self.step, self.stopped_by or "stop_at", path)
        if not self.team.first:
            return Outcome(self.step, None, path)
        summary = self._summary()
        write_json(self.folder.summary, summary)
        print_outcome(self.console, self.config, path, summary, "finished")
        return Outcome(self.step, None, path, summary)

    def _summary(self) -> dict:
        rows = [json.loads(line) for line in self.folder.metrics.read_text().splitlines()]
        bigram = None
        if self.held_out is not None and "eval/bits_per_byte" in rows[-1]:
            few = {} if self.loader.source.size is not None else {"max_tokens": 1 << 20}  # drawing documents takes time
            with counting(self.console, "counting a bigram table") as counted:
                bigram = bigram_bits_per_byte(self.loader, self.held_out, counted=counted, **few)
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
