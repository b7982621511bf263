"""A plan's time on a named cluster: every rank's steps walked beside the transfers that it has posted.

Computation takes the device, transfers the wires; a batch starts when all its ranks have posted it and the rank's wire
of that link class is free, and a `Wait` ends when it is done. What a rank spends in waits is exposed.

    predict_plan(plan, load_cluster("h100_8")).total_s
    walk(plan, load_cluster("h100_8"), "forward")       the same as bars, for a timeline
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from parallel.plan.ir import Add, Attend, AttendBackward, Copy, MakeStats, Merge, Post, Program, Step, Wait, token_bytes
from parallel.plan.plan import DIRECTIONS, Plan, message_bytes
from parallel.plan.tokens import TokenSet
from parallel.price.cluster import AttentionTime, Cluster


class Bar(NamedTuple):
    """Something that a rank does from `start` to `stop`, in seconds.

    Attributes:
        lane: compute, or the link class of a transfer: intra, inter.
        what: attention; copy, a pass through memory; intra, inter, a transfer; wait, nothing to compute until one ends.
        step: of computing and waiting, the index of the step; of a transfer, of the `Wait` that ends it.
    """

    rank: int
    lane: str
    what: str
    start: float
    stop: float
    step: int


def predict_plan(plan: Plan, cluster: Cluster) -> AttentionTime:
    """Seconds of a layer's attention, forward and backward, on the ranks that end last.

    Raises:
        ValueError: a plan that holds the steps of some ranks only, or whose ranks wait for each other.
    """
    prices = _Prices(plan, cluster)
    both = [_Walk(prices, direction, range(plan.size)).run() for direction in DIRECTIONS]
    return AttentionTime(*(sum(parts) for parts in zip(*both)))


def walk(plan: Plan, cluster: Cluster, direction: str, world_ranks: Sequence[int] | None = None) -> list[Bar]:
    """Every bar of a direction, in the order in which they came about.

    Args:
        world_ranks: the world rank of each cp rank, which decides the class of their links; None: the same.

    Raises:
        ValueError: as `predict_plan`.
    """
    steps = _Walk(_Prices(plan, cluster), direction, range(plan.size) if world_ranks is None else world_ranks)
    steps.bars = []
    steps.run()
    return steps.bars


class _Prices:
    """Seconds of computing steps, kept for sets of tokens that return."""

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        if len(plan.ranks) != plan.size:
            raise ValueError(
                f"the plan holds {len(plan.ranks)} of {plan.size} ranks; plan all of them to predict its time"
            )
        self.plan, self.cluster, self.shape = plan, cluster, plan.shape
        self.per_pair: dict[str, float] = dict(zip(DIRECTIONS, cluster.seconds_per_pair(plan.shape)))
        self._pairs: dict[tuple[bytes, bytes], tuple[float, int]] = {}
        self._last: dict[bytes, TokenSet] = {}

    def block(self, step: Attend | AttendBackward, direction: str) -> float:
        """Seconds of a block of attention."""
        share = (step.heads[1] - step.heads[0]) / self.shape.H
        pairs, launches = self._block(step.q_tokens, step.k_tokens)
        return pairs * share * self.per_pair[direction] + launches * self.cluster.launch_s

    def _block(self, q: TokenSet, k: TokenSet) -> tuple[float, int]:
        """Allowed pairs, and the short rows' on top; and a launch for each band that has some."""
        found = self._pairs.get((q.key, k.key))
        if found is None:
            if q.key not in self._last:
                last = np.sort(self.plan.sight.segments(q).last)
                self._last[q.key] = TokenSet.from_array(np.stack([last, last + 1, np.ones_like(last)], 1))
            sight = self.plan.sight
            pairs = sight.band_pairs(q, k)
            launches = max(1, sum(map(bool, pairs)))
            found = sum(pairs) + self.cluster.short_rows * sight.pairs(self._last[q.key], k), launches
            self._pairs[q.key, k.key] = found
        return found

    def memory(self, step: Step, program: Program, fresh: set[str]) -> float:
        """Seconds of the passes through memory that a step makes: reads and writes of what it adds to or moves."""
        if isinstance(step, Attend):
            merges = step.into not in fresh
            fresh.discard(step.into)
            return self._pass(program, step.into, step.q_tokens.count, step.heads) * 2 * merges
        if isinstance(step, AttendBackward):
            heads = self.shape.key_heads(step.heads)
            passes = self._pass(program, step.into_q, step.q_tokens.count, step.heads)
            return 2 * (passes + self._pass(program, step.into_kv, step.k_tokens.count, heads))
        if isinstance(step, Add | Copy):
            return 2 * self._pass(program, step.into, step.tokens.count, step.heads)
        if isinstance(step, Merge | MakeStats):
            name = step.source if isinstance(step, Merge) else step.partial
            buffer = program.buffers[name]
            return 2 * self._pass(program, name, buffer.tokens.count, buffer.heads)
        return 0.0

    def _pass(self, program: Program, name: str, tokens: int, heads: tuple[int, int]) -> float:
        buffer = program.buffers[name]
        each = sum(size for _, size in token_bytes(buffer.kind, heads, buffer.exact, self.shape))
        return tokens * each / self.cluster.copy_bytes_s


class _Walk:
    """All ranks' steps of one direction; with `bars` set to a list, each is written there."""

    def __init__(self, prices: _Prices, direction: str, world_ranks: Sequence[int]) -> None:
        self.prices, self.programs, self.direction = prices, prices.plan.programs(direction), direction
        self.world_ranks = world_ranks
        n = len(self.programs)
        self.at, self.clock = [0] * n, np.zeros(n)
        self.spent = {what: np.zeros(n) for what in ("attention", "copy", "wait")}
        self.wire_free: dict[tuple[int, str], float] = defaultdict(float)  # (rank, link)
        self.posted: dict[tuple[str, int, int], tuple[float, Post]] = {}  # (communicator, batch, rank)
        self.fresh = [set(program.buffers) for program in self.programs]
        self.bars: list[Bar] | None = None

    def run(self) -> AttentionTime:
        at, moved = self.at, True
        while moved:
            moved = False
            for rank, program in enumerate(self.programs):
                while at[rank] < len(program.steps) and self._do(rank, program, program.steps[at[rank]]):
                    at[rank] += 1
                    moved = True
        left = [rank for rank, program in enumerate(self.programs) if at[rank] < len(program.steps)]
        if left:
            raise ValueError(f"ranks {left} wait forever; verify the plan first")
        slowest = int(self.clock.argmax())
        return AttentionTime(*(float(part[slowest]) for part in (*self.spent.values(), self.clock)))

    def _do(self, rank: int, program: Program, step: Step) -> bool:
        """Take a step; False where it must wait for another rank's."""
        if isinstance(step, Post):
            self.posted[step.comm, step.batch, rank] = (float(self.clock[rank]), step)
            moved = sum(size for m in (*step.sends, *step.recvs) for _, size in message_bytes(m, self.prices.shape))
            self._spend(rank, "copy", moved / self.prices.cluster.copy_bytes_s)
        elif isinstance(step, Wait):
            done = self._done(rank, step)
            if done is None:
                return False
            self._spend(rank, "wait", max(0.0, done - float(self.clock[rank])))
        else:
            if isinstance(step, Attend | AttendBackward):
                self._spend(rank, "attention", self.prices.block(step, self.direction))
            self._spend(rank, "copy", self.prices.memory(step, program, self.fresh[rank]))
        return True

    def _spend(self, rank: int, what: str, seconds: float) -> None:
        self._draw(rank, "compute", what, float(self.clock[rank]), seconds)
        self.spent[what][rank] += seconds
        self.clock[rank] += seconds

    def _draw(self, rank: int, lane: str, what: str, start: float, seconds: float) -> None:
        if self.bars is not None and seconds > 0:
            self.bars.append(Bar(rank, lane, what, start, start + seconds, self.at[rank]))

    def _done(self, rank: int, wait: Wait) -> float | None:
        """When a posted batch is done; None while one of its ranks has not posted it."""
        began, post = self.posted[wait.comm, wait.batch, rank]
        total: dict[str, list[int]] = {}  # link -> bytes sent, bytes received
        for side, messages in enumerate((post.sends, post.recvs)):
            for message in messages:
                other = self.posted.get((wait.comm, wait.batch, message.peer))
                if other is None:
                    return None
                began = max(began, other[0])
                link = self.prices.plan.placement.mesh.link(self.world_ranks[rank], self.world_ranks[message.peer])
                total.setdefault(link, [0, 0])[side] += sum(n for _, n in message_bytes(message, self.prices.shape))
        done = began
        for link, both in total.items():
            latency, rate = self.prices.cluster.wire(link)
            start, seconds = max(began, self.wire_free[rank, link]), latency + max(both) / rate
            self._draw(rank, link, link, start, seconds)
            self.wire_free[rank, link] = start + seconds
            done = max(done, start + seconds)
        return done
