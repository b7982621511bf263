"""A ring inside each node and one across nodes at once (LoongTrain's double ring, arXiv 2406.18485).

The lane is a grid of laps: a block of keys makes a lap inside each node, hop by hop, and its copy from the start of a
lap goes to the next node meanwhile. `ring.py` is the grid of one lap.

A block stops travelling where no later rank sees it, and under a window or a chunk it carries only what later ranks
still need. Backward: keys travel again; the gradients of a block follow it from one rank that saw it to the next, in
fp32, and the last one of a lap sends the lap's sum home, where the sums of all laps are added in order.
"""

from collections import defaultdict

import numpy as np

from parallel.exchange.lane import Dealt, Exchange, Lane
from parallel.plan.ir import Message, Wait
from parallel.plan.tokens import EMPTY, EMPTY_SPANS, TokenSet, join_spans
from parallel.plan.writer import Writer

HOP_COMM, LAP_COMM, HOME_COMM = "cp_inner", "cp_outer", "cp"  # a node's ring; across nodes; any member to any other


class Route:
    """How block `home` travels through a grid of laps of `hops` members: at (lap, hop) it lies at member `at`."""

    def __init__(self, dealt: Dealt, hops: int, home: int) -> None:
        self.dealt, self.hops, self.home = dealt, hops, home
        self.laps = len(dealt.sets) // hops
        # the hops of each lap whose member sees the block, its own left out: there gradients come about
        self.viewers = [
            [h for h in range(hops) if (lap or h) and dealt.sees[self.at(lap, h), home]] for lap in range(self.laps)
        ]
        self.last_lap = max((lap for lap in range(self.laps) if self.viewers[lap]), default=0)
        self._carried: dict[int, list[TokenSet]] = {}  # of each lap, at each hop

    def at(self, lap: int, hop: int) -> int:
        outer, inner = divmod(self.home, self.hops)
        return (outer + lap) % self.laps * self.hops + (inner + hop) % self.hops

    def travels(self, lap: int, hop: int) -> bool:
        """Whether the block comes to (lap, hop) by a message: some member sees it there or later on that way."""
        if hop == 0:
            return 0 < lap <= self.last_lap
        return bool(self.viewers[lap]) and hop <= self.viewers[lap][-1]

    def carried(self, lap: int, hop: int) -> TokenSet:
        """What of the block is sent to its place at (lap, hop): what is seen there or later on that way."""
        if not self.dealt.scene.local:
            return self.dealt.sets[self.home]
        if lap not in self._carried:
            self._carried[lap] = self._needed(lap)
        return self._carried[lap][hop]

    def _needed(self, lap: int) -> list[TokenSet]:
        """What is still needed from each hop of a lap on; from its start also what later laps need."""
        block, sight = self.dealt.sets[self.home], self.dealt.scene.sight
        most = int(sight.segments(block).size.sum())  # padding is never needed
        spans, needed, found = EMPTY_SPANS, EMPTY, [EMPTY] * self.hops
        for hop in range(self.hops - 1, -1, -1):
            seen = [(lap, hop)] if hop in self.viewers[lap] else []
            if hop == 0:
                seen += [(other, h) for other in range(lap + 1, self.laps) for h in self.viewers[other]]
            for place in seen:
                if needed.count < most:
                    spans = join_spans(np.concatenate([spans, sight.reach(self.dealt.sets[self.at(*place)])]))
                    needed = block.clip(spans)
            found[hop] = needed
        return found


class _Clock:
    """One member's view of all routes: which block lies here at step lap * hops + hop, and what leaves and comes."""

    def __init__(self, lane: Lane) -> None:
        self.lane, self.hops, self.laps = lane, lane.lap_size, lane.size // lane.lap_size
        self.outer, self.inner = divmod(lane.me, lane.lap_size)
        self.steps = self.hops * self.laps
        kept = lane.dealt.kept
        self.routes: list[Route] = kept.get(("routes", self.hops)) or kept.setdefault(
            ("routes", self.hops), [Route(lane.dealt, self.hops, home) for home in range(lane.size)]
        )

    @property
    def own(self) -> Route:
        return self.routes[self.lane.me]

    def route(self, lap: int, hop: int) -> Route:
        return self.routes[(self.outer - lap) % self.laps * self.hops + (self.inner - hop) % self.hops]

    def here(self, step: int) -> tuple[Route, int, int]:
        lap, hop = divmod(step, self.hops)
        return self.route(lap, hop), lap, hop

    def held(self, step: int) -> str:
        """The buffer of the keys that lie here at `step`."""
        return f"kv{step}" if step else self.lane.names["kv"]


def _declare(w: Writer, clock: _Clock, name: str, tokens: TokenSet, home: int, kind: str = "kv") -> str:
    lane = clock.lane
    return w.buffer(name, kind, tokens, lane.key_heads, kind == "grad_kv", capacity=lane.sets[home].count)  # pyright: ignore[reportArgumentType]


Sides = tuple[list[Message], list[Message]]


def _move(w: Writer, clock: _Clock, source: tuple[int, int], target: tuple[int, int]) -> Sides:
    """The messages that bring blocks from their place at `source` = (lap, hop) to `target`."""
    lane, sends, recvs = clock.lane, [], []
    leaving, coming = clock.route(*source), clock.route(*target)
    if leaving.travels(*target):
        held = clock.held(source[0] * clock.hops + source[1])
        sends.append(lane.message(leaving.at(*target), "kv", held, leaving.carried(*target)))
    if coming.travels(*target):
        tokens = coming.carried(*target)
        name = _declare(w, clock, clock.held(target[0] * clock.hops + target[1]), tokens, coming.home)
        recvs.append(lane.message(coming.at(*source), "kv", name, tokens))
    return sends, recvs


def _next_hop(w: Writer, clock: _Clock, step: int) -> Sides:
    lap, hop = divmod(step, clock.hops)
    return _move(w, clock, (lap, hop), (lap, hop + 1)) if step < clock.steps and hop + 1 < clock.hops else ([], [])


def _next_lap(w: Writer, clock: _Clock, lap: int) -> Wait | None:
    """At a lap's start: the blocks go to the next lap, while this one runs."""
    if lap + 1 >= clock.laps:
        return None
    return w.post(lap, LAP_COMM, *_move(w, clock, (lap, 0), (lap + 1, 0)))


def _end_lap(w: Writer, clock: _Clock, lap: int, pending: Wait | None) -> None:
    w.wait(pending)
    if clock.route(lap, 0).travels(lap, 0):
        w.free(clock.held(lap * clock.hops))


def forward(w: Writer, lane: Lane) -> None:
    """A member's steps: post the next hop, attend the block that lies here, wait."""
    clock, next_lap = _Clock(lane), None
    for step in range(clock.steps):
        route, lap, hop = clock.here(step)
        if hop == 0:
            next_lap = _next_lap(w, clock, lap)
        next_hop = w.post(step, HOP_COMM, *_next_hop(w, clock, step))
        if step == 0:
            lane.attend_own(w)
        elif hop in route.viewers[lap]:
            held, tokens = clock.held(step), route.carried(lap, hop)
            w.attend(lane.names["q"], held, lane.names["acc"], lane.mine, tokens, lane.heads)
        w.wait(next_hop)
        if hop and route.travels(lap, hop):
            w.free(clock.held(step))
        if hop == clock.hops - 1:
            _end_lap(w, clock, lap, next_lap)


def backward(w: Writer, lane: Lane) -> None:
    """The same, with sums of gradients following the keys; one step more, in which the last sums come home."""
    clock, next_lap, going_home = _Clock(lane), None, None
    sums = _Sums(w, clock)
    for step in range(clock.steps + 1):
        route, lap, hop = clock.here(step)
        within = step < clock.steps
        if within and hop == 0:
            next_lap = _next_lap(w, clock, lap)
        sends, recvs = _next_hop(w, clock, step)
        pending = w.post(step, HOP_COMM, sends + sums.sends[step], recvs + sums.recvs[step])
        if sums.returns[step] or sums.homes[step]:
            sums.land(going_home)  # a sum has a lap's time to come home in
            going_home = step, w.post(step, HOME_COMM, sums.returns[step], sums.homes[step])
        if step == 0:
            lane.attend_own_backward(w)
        elif within and hop in route.viewers[lap]:
            held, tokens = clock.held(step), route.carried(lap, hop)
            name = _declare(w, clock, f"grad_kv{step}", tokens, route.home, "grad_kv")
            lane.backward(w, lane.mine, tokens, kv=held, grad_kv=name)
        w.wait(pending)
        sums.settle(step)
        if within and hop and route.travels(lap, hop):
            w.free(clock.held(step))
        if within and hop == clock.hops - 1:
            _end_lap(w, clock, lap, next_lap)
    sums.land(going_home)


class _Sums:
    """Where gradients of travelling keys go: per step, what is sent and received, and what is then added.

    Each lap of a block makes one sum, begun by its first viewer. It reaches the next viewer in the batch of that one's
    own step, and goes home in the batch after the last one's step.
    """

    def __init__(self, w: Writer, clock: _Clock) -> None:
        self.w, self.clock = w, clock
        self.sums: dict[int, str] = {}  # step -> the sum that comes in then, to be added to and sent on
        self.sends: dict[int, list[Message]] = defaultdict(list)
        self.recvs: dict[int, list[Message]] = defaultdict(list)
        self.returns: dict[int, list[Message]] = defaultdict(list)
        self.homes: dict[int, list[Message]] = defaultdict(list)
        for step in range(1, clock.steps):
            self._follow(step)
        for lap, chain in enumerate(clock.own.viewers):
            if chain:
                tokens = clock.own.carried(lap, chain[0])
                name = _declare(w, clock, f"home{lap}", tokens, clock.lane.me, "grad_kv")
                message = clock.lane.message(clock.own.at(lap, chain[-1]), "grad_kv", name, tokens, exact=True)
                self.homes[lap * clock.hops + chain[-1] + 1].append(message)

    def _follow(self, step: int) -> None:
        """What becomes of the sum of the block that lies here at `step`, if this member adds to it."""
        clock, lane = self.clock, self.clock.lane
        route, lap, hop = clock.here(step)
        chain = route.viewers[lap]
        if hop not in chain:
            return
        place, tokens = chain.index(hop), route.carried(lap, chain[0])
        name = f"grad_kv{step}"
        if place:
            name = self.sums[step] = _declare(self.w, clock, f"sum{step}", tokens, route.home, "grad_kv")
            before = route.at(lap, chain[place - 1])
            self.recvs[step].append(lane.message(before, "grad_kv", name, tokens, exact=True))
        if hop == chain[-1]:
            self.returns[step + 1].append(lane.message(route.home, "grad_kv", name, tokens, exact=True))
        else:
            after = chain[place + 1]
            message = lane.message(route.at(lap, after), "grad_kv", name, tokens, exact=True)
            self.sends[lap * clock.hops + after].append(message)

    def settle(self, step: int) -> None:
        """After the hop's batch of `step`: add what came in, let go of what was sent."""
        w = self.w
        w.free(*(message.buffer for message in self.sends[step]))
        if step in self.sums:
            w.add(f"grad_kv{step}", self.sums[step])
            w.free(f"grad_kv{step}")

    def land(self, going: tuple[int, Wait | None] | None) -> None:
        """Wait for the sums that set out for home at a step, and add those of this member."""
        if going is not None:
            step, pending = going
            self.w.wait(pending)
            for message in self.homes[step]:
                self.w.add(message.buffer, self.clock.lane.names["grad_kv"])
                self.w.free(message.buffer)
            self.w.free(*(message.buffer for message in self.returns[step]))


DOUBLE_RING = Exchange(forward, backward, "LoongTrain's double ring, arXiv 2406.18485")
