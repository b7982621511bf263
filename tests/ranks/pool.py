"""A pool of warm processes that become gloo ranks for a job and part again: starting them costs seconds, once a suite.

    def job(x):                                  # a module-level function, importable by its module's name
        dist.all_reduce(x)
        return x

    def test_sum(ranks):                         # the fixture of tests/conftest.py
        assert ranks.run(job, torch.ones(1), world=4)[0] == 4

Each job gets a process group of its own (the default group, over the loopback interface); nothing of it is left for the
next one. Where a rank fails the first failure's traceback is raised in the test, and the pool starts afresh.
"""

import contextlib
import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

START = 120.0  # seconds for a process to load torch
READY = b"ready"
TIMEOUT = 120.0  # seconds for a job
COLLECTIVE = 30  # seconds for a collective in it
GRACE = 2.0  # seconds that the other ranks get to say what they saw of a failure


class JobFailed(AssertionError):
    """A rank of a job raised, died or did not answer; the message holds its traceback."""


class RankPool:
    """Up to `size` processes, started when first needed. Jobs run one after the other."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._context = multiprocessing.get_context("spawn")
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, job: Callable[..., Any], *arguments: Any, world: int = 2, timeout: float = TIMEOUT) -> list[Any]:
        """`job(*arguments)` on ranks 0 to world - 1 of a fresh default group; their results, in order of ranks.

        Args:
            job: a module-level function; it, its arguments and its results must be picklable.
            timeout: seconds for the whole job.

        Raises:
            JobFailed: with the traceback of the rank that failed first.
            ValueError: more ranks than the pool holds.
        """
        if not 1 <= world <= self.size:
            raise ValueError(f"world={world}, and the pool holds {self.size} ranks; start a RankPool({world})")
        fresh = [self._start() for _ in range(world - len(self._ranks))]
        for connection in fresh:
            if not connection.poll(START) or connection.recv_bytes() != READY:
                self.close()
                raise JobFailed(f"a rank of the pool did not start within {START} s")
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world):
                orders = (rank, world, str(Path(folder) / "meet"), job, arguments)
                self._ranks[rank][1].send_bytes(pickle.dumps(orders))  # tensors by value, not as shared memory
            answers = self._collect(world, time.monotonic() + timeout)
        failed = [(when, rank, text) for rank, (good, text, when) in answers.items() if not good]
        missing = [rank for rank in range(world) if rank not in answers]
        if failed or missing:
            self.close()
            late = f"ranks {missing} did not answer within {timeout} s" if missing else ""
            first = "\n".join(f"rank {rank} of {world}:\n{text}" for _, rank, text in sorted(failed)[:1])
            raise JobFailed(f"{job.__name__}: {late}\n{first}")
        return [answers[rank][1] for rank in range(world)]

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._ranks:
            connection.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks = []

    def _start(self) -> Connection:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._ranks.append((process, ours))
        return ours

    def _collect(self, world: int, deadline: float) -> dict[int, tuple[bool, Any, float]]:
        answers: dict[int, tuple[bool, Any, float]] = {}
        waiting = {self._ranks[rank][1]: rank for rank in range(world)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), timeout=left):
                rank = waiting.pop(connection)  # pyright: ignore[reportArgumentType]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())  # pyright: ignore
                except EOFError:
                    process = self._ranks[rank][0]
                    process.join(1.0)
                    answers[rank] = (False, f"ended with exit code {process.exitcode}", 0.0)
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers


def _serve(connection: Connection) -> None:
    """A pool process: jobs until the pipe closes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    connection.send_bytes(READY)
    while True:
        try:
            rank, world, address, job, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{address}",
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=COLLECTIVE),
            )
            dist.barrier()  # a rank whose job is over at once must not part while others still connect
            answer = (True, job(*arguments), 0.0)
        except BaseException:
            answer = (False, traceback.format_exc(), time.monotonic())
        with contextlib.suppress(BrokenPipeError):
            connection.send_bytes(pickle.dumps(answer))
        if not answer[0]:
            os._exit(1)  # a broken group cannot be parted from in good order
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """DTensor caches what it worked out for a mesh, process groups included, and takes equal meshes for the same."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
