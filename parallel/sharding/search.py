"""Local search over shares: two ranks exchange equally many tokens, chosen among all such exchanges at once.

A move gives the head or the tail of a span of one rank for the head or the tail of a span of another, so tokens stay
equal. What every such move would change is known in closed form, so a step prices a few thousand of them in a dozen
array operations and takes the best. Effort is bounded by counts, never by a clock, and only operations that round
alike on every machine are used, so the result is the same on all ranks.
"""

from collections.abc import Sequence
from math import fsum, inf
from typing import NamedTuple, Protocol

import numpy as np

from parallel.sharding.gathered import GatheredShares
from parallel.sharding.shares import AFTER, DOC, END, HI, LAST, LO, REAL, Floats, Shares


class Cost(Protocol):
    """What a search lowers: the sum over ranks; of what it visits, it keeps the least `value`."""

    def __call__(self, work: Floats, received: Floats) -> Floats: ...

    def value(self, work: Floats, received: Floats) -> float: ...


TOO_MUCH = 400.0  # cost of work over the limit, per unit of the limit: dearer than any keys
HEAT = 3.0  # of a kick: costs up to this much more may be taken
WANDERS = 1.3  # a restart may begin from shares that cost this times those before
FEWEST_GIVEN = 8  # spans of the giver that a step looks at, where its budget does not hold all


class Effort(NamedTuple):
    """Bounds of a search.

    Attributes:
        steps: of the first descent.
        fractions: of the smaller of two spans, how much is exchanged.
        pairs: of spans that a step looks at.
        restarts: descents after `kicks` random exchanges, of `again` steps each.
    """

    steps: int
    fractions: tuple[float, ...]
    pairs: int
    restarts: int = 0
    kicks: int = 0
    again: int = 0


class BytesCost:
    """The fourth power of keys received, which weighs the worst rank and the total, under a limit of work."""

    def __init__(self, scale: float, limit: float) -> None:
        self.scale, self.limit = scale, limit

    def __call__(self, work: Floats, received: Floats) -> Floats:
        cost = received * (1 / self.scale)
        cost *= cost
        cost *= cost
        over = work * (1 / self.limit)
        over -= 1
        np.maximum(over, 0, out=over)
        over *= TOO_MUCH
        cost += over
        return cost

    def value(self, work: Floats, received: Floats) -> float:
        """Keys of the worst rank and the mean one; endless where the limit is broken."""
        if work.max() > self.limit:
            return inf
        return float(received.max()) + fsum(received.tolist()) / len(received)


class TimeCost:
    """A high power of a rank's time: the longer of computing and receiving, with a little of the shorter one."""

    def __init__(self, scale: float, seconds_per_pair: float, seconds_per_key: float) -> None:
        self.pair, self.key = seconds_per_pair / scale, seconds_per_key / scale

    def __call__(self, work: Floats, received: Floats) -> Floats:
        compute, transfer = work * self.pair, received * self.key
        cost = np.maximum(compute + 0.05 * transfer, transfer + 0.05 * compute)
        for _ in range(4):
            cost *= cost
        return cost

    def value(self, work: Floats, received: Floats) -> float:
        """That of the rank that takes longest."""
        return float(self(work, received).max())


class _Given(NamedTuple):
    """What giving away heads [0] and tails [1] of spans means: [2, ...] each."""

    lo: Floats
    hi: Floats
    work: Floats  # pairs that move
    lost: Floats  # work that the giver is rid of: pairs and short rows
    end: Floats  # of the giver in the document, afterwards
    keys: Floats  # the giver receives more


def _give(row: Floats, n: Floats, short: float) -> _Given:
    """`row` [7, ...] broadcasts against `n` tokens of each span."""
    lo, hi, end, last = row[LO], row[HI], row[END], row[LAST]
    first = np.empty((2, *n.shape))
    first[0] = lo
    np.subtract(hi, n, out=first[1])
    stop = first + n
    work = first + stop
    work += 1
    work *= n * (0.5 * row[REAL])
    left = np.empty_like(first)
    left[0] = end
    np.subtract(end, last * n, out=left[1])
    whole = n == hi - lo
    np.copyto(left, row[AFTER], where=whole)
    lost = work
    if short:
        fewer = np.zeros_like(work)  # keys of last rows: a tail's cut moves the last row up, a head's does not
        fewer[1] = n
        np.copyto(fewer, hi, where=whole)
        fewer *= short * row[REAL]
        lost = work + fewer
    keys = left - end
    keys += n
    keys *= row[REAL]
    return _Given(first, stop, work, lost, left, keys)


def _take(given: _Given, row: Floats, end: Floats, n: Floats, short: float) -> tuple[Floats, Floats]:
    """(work, keys) that a taker, whose end in the document is `end`, gets more of."""
    keys = given.hi - end
    np.maximum(keys, 0, out=keys)
    keys -= n
    keys *= row[REAL]
    if not short:
        return given.work, keys
    return given.work + (given.hi - given.lo * (end == given.lo)) * (short * row[REAL]), keys


def equalise(shares: Shares, cost: Cost, ranks: Sequence[int] | None = None) -> None:
    """Bring `ranks` (all), who want as much as they hold together, to what each wants: the fullest one gives, at the
    least cost a token."""
    chosen = np.zeros(len(shares.want), np.bool_)
    chosen[slice(None) if ranks is None else list(ranks)] = True
    want = np.array(shares.want)
    while True:
        excess = np.where(chosen, np.array(shares.tokens) - want, 0)
        giver = int(excess.argmax())
        if excess[giver] <= 0:
            return
        takers = np.flatnonzero(excess < 0)
        row = shares.rows(giver)
        n = np.minimum((row[:, HI] - row[:, LO])[:, None], np.minimum(-excess[takers], excess[giver])[None, :])
        columns = row.T[:, :, None]
        given = _give(columns, n, shares.short)
        end = shares.end[takers][:, row[:, DOC].astype(np.int64)].T
        more, keys = _take(given, columns, end, n, shares.short)
        change = cost(shares.work[giver] - given.lost, shares.received[giver] + given.keys)
        change += cost(shares.work[takers] + more, shares.received[takers] + keys)
        before = cost(shares.work, shares.received)
        change -= before[giver] + before[takers]
        change /= n
        part, i, j = np.unravel_index(int(change.argmin()), change.shape)
        at = int(row[i, DOC]), int(given.lo[part, i, j]), int(given.hi[part, i, j])
        shares.move(*at, giver, int(takers[j]))


class Search:
    """Exchanges between ranks of `shares`, which it changes, under `cost`; inside groups of `group` ranks, or all."""

    def __init__(self, shares: Shares, cost: Cost, effort: Effort, group: int | None = None) -> None:
        self.shares, self.cost, self.effort = shares, cost, effort
        self.group = group or len(shares.want)
        self.random = np.random.default_rng(0)
        self.fractions = np.array(effort.fractions)[:, None, None]

    def total(self) -> float:
        return fsum(self.cost(self.shares.work, self.shares.received).tolist())

    def run(self) -> Shares:
        """The best shares found: a descent, then kicks and descents from shares that may be a little worse."""
        self.descend(self.effort.steps)
        now, cost = self.shares, self.total()
        best, least = now, self.value()
        for _ in range(self.effort.restarts):
            self.shares = now.copy()
            for kick in range(self.effort.kicks):
                worst = self.cost(self.shares.work, self.shares.received).argmax()
                self.step(int(worst if kick else self.random.integers(len(self.shares.want))), HEAT)
            self.descend(self.effort.again)
            if self.total() < cost * WANDERS:
                now, cost = self.shares, self.total()
            if self.value() < least:
                best, least = self.shares, self.value()
        self.shares = best
        return best

    def value(self) -> float:
        return self.cost.value(self.shares.work, self.shares.received)

    def descend(self, steps: int) -> None:
        """Improve the rank that costs most among those that were not found stuck since they last changed."""
        stuck = np.zeros(len(self.shares.want), np.bool_)
        for _ in range(steps):
            cost = self.cost(self.shares.work, self.shares.received)
            cost[stuck] = -1
            a = int(cost.argmax())
            if stuck[a]:
                return
            b = self.step(a)
            stuck[a] = b is None
            if b is not None:
                stuck[b] = False

    def step(self, a: int, heat: float = 0.0) -> int | None:
        """Make the best exchange of rank `a` with any other, and say which; None where none gains. `heat` blurs it."""
        s = self.shares
        given, taken, b = self._spans(a)
        if len(given) == 0 or len(taken) == 0:
            return None
        p, q = given.T[:, :, None], taken.T[:, None, :]
        n = np.floor(self.fractions * np.minimum(p[HI] - p[LO], q[HI] - q[LO]))
        np.maximum(n, 1, out=n)
        gives, gets = _give(p, n, s.short), _give(q, n, s.short)
        p_documents, q_documents = given[:, DOC].astype(np.int64), taken[:, DOC].astype(np.int64)
        b_more, b_keys = _take(gives, p, s.end[b[None, :], p_documents[:, None]], n, s.short)
        a_more, a_keys = _take(gets, q, s.end[a, q_documents][None, :], n, s.short)
        a_received = gives.keys[:, None] + a_keys[None]
        b_received = b_keys[:, None] + gets.keys[None]
        i, j = np.nonzero((p_documents[:, None] == q_documents) & (p_documents[:, None] != s.padding))
        if isinstance(s, GatheredShares):
            a_received, b_received = s.sent_after(a, b, p, q, (p_documents, q_documents), gives, gets, n)
        elif len(i):  # one document: a rank's tokens of it stay as many, and its end is what it keeps or gets
            a_received[..., i, j] = np.maximum(gives.end[:, None, :, i, j], gets.hi[None][..., i, j]) - p[END, i, 0]
            b_received[..., i, j] = np.maximum(gives.hi[:, None, :, i, j], gets.end[None][..., i, j]) - q[END, 0, j]
        a_received += s.received[a]
        b_received += s.received[b]
        change = self.cost((a_more + s.work[a])[None] - gives.lost[:, None], a_received)
        change += self.cost((b_more + s.work[b])[:, None] - gets.lost[None], b_received)
        before = self.cost(s.work, s.received)
        change -= before[a] + before[b]
        if heat:
            change += heat * self.random.random(change.shape)
        x, y, f, i, j = np.unravel_index(int(change.argmin()), change.shape)
        if change[x, y, f, i, j] >= (heat or -1e-9):
            return None
        other, size = int(b[j]), int(n[f, i, j])
        lo, back = int(gives.lo[x, f, i, j]), int(gets.lo[y, f, i, j])
        s.move(int(p_documents[i]), lo, lo + size, a, other)
        s.move(int(q_documents[j]), back, back + size, other, a)
        return other

    def _spans(self, a: int) -> tuple[Floats, Floats, np.ndarray]:
        """Spans of rank `a`, spans of the others, and whose these are: all, or a random part within the budget."""
        s = self.shares
        first = a // self.group * self.group
        others = [rank for rank in range(first, min(first + self.group, len(s.want))) if rank != a and s.held[rank]]
        given = s.rows(a)
        if not others:
            return given, given[:0], np.zeros(0, np.int64)
        rows = [s.rows(rank) for rank in others]
        owner = np.repeat(np.array(others), [len(row) for row in rows])
        taken = np.concatenate(rows)
        if len(given) * len(taken) > self.effort.pairs:
            if len(given) > FEWEST_GIVEN:
                given = given[np.sort(self.random.permutation(len(given))[:FEWEST_GIVEN])]
            some = np.sort(self.random.permutation(len(taken))[: max(1, self.effort.pairs // len(given))])
            taken, owner = taken[some], owner[some]
        return given, taken, owner
