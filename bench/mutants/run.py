"""Tries mutants: a changed file in a copy of the tree, the tests that answer for it, and whether they noticed.

Tests run in processes forked from one that has loaded torch and pytest, so that a mutant costs its tests and no more.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.context
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from queue import Queue
from threading import Lock

from bench.mutants.operators import Mutant

PRELOADED = ["numpy", "torch", "pytest", "hypothesis", "hypothesis.strategies", "jaxtyping", "beartype", "safetensors"]
PATIENCE, AT_LEAST_S = 5.0, 30.0  # a mutant that takes this many times as long as its tests do is killed
QUIET = ("-q", "-x", "-n0", "-p", "no:cacheprovider", "-m", "not deep", "--hypothesis-seed=0")


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: killed, timeout (as good as killed), or survived; `by` is the first test that failed."""

    mutant: Mutant
    result: str
    seconds: float
    by: str


class Tree:
    """Copies of a repository in which mutants are tried, one for each job.

    Args:
        root: the repository; what git tracks or would track is copied, and it is never written to.
    """

    def __init__(self, root: Path, jobs: int) -> None:
        self.root, self.jobs = root, jobs
        self.copies: Queue[Path] = Queue()
        self.baselines: dict[tuple[str, ...], float] = {}
        self.lock = Lock()
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)

    def __enter__(self) -> Tree:
        self.folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        listed = subprocess.run(
            ["git", "ls-files", "-coz", "--exclude-standard"], cwd=self.root, capture_output=True, check=True
        )
        for job in range(self.jobs):
            copy = self.folder / str(job)
            for name in listed.stdout.decode().split("\0"):
                source = self.root / name
                if name and source.is_file() and not source.is_symlink():
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(source, copy / name)
            self.copies.put(copy)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def baseline(self, tests: tuple[str, ...], copy: Path) -> float:
        """Seconds that the tests take where nothing is changed. RuntimeError where they fail."""
        with self.lock:
            if tests not in self.baselines:
                result, seconds, by = _test(self.context, copy, tests, 3600)
                if result != "survived":
                    raise RuntimeError(f"the tests fail before anything is changed: {by or ' '.join(tests)}")
                self.baselines[tests] = seconds
            return self.baselines[tests]

    def attempt(self, mutant: Mutant, tests: tuple[str, ...]) -> Verdict:
        """Try one mutant."""
        copy = self.copies.get()
        try:
            limit = max(AT_LEAST_S, PATIENCE * self.baseline(tests, copy))
            target = copy / mutant.path
            as_it_was = target.read_text()
            target.write_text(mutant.source)
            try:
                return Verdict(mutant, *_test(self.context, copy, tests, limit))
            finally:
                target.write_text(as_it_was)
        finally:
            self.copies.put(copy)

    def attempt_all(self, tasks: Sequence[tuple[Mutant, tuple[str, ...]]]) -> Iterator[Verdict]:
        """Outcomes in the order of the tasks, as they come."""
        with ThreadPoolExecutor(self.jobs) as pool:
            yield from pool.map(lambda task: self.attempt(*task), tasks)


def _test(context: BaseContext, copy: Path, tests: tuple[str, ...], limit: float) -> tuple[str, float, str]:
    """(result, seconds, first failure) of the tests in a copy."""
    mine, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_pytest, args=(str(copy), tests, theirs))  # pyright: ignore[reportAttributeAccessIssue]
    began = time.monotonic()
    child.start()
    theirs.close()
    child.join(limit)
    seconds = time.monotonic() - began
    late = child.is_alive()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # what the tests started goes with them
    child.join()
    by = ""
    with contextlib.suppress(EOFError):
        by = mine.recv() if mine.poll() else ""
    mine.close()
    if late:
        return "timeout", seconds, by
    return ("survived" if child.exitcode == 0 else "killed"), seconds, by


class _First:
    """Tells which test failed first."""

    def __init__(self, to: Connection) -> None:
        self.to = to

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.to.send(report.nodeid)


def _pytest(copy: str, tests: tuple[str, ...], to: Connection) -> None:
    """In a process of its own: run the tests of `copy`; exits 0 where all pass."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.chdir(copy)
    ours = str(Path(__file__).resolve().parents[2])
    sys.path[:] = [copy, *(p for p in sys.path if p and Path(p).resolve() != Path(ours))]
    sys.dont_write_bytecode = True
    for name in [n for n in sys.modules if n.split(".")[0] == "bench"]:
        del sys.modules[name]
    import pytest

    present = [test for test in tests if Path(copy, test.split("::")[0]).exists()]
    sys.exit(int(pytest.main([*QUIET, f"--rootdir={copy}", *present], plugins=[_First(to)])))
