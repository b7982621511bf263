"""Keys travel from rank to rank while queries stay (Ring Attention, arXiv 2310.01889), and the double ring.

In a double ring (LoongTrain, arXiv 2406.18485) the lane is a grid of laps: a block of keys makes a lap inside each node,
and its copy from the start of a lap goes to the next node meanwhile. A plain ring is a grid of one lap.

A block stops travelling where no later rank sees it, and under a window it carries only what later ranks still need.
Backward: keys travel again; the gradients of a block follow it from one rank that saw it to the next, in fp32, and the
last one of a lap sends the lap's sum home, where the sums of all laps are added in order.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from parallel.exchange.lane import Exchange, Lane
from parallel.plan.ir import Message
from parallel.plan.tokens import TokenSet, join_spans
from parallel.plan.writer import Writer


@dataclass(frozen=True)
class Route:
    """How block `home` travels: at step lap * hops + hop it lies at member `at(lap, hop)`."""

    lane: Lane
    home: int

    @property
    def hops(self) -> int:
        return self.lane.lap_size

    @property
    def laps(self) -> int:
        return self.lane.size // self.lane.lap_size

    def at(self, lap: int, hop: int) -> int:
        outer, inner = divmod(self.home, self.hops)
        return (outer + lap) % self.laps * self.hops + (inner + hop) % self.hops

    @cached_property
    def viewers(self) -> tuple[tuple[int, ...], ...]:
        """[laps]: the hops of each lap whose rank sees the block; its own rank is not listed."""
        return tuple(
            tuple(h for h in range(self.hops) if (lap or h) and self.lane.sees(self.at(lap, h), self.home))
            for lap in range(self.laps)
        )

    def last_hop(self, lap: int) -> int:
        """The last hop of a lap that the block makes; 0 where it only starts there."""
        return max(self.viewers[lap], default=0)

    @cached_property
    def last_lap(self) -> int:
        return max((lap for lap in range(self.laps) if self.viewers[lap]), default=0)

    def carried(self, lap: int, hop: int) -> TokenSet:
        """What of the block is sent to its place at (lap, hop): what is seen there or later on the way."""
        tokens = self.lane.sets[self.home]
        if not self.lane.scene.windowed:
            return tokens
        later = [(lap, h) for h in self.viewers[lap] if h >= hop]
        if hop == 0:
            later += [(other, h) for other in range(lap + 1, self.laps) for h in self.viewers[other]]
        spans = [self.lane.scene.sight.reach(self.lane.sets[self.at(*place)]) for place in later]
        return tokens.clip(join_spans(np.concatenate(spans))) if spans else tokens.cut(0, 0)

    def travels(self, lap: int, hop: int) -> bool:
        """Whether the block comes to (lap, hop) by a message."""
        if hop == 0:
            return 0 < lap <= self.last_lap
        return hop <= self.last_hop(lap)


class _Clock:
    """The member's view of all routes: which block lies here at a step, and where it came from and goes."""

    def __init__(self, lane: Lane) -> None:
        self.lane, self.hops, self.laps = lane, lane.lap_size, lane.size // lane.lap_size
        self.outer, self.inner = divmod(lane.me, lane.lap_size)
        self.steps = self.hops * self.laps
        nested = self.laps > 1 and self.hops > 1
        self.hop_comm = "cp_inner" if nested else lane.comm
        self.lap_comm = "cp_outer" if nested else lane.comm
        self.home_comm = "cp" if nested else lane.comm

    def route(self, lap: int, hop: int) -> Route:
        home = (self.outer - lap) % self.laps * self.hops + (self.inner - hop) % self.hops
        return Route(self.lane, home)

    def here(self, step: int) -> tuple[Route, int, int]:
        lap, hop = divmod(step, self.hops)
        return self.route(lap, hop), lap, hop


def _buffer(step: int) -> str:
    return f"kv{step}"


def _declare(w: Writer, lane: Lane, name: str, tokens: TokenSet, home: int, kind: str = "kv") -> str:
    exact = kind == "grad_kv"
    return w.buffer(name, kind, tokens, lane.key_heads, exact, capacity=lane.sets[home].count)  # pyright: ignore[reportArgumentType]


def _travel(w: Writer, clock: _Clock, step: int, lap: bool) -> tuple[list[Message], list[Message]]:
    """The transfer that starts with `step`: of the block here to the next hop; or, at a lap's start, to the next lap."""
    lane = clock.lane
    route, at_lap, at_hop = clock.here(step)
    place = (at_lap + 1, 0) if lap else (at_lap, at_hop + 1)
    arrival = place[0] * clock.hops + place[1]
    if (lap and at_hop) or place[0] >= clock.laps or place[1] >= clock.hops:
        return [], []
    sends, recvs = [], []
    if route.travels(*place):
        held = lane.names["kv"] if step == 0 else _buffer(step)
        sends.append(lane.message(route.at(*place), "kv", held, route.carried(*place)))
    coming = clock.route(*place)
    if coming.travels(*place):
        before = (at_lap, 0) if lap else (at_lap, at_hop)
        tokens = coming.carried(*place)
        name = _declare(w, lane, _buffer(arrival), tokens, coming.home)
        recvs.append(lane.message(coming.at(*before), "kv", name, tokens))
    return sends, recvs


def forward(w: Writer, lane: Lane) -> None:
    clock = _Clock(lane)
    for step in range(clock.steps):
        route, lap, hop = clock.here(step)
        if hop == 0:
            start = step
            outer = w.post(lap, clock.lap_comm, *_travel(w, clock, step, lap=True)) if clock.laps > 1 else None
        inner = w.post(step, clock.hop_comm, *_travel(w, clock, step, lap=False)) if clock.hops > 1 else None
        if step == 0:
            lane.attend_own(w)
        elif hop in route.viewers[lap]:
            w.attend(lane.names["q"], _buffer(step), lane.names["acc"], lane.mine, route.carried(lap, hop), lane.heads)
        w.wait(inner)
        if hop and route.travels(lap, hop):
            w.free(_buffer(step))
        if hop == clock.hops - 1:
            w.wait(outer)
            if start and clock.here(start)[0].travels(lap, 0):
                w.free(_buffer(start))


def backward(w: Writer, lane: Lane) -> None:
    clock = _Clock(lane)
    for step in range(clock.steps + 1):
        lap, hop = divmod(step, clock.hops)
        within = step < clock.steps
        if within and hop == 0:
            start = step
            outer = w.post(lap, clock.lap_comm, *_travel(w, clock, step, lap=True)) if clock.laps > 1 else None
        sends, recvs = _travel(w, clock, step, lap=False) if within and clock.hops > 1 else ([], [])
        passed, taken = _pass_on(w, clock, step) if within else ([], [])
        returned, homed = _return_home(w, clock, step)
        same = clock.home_comm == clock.hop_comm
        inner = w.post(
            step, clock.hop_comm,
            sends + passed + (returned if same else []), recvs + taken + (homed if same else []),
        )  # fmt: skip
        home = None if same else w.post(step, clock.home_comm, returned, homed)
        if within:
            _compute(w, clock, step)
        w.wait(inner, home)
        _settle(w, clock, step, passed + returned, homed)
        if within and hop == clock.hops - 1:
            w.wait(outer)
            if start and clock.here(start)[0].travels(lap, 0):
                w.free(_buffer(start))


def _compute(w: Writer, clock: _Clock, step: int) -> None:
    lane = clock.lane
    route, lap, hop = clock.here(step)
    if step == 0:
        lane.attend_own_backward(w)
    elif hop in route.viewers[lap]:
        tokens = route.carried(lap, hop)
        name = _declare(w, lane, f"grad_kv{step}", tokens, route.home, "grad_kv")
        lane.backward(w, lane.mine, tokens, kv=_buffer(step), grad_kv=name)


def _chain(route: Route, lap: int) -> tuple[int, ...]:
    """The hops of a lap that add to the block's gradient away from home, in order."""
    return route.viewers[lap]


def _sum_name(route: Route, lap: int, hop: int, step: int) -> str:
    """Where the lap's sum lies after hop `hop`: in what came in, or in the rank's own part where it is the first."""
    return f"grad_kv{step}" if _chain(route, lap)[0] == hop else f"sum{step}"


def _pass_on(w: Writer, clock: _Clock, step: int) -> tuple[list[Message], list[Message]]:
    """Sums of gradients on their way to the rank that adds its own part at the end of `step`."""
    lane, (lap, hop) = clock.lane, divmod(step, clock.hops)
    sends, recvs = [], []
    route = clock.route(lap, hop)
    chain = _chain(route, lap)
    if hop in chain and hop != chain[0]:
        tokens = route.carried(lap, chain[0])
        before = chain[chain.index(hop) - 1]
        name = _declare(w, lane, f"sum{step}", tokens, route.home, "grad_kv")
        recvs.append(lane.message(route.at(lap, before), "grad_kv", name, tokens, exact=True))
    for earlier in range(hop):
        passing = clock.route(lap, earlier)
        chain = _chain(passing, lap)
        if earlier in chain and hop in chain and chain.index(hop) == chain.index(earlier) + 1:
            name = _sum_name(passing, lap, earlier, lap * clock.hops + earlier)
            tokens = passing.carried(lap, chain[0])
            sends.append(lane.message(passing.at(lap, hop), "grad_kv", name, tokens, exact=True))
    return sends, recvs


def _return_home(w: Writer, clock: _Clock, step: int) -> tuple[list[Message], list[Message]]:
    """A lap's sums go home in the batch after the one in which their last part was computed."""
    lane = clock.lane
    sends, recvs = [], []
    if step > 0:
        route, lap, hop = clock.here(step - 1)
        chain = _chain(route, lap)
        if chain and hop == chain[-1]:
            name = _sum_name(route, lap, hop, step - 1)
            sends.append(lane.message(route.home, "grad_kv", name, route.carried(lap, chain[0]), exact=True))
        own = Route(lane, lane.me)
        chain = _chain(own, lap)
        if chain and hop == chain[-1]:
            tokens = own.carried(lap, chain[0])
            name = _declare(w, lane, f"home{lap}", tokens, lane.me, "grad_kv")
            recvs.append(lane.message(own.at(lap, hop), "grad_kv", name, tokens, exact=True))
    return sends, recvs


def _settle(w: Writer, clock: _Clock, step: int, sent: list[Message], homed: list[Message]) -> None:
    """Add what came in, and let go of what was sent and of the keys of the step."""
    lane = clock.lane
    for message in homed:
        w.add(message.buffer, lane.names["grad_kv"])
        w.free(message.buffer)
    for message in sent:
        w.free(message.buffer)
    if step == clock.steps:
        return
    route, lap, hop = clock.here(step)
    chain = _chain(route, lap)
    if step and hop in chain and hop != chain[0]:
        w.add(f"grad_kv{step}", f"sum{step}")
        w.free(f"grad_kv{step}")
    if hop and route.travels(lap, hop):
        w.free(_buffer(step))


RING = Exchange(forward, backward, "Ring Attention, arXiv 2310.01889; two levels: LoongTrain, arXiv 2406.18485")
