"""Weights & Biases, from rank 0 only. Offline when there is no key; a resumed run keeps its id and loses no step."""

import json
import secrets
from pathlib import Path
from typing import Any

from training.config import ConfigError, WandbConfig, WandbMode
from training.record.folder import read_json

LONGEST_TAG = 64


class Tracker:
    """A W&B run under `folder/wandb`, or nothing at all when the mode is disabled.

    An offline run that resumes starts a second folder at step 0, and syncing both would lose the first's steps. So a
    resumed run replays every step that W&B does not hold yet, from the run's own history, and older offline folders of
    the same id are renamed: the newest one holds everything.

    Args:
        history: rows of metrics.jsonl up to the step where the run resumes.
    """

    def __init__(self, config: WandbConfig, folder: Path, name: str, settings: dict[str, Any], history: list[dict]):
        self._run = None
        self.mode = _mode(config)
        if self.mode == "disabled":
            return
        import wandb  # half a second, of which ranks and runs that do not track are spared

        run_id = _run_id(folder)
        for old in (folder / "wandb").glob(f"offline-run-*-{run_id}"):
            _supersede(old)
        try:
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                group=config.group,
                tags=config.tags,
                id=run_id,
                name=name,
                resume="allow",
                dir=str(folder),
                config=settings,
                mode="online" if self.mode == "online" else "offline",
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise ConfigError(f"W&B did not start ({error}); use wandb.mode=offline or wandb.mode=disabled.") from error
        # our step is the axis: W&B's own counter drops what comes back at a lower step
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        held = self._run.summary.get("step", 0) if self._run.resumed else 0
        for row in history:
            if row["step"] > held:
                self._run.log(row)

    def log(self, row: dict[str, Any]) -> None:
        """Send one step's row, `step` included."""
        if self._run is not None:
            self._run.log(row)

    def finish(self, exit_code: int = 0) -> None:
        """Flush; the run is marked failed when `exit_code` is not 0."""
        if self._run is not None:
            self._run.finish(exit_code=exit_code)


def tag(text: str) -> str:
    """`text` as a tag: W&B takes 64 characters."""
    return text if len(text) <= LONGEST_TAG else f"{text[: LONGEST_TAG - 3]}..."


def _supersede(old: Path) -> None:
    """Rename; W&B names folders by the second, so two of one second may need two names."""
    target, number = old.with_name(f"superseded-{old.name}"), 2
    while target.exists():
        target, number = old.with_name(f"superseded-{number}-{old.name}"), number + 1
    old.rename(target)


def _mode(config: WandbConfig) -> str:
    if config.mode is not WandbMode.auto:
        return config.mode.value
    import wandb

    return "online" if wandb.login(prompt=False) else "offline"


def _run_id(folder: Path) -> str:
    path = folder / "wandb_id.json"
    if path.exists():
        return read_json(path)["id"]
    run_id = secrets.token_hex(4)
    path.write_text(json.dumps({"id": run_id}))
    return run_id
