"""A simple clock over a plan's rounds: when each rank computes, sends and waits, at stated rates.

It orders things and weighs them by work and bytes, to see what a schedule hides; it predicts no time. Sends and
receives of a batch run at once, each link class at its rate; a batch starts when all who take part have posted it and
the rank's earlier batches on that communicator are done. Copies, merges, sums and latency cost nothing here.
"""

from collections import defaultdict
from typing import NamedTuple

from parallel.plan.ir import Attend, AttendBackward, Post, Program, Wait
from parallel.plan.plan import Plan, message_bytes


class Rates(NamedTuple):
    """FLOP/s of attention, and bytes/s each way of a rank's links inside a node and between nodes."""

    flops: float = 4e14
    intra: float = 3.5e11
    inter: float = 4e10


class Bar(NamedTuple):
    """Something that a rank does from `start` to `stop`, in seconds of the clock.

    Attributes:
        lane: compute, or the communicator.
        what: compute, intra, inter (the slower link of a transfer), or wait: nothing to compute until a batch is done.
        round: of a block of attention, see `round_numbers`; of a transfer or a wait, the number of the rank's batch.
    """

    rank: int
    lane: str
    what: str
    start: float
    stop: float
    round: int


def round_numbers(program: Program) -> dict[int, int]:
    """The round of each block of attention, by the number of its step: blocks between which a batch was waited for."""
    found: dict[int, int] = {}
    number, waited = -1, True
    for at, step in enumerate(program.steps):
        if isinstance(step, Attend | AttendBackward):
            number += waited
            waited = False
            found[at] = number
        elif isinstance(step, Wait):
            waited = True
    return found


class Clock:
    """All ranks of a verified plan in one direction; `bars` is filled by `run`.

    Args:
        node_ranks: the world rank of each cp rank, which decides the class of their links.
    """

    def __init__(self, plan: Plan, direction: str, node_ranks: tuple[int, ...], rates: Rates = Rates()) -> None:  # noqa: B008
        self.plan, self.rates, self.node_ranks = plan, rates, node_ranks
        self.programs = plan.programs(direction)
        self.now = [0.0] * plan.size
        self.rounds = [round_numbers(program) for program in self.programs]
        self.posted: dict[tuple[int, str, int], tuple[float, Post, int]] = {}
        self.free: dict[tuple[int, str], float] = defaultdict(float)
        self.bars: list[Bar] = []

    def run(self) -> list[Bar]:
        """Every bar, in the order in which they came about."""
        at = [0] * self.plan.size
        moved = True
        while moved:
            moved = False
            for program in self.programs:
                while at[program.rank] < len(program.steps) and self._step(program, at[program.rank]):
                    at[program.rank] += 1
                    moved = True
        left = [rank for rank, program in enumerate(self.programs) if at[rank] < len(program.steps)]
        if left:
            raise ValueError(f"ranks {left} never finish; verify the plan first")
        return self.bars

    def _step(self, program: Program, index: int) -> bool:
        step, rank = program.steps[index], program.rank
        if isinstance(step, Post):
            number = sum(key[0] == rank for key in self.posted)
            self.posted[rank, step.comm, step.batch] = (self.now[rank], step, number)
        elif isinstance(step, Wait):
            return self._wait(rank, step)
        elif isinstance(step, Attend | AttendBackward):
            seconds = self._flops(step) / self.rates.flops
            self._add(rank, "compute", "compute", self.now[rank], seconds, self.rounds[rank][index])
            self.now[rank] += seconds
        return True

    def _flops(self, step: Attend | AttendBackward) -> float:
        """Two products forward; five backward, in which the scores are computed again."""
        shape = self.plan.shape
        width = shape.D + shape.Dv if isinstance(step, Attend) else 3 * shape.D + 2 * shape.Dv
        return 2.0 * width * self.plan.sight.pairs(step.q_tokens, step.k_tokens) * (step.heads[1] - step.heads[0])

    def _wait(self, rank: int, step: Wait) -> bool:
        began, post, number = self.posted[rank, step.comm, step.batch]
        for peer in {message.peer for message in (*post.sends, *post.recvs)}:
            other = self.posted.get((peer, step.comm, step.batch))
            if other is None:
                return False
            began = max(began, other[0])
        began = max(began, self.free[rank, step.comm])
        seconds, link = self._transfer(rank, post)
        done = self.free[rank, step.comm] = began + seconds
        self._add(rank, step.comm, link, began, seconds, number)
        self._add(rank, "compute", "wait", self.now[rank], done - self.now[rank], number)
        self.now[rank] = max(self.now[rank], done)
        return True

    def _transfer(self, rank: int, post: Post) -> tuple[float, str]:
        """How long a batch takes, and the link class that decides it."""
        longest: dict[str, float] = {}
        for side in (post.sends, post.recvs):
            total: dict[str, int] = defaultdict(int)
            for message in side:
                link = self.plan.placement.mesh.link(self.node_ranks[rank], self.node_ranks[message.peer])
                total[link] += sum(size for _, size in message_bytes(message, self.plan.shape))
            for link, size in total.items():
                longest[link] = max(longest.get(link, 0.0), size / getattr(self.rates, link))
        link = max(longest, key=lambda name: longest[name])
        return longest[link], link

    def _add(self, rank: int, lane: str, what: str, start: float, seconds: float, number: int) -> None:
        if seconds > 0:
            self.bars.append(Bar(rank, lane, what, start, start + seconds, number))
