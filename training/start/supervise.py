"""Ranks started on this machine, watched to the end: none outlives another's failure, or this process.

A rank that fails ends the job: its peers get GRACE seconds to end by themselves, those that still stand print where and
are killed, and the error raised names the rank that failed first, not the ones that noticed.
"""

import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from training.config import Config
from training.outcome import Outcome, RankFailed
from training.place import Place

ROOT = Path(__file__).resolve().parents[__name__.count(".")]  # what this package's first name lies in
WORKER = (
    f"import importlib, sys; sys.path.insert(0, {str(ROOT)!r}); "
    f"importlib.import_module({f'{__package__}.worker'!r}).main()"
)
GRACE = 5.0  # seconds
STACK = 0.5  # seconds for a hanging rank to print its stack


class Refused(ValueError):
    """What every rank refused alike, in its words."""


@dataclass
class _Child:
    """A rank's process, and what is known of its end."""

    rank: int
    process: subprocess.Popen[bytes]
    message: dict | None = None  # its last word; None where it left without one
    code: int | None = None
    killed: bool = False  # by us
    readers: list[threading.Thread] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return self.code is not None and not (self.message and self.message["done"])


def run_local_ranks(config: Config, ranks: int, environment: Mapping[str, str], worker: str = WORKER) -> Outcome:
    """Train on `ranks` processes here; rank 0 writes to this terminal, the others with their number in front.

    Signals are passed on: the first asks all ranks to stop after the step, a second interrupts.

    Raises:
        Refused: all ranks refused for the same reason.
        RankFailed: a rank failed; its own traceback is on stderr.
        KeyboardInterrupt: interrupted.
    """
    with tempfile.TemporaryDirectory(prefix="longfold-") as folder, _Crew(environment, worker) as crew:
        address = f"file://{folder}/meet"
        for rank in range(ranks):
            crew.start((config, Place(rank, ranks, rank, address), sys.argv), rank)
        crew.watch()
        return crew.outcome(config)


class _Crew:
    """The children of a job; leaving the context kills those that are left."""

    def __init__(self, environment: Mapping[str, str], worker: str) -> None:
        self.environment, self.worker = dict(environment), worker
        self.children: list[_Child] = []
        self.order: list[_Child] = []  # as they ended
        self.ends: queue.Queue[_Child] = queue.Queue()
        self.signals: list[int] = []
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "_Crew":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *exc: object) -> None:
        self._kill(self.children)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        for child in self.children:
            if child.code is None:
                child.process.send_signal(number)

    def start(self, orders: tuple, rank: int) -> None:
        """Start a rank in a session of its own: a Ctrl-C reaches it through us, once."""
        receive, send = os.pipe()
        piped = None if rank == 0 else subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", self.worker, str(send)],
            stdin=subprocess.PIPE,
            stdout=piped,
            stderr=piped,
            pass_fds=(send,),
            env=self.environment,
            start_new_session=True,
        )
        os.close(send)
        child = _Child(rank, process)
        self.children.append(child)
        assert process.stdin is not None
        try:
            process.stdin.write(pickle.dumps(orders))
            process.stdin.flush()  # and stays open: its end tells the rank that we are gone
        except BrokenPipeError:
            pass  # it is dead already, as its exit will say
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source is not None:
                reader = threading.Thread(target=_prefix, args=(source, target, f"[rank {rank}] "), daemon=True)
                reader.start()
                child.readers.append(reader)
        threading.Thread(target=self._await, args=(child, receive), daemon=True).start()

    def _await(self, child: _Child, receive: int) -> None:
        with os.fdopen(receive) as pipe:
            text = pipe.read()
        code = child.process.wait()
        for reader in child.readers:
            reader.join(timeout=1.0)
        try:
            child.message = json.loads(text)
        except ValueError:
            child.message = None
        child.code = code
        self.ends.put(child)

    def watch(self) -> None:
        """Until all have ended; from the first failure on, for GRACE more seconds."""
        left, deadline = len(self.children), None
        while left:
            try:
                # short waits: a signal handler runs only between two of them
                child = self.ends.get(timeout=0.2)
            except queue.Empty:
                if deadline is not None and time.monotonic() > deadline:
                    self._stop_the_rest()
                    deadline = float("inf")
                continue
            left -= 1
            self.order.append(child)
            if child.failed and deadline is None:
                deadline = time.monotonic() + GRACE

    def _stop_the_rest(self) -> None:
        standing = [child for child in self.children if child.code is None]
        for child in standing:
            child.killed = True
            child.process.send_signal(signal.SIGUSR1)
        time.sleep(STACK)
        self._kill(standing)

    def _kill(self, children: Sequence[_Child]) -> None:
        for child in children:
            if child.process.poll() is None:
                child.process.kill()
        for child in children:
            child.process.wait()

    def outcome(self, config: Config) -> Outcome:
        """Rank 0's outcome, or the failure that ended the job."""
        failed = [child for child in self.children if child.failed]
        if not failed:
            said = self.children[0].message
            assert said is not None
            return Outcome(said["step"], said["stopped_by"], Path(said["folder"]))
        if self.signals and all(_interrupted(child) for child in failed):
            raise KeyboardInterrupt
        own = [c.message for c in failed if c.message and not c.message["peer"]]
        texts = {message["text"] for message in own}
        if len(own) == len(self.children) and len(texts) == 1 and all(message["refusal"] for message in own):
            raise Refused(texts.pop())
        raise RankFailed(_describe([c for c in self.order if c.failed], len(self.children), config.run.timeout_s))


def _describe(failed: list[_Child], count: int, timeout_s: int) -> str:
    """What happened, in a sentence, the cause before its consequences; prints the tracebacks of ranks that raised."""
    causes = [c for c in failed if not c.killed and not (c.message and c.message["peer"])]
    silent = ", ".join(str(child.rank) for child in failed if child.killed)
    shown = causes or ([] if silent else failed[:1])
    for child in shown:
        if child.message:
            print(f"[rank {child.rank}] {child.message['traceback']}", file=sys.stderr, flush=True)
    if shown and shown[0].message:
        message = shown[0].message
        what = f"rank {shown[0].rank} of {count} failed: {message['kind']}: {message['text']}"
    elif shown:
        what = f"rank {shown[0].rank} of {count} {_end(shown[0].code)}"
    else:
        what = f"rank {silent} of {count} did not answer within run.timeout_s={timeout_s} s (its stack may be above)"
    return f"{what}. The same command goes on from the last complete checkpoint, if one was saved, or starts anew."


def _interrupted(child: _Child) -> bool:
    return child.message is None or child.message["peer"] or child.message["kind"] == "KeyboardInterrupt"


def _end(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"left early with exit code {code}"


def _prefix(source: IO[bytes], target: IO[str], prefix: str) -> None:
    for line in source:
        target.write(prefix + line.decode(errors="replace"))
        target.flush()
