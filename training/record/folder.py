"""A run's folder: where it lies, who may write there, and what it may be resumed with."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from training.config import Config, ConfigError, Resume, config_hash, differences, to_plain
from training.record.checkpoint import complete_checkpoints, is_intact, load_state
from training.record.provenance import provenance
from training.team import Team


class RunFolder:
    """`<dir>` with config.json, provenance.json, metrics.jsonl and checkpoints/, held by one process at a time.

    A context manager: the lock is released at the end. Of several ranks the first alone holds it, see `shared_folder`.

    Raises:
        ConfigError: another process trains there; what lies there is of another configuration; `run.resume=must` and
            there is no complete checkpoint.
    """

    def __init__(self, config: Config):
        self.config = config
        self.path = Path(config.run.dir or Path("runs") / f"{config.run.name}-{config_hash(config)}").absolute()
        self.checkpoint: Path | None = None  # the newest complete one, to resume from
        self.notices: list[str] = []  # what the user must know about the state in which the folder was found

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def __enter__(self) -> "RunFolder":
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise ConfigError(
                f"run.dir={self.path} cannot be written ({error.strerror or error}); give another run.dir."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(
                f"another process is training in {self.path}; wait for it, or give this run its own run.dir."
            ) from None
        try:
            self.checkpoint = self._find_checkpoint()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        self._lock.close()
        if [p.name for p in self.path.iterdir()] == [".lock"]:  # a run that was refused leaves no empty folder behind
            (self.path / ".lock").unlink()
            self.path.rmdir()

    def _find_checkpoint(self) -> Path | None:
        if self.config.run.resume is Resume.never:
            self._set_aside()
            return None
        found = complete_checkpoints(self.checkpoints)
        while found and not is_intact(found[-1]):
            self.notices.append(f"{found.pop()} is damaged (a checksum differs); it is passed over")
        if not found:
            if self.config.run.resume is Resume.must:
                raise ConfigError(
                    f"run.resume=must, and {self.checkpoints} holds no complete checkpoint; run.resume=auto starts."
                )
            if any(self.checkpoints.glob("step_*")):
                aside = self._set_aside()
                self.notices.append(f"no complete checkpoint in {self.checkpoints}; what was there now lies in {aside}")
            return None
        newest = found[-1]
        changed = differences(load_state(newest)["config"], to_plain(self.config))
        if changed:
            kind = "another model" if any(line.startswith("model.") for line in changed) else "another configuration"
            raise ConfigError(
                f"{newest} is a checkpoint of {kind} ({'; '.join(changed[:6])}); give this run its own run.dir, or "
                f"run.resume=never to set the old run aside and start anew."
            )
        return newest

    def _set_aside(self) -> Path | None:
        """Move what an earlier run left to `<dir>/earlier-<n>`; nothing is deleted.

        Raises:
            ConfigError: the folder holds files, and they are no run's.
        """
        left = [p for p in self.path.iterdir() if p.name != ".lock" and not p.name.startswith("earlier-")]
        if left and not (self.path / "config.json").exists():
            raise ConfigError(f"{self.path} holds files that are no run's ({left[0].name}, ...); give another run.dir.")
        if left:
            number = 1
            while (aside := self.path / f"earlier-{number}").exists():
                number += 1
            aside.mkdir()
            for path in left:
                path.rename(aside / path.name)
            return aside
        return None

    def record_start(self, ranks: int) -> None:
        """Write config.json and provenance.json; earlier invocations' provenance is kept in the list."""
        write_json(self.path / "config.json", to_plain(self.config))
        path = self.path / "provenance.json"
        earlier = read_json(path) if path.exists() else []
        write_json(path, [*earlier, provenance(ranks)])


@contextlib.contextmanager
def shared_folder(config: Config, team: Team) -> Iterator[RunFolder]:
    """The run folder as rank 0 found and locked it, on every rank.

    Raises:
        ConfigError: what RunFolder refuses, or a rank that does not see rank 0's checkpoint; on every rank.
    """
    folder = RunFolder(config)
    with contextlib.ExitStack() as stack:

        def find() -> tuple[Path, Path | None]:
            stack.enter_context(folder)
            return folder.path, folder.checkpoint

        folder.path, folder.checkpoint = team.first_decides(find)
        team.together(lambda: _check_seen(folder))
        yield folder


def _check_seen(folder: RunFolder) -> None:
    if folder.checkpoint and not (folder.checkpoint / "state.json").exists():
        raise ConfigError(f"{folder.checkpoint} is not seen from every rank's machine; put run.dir on a shared disk.")


def read_json(path: Path) -> Any:
    """Read a file that `write_json` wrote. ConfigError, naming the file, if it is damaged."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); restore it, or move it away.") from error


def write_json(path: Path, value: object) -> None:
    """Write and rename, so that a kill never leaves half a file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(temporary, path)
