"""A plan's time on a named cluster: every rank's steps walked beside the transfers that it has posted.

Computation takes the device, transfers the wire; a batch starts when all its ranks have posted it and the wire of the
rank is free, and a `Wait` ends when it is done. What a rank spends in waits is exposed.

    predict_plan(plan, load_cluster("h100_8")).total_s
"""

from collections import defaultdict

import numpy as np

from parallel.plan.cost import AttentionTime, Cluster
from parallel.plan.ir import Add, Attend, AttendBackward, Copy, Merge, Post, Program, Stats, Step, Wait, token_bytes
from parallel.plan.plan import DIRECTIONS, Plan, message_bytes
from parallel.plan.tokens import TokenSet


def predict_plan(plan: Plan, cluster: Cluster) -> AttentionTime:
    """Seconds of a layer's attention, forward and backward, on the ranks that end last.

    Raises:
        ValueError: a plan that holds the steps of some ranks only, or whose ranks wait for each other.
    """
    if len(plan.ranks) != plan.size:
        raise ValueError(f"the plan holds {len(plan.ranks)} of {plan.size} ranks; plan all of them to predict its time")
    prices = _Prices(plan, cluster)
    both = [_Walk(prices, plan.programs(direction), direction).run() for direction in DIRECTIONS]
    return AttentionTime(*(sum(parts) for parts in zip(*both)))


class _Prices:
    """Seconds of computing steps, kept for sets of tokens that return."""

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self.plan, self.cluster, self.shape = plan, cluster, plan.shape
        self.per_pair: dict[str, float] = dict(zip(DIRECTIONS, cluster.seconds_per_pair(plan.shape)))
        self._pairs: dict[tuple[bytes, bytes], float] = {}
        self._last: dict[bytes, TokenSet] = {}

    def block(self, step: Attend | AttendBackward, direction: str) -> float:
        """Seconds of a block of attention."""
        share = (step.heads[1] - step.heads[0]) / self.shape.H
        return (
            self._block_pairs(step.q_tokens, step.k_tokens) * share * self.per_pair[direction] + self.cluster.launch_s
        )

    def _block_pairs(self, q: TokenSet, k: TokenSet) -> float:
        """Allowed pairs, and the short rows' on top."""
        found = self._pairs.get((q.key, k.key))
        if found is None:
            if q.key not in self._last:
                last = np.sort(self.plan.sight.segments(q).last)
                self._last[q.key] = TokenSet.from_array(np.stack([last, last + 1, np.ones_like(last)], 1))
            sight = self.plan.sight
            found = sight.pairs(q, k) + self.cluster.short_rows * sight.pairs(self._last[q.key], k)
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
        if isinstance(step, Merge | Stats):
            name = step.source if isinstance(step, Merge) else step.partial
            buffer = program.buffers[name]
            return 2 * self._pass(program, name, buffer.tokens.count, buffer.heads)
        return 0.0

    def _pass(self, program: Program, name: str, tokens: int, heads: tuple[int, int]) -> float:
        buffer = program.buffers[name]
        each = sum(size for _, size in token_bytes(buffer.kind, heads, buffer.exact, self.shape))
        return tokens * each / self.cluster.copy_bytes_s


class _Walk:
    """All ranks' steps of one direction."""

    def __init__(self, prices: _Prices, programs: list[Program], direction: str) -> None:
        self.prices, self.programs, self.direction = prices, programs, direction
        n = len(programs)
        self.clock, self.attention, self.copies = np.zeros(n), np.zeros(n), np.zeros(n)
        self.waited, self.wire_free = np.zeros(n), np.zeros(n)
        self.posted: dict[tuple[str, int, int], tuple[float, Post]] = {}  # (communicator, batch, rank)
        self.fresh: dict[int, set[str]] = defaultdict(set)

    def run(self) -> AttentionTime:
        at = [0] * len(self.programs)
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(self.programs):
                if at[rank] == 0:
                    self.fresh[rank] = set(program.buffers)
                while at[rank] < len(program.steps) and self._do(rank, program, program.steps[at[rank]]):
                    at[rank] += 1
                    moved = True
        if any(i < len(program.steps) for i, program in zip(at, self.programs)):
            raise ValueError(f"ranks {[r for r, p in enumerate(self.programs) if at[r] < len(p.steps)]} wait forever")
        slowest = int(self.clock.argmax())
        parts = (self.attention, self.copies, self.waited, self.clock)
        return AttentionTime(*(float(part[slowest]) for part in parts))

    def _do(self, rank: int, program: Program, step: Step) -> bool:
        """Take a step; False where it must wait for another rank's."""
        if isinstance(step, Post):
            self.posted[step.comm, step.batch, rank] = (float(self.clock[rank]), step)
            moved = sum(size for m in (*step.sends, *step.recvs) for _, size in message_bytes(m, self.prices.shape))
            self._spend(rank, self.copies, moved / self.prices.cluster.copy_bytes_s)
        elif isinstance(step, Wait):
            done = self._done(rank, step)
            if done is None:
                return False
            self._spend(rank, self.waited, max(0.0, done - float(self.clock[rank])))
        else:
            if isinstance(step, Attend | AttendBackward):
                self._spend(rank, self.attention, self.prices.block(step, self.direction))
            self._spend(rank, self.copies, self.prices.memory(step, program, self.fresh[rank]))
        return True

    def _spend(self, rank: int, on: np.ndarray, seconds: float) -> None:
        on[rank] += seconds
        self.clock[rank] += seconds

    def _done(self, rank: int, wait: Wait) -> float | None:
        """When a posted batch is done; None while one of its ranks has not posted it."""
        began, post = self.posted[wait.comm, wait.batch, rank]
        cluster, mesh, seconds = self.prices.cluster, self.prices.plan.placement.mesh, 0.0
        for link in ("intra", "inter"):
            bytes_of = [0, 0]
            for side, messages in enumerate((post.sends, post.recvs)):
                for message in messages:
                    if mesh.link(rank, message.peer) == link:
                        other = self.posted.get((wait.comm, wait.batch, message.peer))
                        if other is None:
                            return None
                        began = max(began, other[0])
                        bytes_of[side] += sum(size for _, size in message_bytes(message, self.prices.shape))
            if any(bytes_of):
                latency, rate = cluster.wire(link)
                seconds += latency + max(bytes_of) / rate
        self.wire_free[rank] = max(began, float(self.wire_free[rank])) + seconds
        return float(self.wire_free[rank])
