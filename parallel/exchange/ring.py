"""Keys travel from rank to rank while queries stay (Ring Attention, arXiv 2310.01889).

A block stops travelling where no later rank sees it, and under a window or a chunk it carries only what later ranks
still need. Backward: keys travel again; the sum of a block's gradients follows it from one rank that saw it to the
next, in fp32, and the last one sends it home.
"""

from collections import defaultdict
from functools import cached_property

import numpy as np

from parallel.exchange.lane import Dealt, Exchange, Lane
from parallel.plan.ir import Message
from parallel.plan.tokens import EMPTY, EMPTY_SPANS, TokenSet, join_spans
from parallel.plan.writer import Writer


class RingBlock:
    """How the keys of member `home` travel: after h hops they lie at member (home + h) mod n."""

    def __init__(self, dealt: Dealt, home: int) -> None:
        self.dealt, self.home = dealt, home
        self.viewers = [hop for hop in range(1, len(dealt.sets)) if dealt.sees[self.at(hop), home]]
        self.last = self.viewers[-1] if self.viewers else 0  # the hop after which it goes no further

    def at(self, hop: int) -> int:
        return (self.home + hop) % len(self.dealt.sets)

    def carried(self, hop: int) -> TokenSet:
        """What of the block comes to its place after `hop` hops: what is seen there or later."""
        return self._needed[hop] if self.dealt.scene.local else self.dealt.sets[self.home]

    @cached_property
    def _needed(self) -> list[TokenSet]:
        block, sight = self.dealt.sets[self.home], self.dealt.scene.sight
        most = int(sight.segments(block).size.sum())  # padding is never needed
        spans, needed, found = EMPTY_SPANS, EMPTY, [EMPTY] * len(self.dealt.sets)
        for hop in range(len(found) - 1, -1, -1):
            if hop in self.viewers and needed.count < most:
                spans = join_spans(np.concatenate([spans, sight.reach(self.dealt.sets[self.at(hop)])]))
                needed = block.clip(spans)
            found[hop] = needed
        return found


class _Ring:
    """One member's view: block `here(step)` lies here after `step` hops, and then goes to the next member."""

    def __init__(self, w: Writer, lane: Lane) -> None:
        self.w, self.lane, kept = w, lane, lane.dealt.kept
        if "blocks" not in kept:
            kept["blocks"] = [RingBlock(lane.dealt, home) for home in range(lane.size)]
        self.blocks: list[RingBlock] = kept["blocks"]

    def here(self, step: int) -> RingBlock:
        return self.blocks[(self.lane.me - step) % self.lane.size]

    def held(self, step: int) -> str:
        """The buffer of the keys that lie here."""
        return f"kv{step}" if step else self.lane.names["kv"]

    def declare(self, name: str, kind: str, tokens: TokenSet, home: int) -> str:
        room, exact = self.lane.sets[home].count, kind == "grad_kv"
        return self.w.buffer(name, kind, tokens, self.lane.key_heads, exact, capacity=room)  # pyright: ignore[reportArgumentType]

    def hop(self, step: int) -> tuple[list[Message], list[Message]]:
        """The messages that bring each block one hop on."""
        sends, recvs, lane = [], [], self.lane
        leaving, coming = self.here(step), self.here(step + 1)
        if step + 1 <= leaving.last:
            sends.append(lane.message(leaving.at(step + 1), "kv", self.held(step), leaving.carried(step + 1)))
        if step + 1 <= coming.last:
            tokens = coming.carried(step + 1)
            name = self.declare(self.held(step + 1), "kv", tokens, coming.home)
            recvs.append(lane.message(coming.at(step), "kv", name, tokens))
        return sends, recvs


def forward(w: Writer, lane: Lane) -> None:
    """A member's steps: post the next hop, attend the block that lies here, wait."""
    ring = _Ring(w, lane)
    for step in range(lane.size):
        block = ring.here(step)
        pending = w.post(step, lane.comm, *ring.hop(step))
        if step == 0:
            lane.attend_own(w)
        elif step in block.viewers:
            w.attend(lane.names["q"], ring.held(step), lane.names["acc"], lane.mine, block.carried(step), lane.heads)
        w.wait(pending)
        if 0 < step <= block.last:
            w.free(ring.held(step))


def backward(w: Writer, lane: Lane) -> None:
    """The same, with sums of gradients following the keys; one step more, in which the last sums come home."""
    ring = _Ring(w, lane)
    sums = _Sums(ring)
    for step in range(lane.size + 1):
        block = ring.here(step)
        sends, recvs = ring.hop(step)
        pending = w.post(step, lane.comm, sends + sums.sends[step], recvs + sums.recvs[step])
        if step == 0:
            lane.attend_own_backward(w)
        elif step in block.viewers and step < lane.size:
            tokens = block.carried(step)
            name = ring.declare(f"grad_kv{step}", "grad_kv", tokens, block.home)
            lane.backward(w, lane.mine, tokens, kv=ring.held(step), grad_kv=name)
        w.wait(pending)
        sums.settle(step)
        if 0 < step <= block.last:
            w.free(ring.held(step))


class _Sums:
    """Where gradients of travelling keys go: per step, what is sent and received, and what is then added.

    A block's sum is begun by its first viewer. It reaches the next viewer in the batch of that one's own step, and goes
    home in the batch after the last one's step.
    """

    def __init__(self, ring: _Ring) -> None:
        self.ring, lane = ring, ring.lane
        self.sends: dict[int, list[Message]] = defaultdict(list)
        self.recvs: dict[int, list[Message]] = defaultdict(list)
        self.sums: dict[int, str] = {}  # step -> the sum that comes in then, to be added to and sent on
        self.homes: dict[int, str] = {}  # step -> the sum of this member's own block
        for step in range(1, lane.size):
            if step in ring.here(step).viewers:
                self._follow(step, ring.here(step))
        own = ring.here(0)
        if own.viewers:
            tokens, step = own.carried(own.viewers[0]), own.last + 1
            self.homes[step] = ring.declare("home", "grad_kv", tokens, lane.me)
            self.recvs[step].append(lane.message(own.at(own.last), "grad_kv", "home", tokens, exact=True))

    def _follow(self, step: int, block: RingBlock) -> None:
        """What becomes of the sum of the block that lies here at `step`, to which this member adds."""
        lane, place, tokens = self.ring.lane, block.viewers.index(step), block.carried(block.viewers[0])
        name = f"grad_kv{step}"
        if place:
            name = self.sums[step] = self.ring.declare(f"sum{step}", "grad_kv", tokens, block.home)
            before = block.at(block.viewers[place - 1])
            self.recvs[step].append(lane.message(before, "grad_kv", name, tokens, exact=True))
        # on to the next viewer, in the batch of its step; or home
        after = step + 1 if step == block.last else block.viewers[place + 1]
        peer = block.home if step == block.last else block.at(after)
        self.sends[after].append(lane.message(peer, "grad_kv", name, tokens, exact=True))

    def settle(self, step: int) -> None:
        """After the batch of `step`: add what came in, let go of what was sent."""
        w = self.ring.w
        if step in self.homes:
            w.add(self.homes[step], self.ring.lane.names["grad_kv"])
            w.free(self.homes[step])
        w.free(*(message.buffer for message in self.sends[step]))
        if step in self.sums:
            w.add(f"grad_kv{step}", self.sums[step])
            w.free(f"grad_kv{step}")


RING = Exchange(forward, backward, "Ring Attention, arXiv 2310.01889")
