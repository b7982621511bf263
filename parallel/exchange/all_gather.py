"""Every rank gathers all keys, in slices of heads so that memory stays bounded (Llama 3, arXiv 2407.21783, 3.3.2).

Under a window only the keys in its reach travel. A gathered buffer is rank-major: where it is not in the sequence's
order, it is attended block by block, or put in order first (`Copy`), whichever moves fewer bytes. While a slice is
computed the next one travels; a member's own keys are computed while the slice's others are on their way. Backward
gathers again and sends each block's gradients home, where they are added in the order of ranks.

The compact form (FlashCP) gathers only keys that some other rank needs: nothing of a document that lies on one rank,
and nothing of a document's last part.
"""

import dataclasses
from functools import cached_property

import numpy as np

from parallel.exchange.lane import Exchange, Lane
from parallel.plan.ir import Heads, Message
from parallel.plan.tokens import EMPTY, TokenSet, join_spans, union
from parallel.plan.writer import Writer

MOST_SLICES = 4


def _slices(lane: Lane) -> list[Heads]:
    """The lane's key heads in parts, as even as they go."""
    first, stop = lane.key_heads
    n = max(1, min(stop - first, lane.scene.head_slices or MOST_SLICES))
    return [(first + i * (stop - first) // n, first + (i + 1) * (stop - first) // n) for i in range(n)]


def _query_heads(lane: Lane, keys: Heads) -> Heads:
    """Those of the lane's query heads that read the key heads `keys`."""
    group = lane.scene.shape.group
    return max(lane.heads[0], keys[0] * group), min(lane.heads[1], keys[1] * group)


def travelling(lane: Lane, queries: int, keys: int) -> TokenSet:
    """What of member `keys` goes to member `queries`: all of it, or a window's halo; compact: what anyone needs."""
    if not lane.compact:
        return lane.dealt.halo(queries, keys)
    kept = lane.dealt.kept
    if ("compact", keys) not in kept:
        sight, sets = lane.scene.sight, lane.sets
        spans = [sight.reach(sets[other]) for other in range(lane.size) if other != keys and lane.sees(other, keys)]
        kept["compact", keys] = sets[keys].clip(join_spans(np.concatenate(spans))) if spans else EMPTY
    return kept["compact", keys]


class _Gathered:
    """What comes together at a member: everyone's keys, in order of ranks, and how they are attended.

    Room for the member's own keys is part of the buffer, so that without a window it is the same for all.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.parts = [lane.mine if b == lane.me else travelling(lane, lane.me, b) for b in range(lane.size)]
        self.shared = not (lane.scene.local or lane.compact)
        self.tokens = lane.dealt.everything if self.shared else TokenSet.concatenate(self.parts)
        self.blocks = [run for run, members in self._runs() if any(lane.sees(lane.me, b) for b in members)]
        self.reorders = self._pays_to_reorder(len(self.blocks))

    @cached_property
    def ordered(self) -> TokenSet:
        """The gathered tokens in the sequence's order."""
        if self.lane.compact:
            return union(self.parts)
        if self.lane.scene.local:
            sight = self.lane.scene.sight
            reach = TokenSet.of((0, sight.layout.total_tokens)).clip(sight.reach(self.lane.mine))
            return union([reach, self.lane.mine.clip(sight.padding)])  # what is in a document sees itself
        kept = self.lane.dealt.kept
        if "ordered" not in kept:
            kept["ordered"] = union(self.parts)
        return kept["ordered"]

    def _runs(self) -> list[tuple[TokenSet, list[int]]]:
        """The others' tokens as few ascending blocks that lie together in the buffer, and whose they are."""
        runs: list[list[int]] = []
        for b, part in enumerate(self.parts):
            if part.count == 0 or b == self.lane.me:
                continue
            before = runs[-1][-1] if runs else b
            if before == b - 1 and self.parts[before].ranges[-1, 1] <= part.ranges[0, 0]:
                runs[-1].append(b)
            else:
                runs.append([b])
        return [
            (TokenSet.concatenate([self.parts[b] for b in run]) if len(run) > 1 else self.parts[run[0]], run)
            for run in runs
        ]

    def _pays_to_reorder(self, blocks: int) -> bool:
        """Whether putting keys in order, and their gradients back, moves fewer bytes than merging block by block."""
        lane, shape = self.lane, self.lane.scene.shape
        width, exact = shape.D + shape.Dv, shape.item_bytes(True)
        query_heads, key_heads = lane.heads[1] - lane.heads[0], lane.key_heads[1] - lane.key_heads[0]
        merging = blocks * lane.mine.count * query_heads * width * 2 * exact  # out forward, dq backward
        moving = self.tokens.count * key_heads * width * (2 * 2 * shape.item_bytes(False) + 2 * exact)
        return blocks > 1 and moving < merging


def _gathered(lane: Lane) -> _Gathered:
    """Made once for both directions."""
    key = ("gathered", lane.me, lane.heads, lane.compact)
    if key not in lane.dealt.kept:
        lane.dealt.kept[key] = _Gathered(lane)
    return lane.dealt.kept[key]


def _gather(
    w: Writer, lane: Lane, at: _Gathered, slices: list[Heads], index: int
) -> tuple[list[Message], list[Message]]:
    """The messages that bring slice `index` of everyone's keys to everyone."""
    if index >= len(slices):
        return [], []
    others, heads = [b for b in range(lane.size) if b != lane.me], slices[index]
    name = w.buffer(f"gathered{index}", "kv", at.tokens, heads)
    sends = [Message(lane.ranks[b], "kv", lane.names["kv"], travelling(lane, b, lane.me), heads) for b in others]
    recvs = [Message(lane.ranks[b], "kv", name, at.parts[b], heads) for b in others]
    return sends, recvs


def _return(
    w: Writer, lane: Lane, at: _Gathered, slices: list[Heads], index: int
) -> tuple[list[Message], list[Message]]:
    """The messages that bring the gradients of slice `index` home."""
    if not 0 <= index < len(slices):
        return [], []
    heads, sends, recvs = slices[index], [], []
    for b in range(lane.size):
        if b != lane.me:
            tokens = travelling(lane, b, lane.me)
            name = w.buffer(f"returned{index}.{b}", "grad_kv", tokens, heads, exact=True)
            sends.append(Message(lane.ranks[b], "grad_kv", f"grad_gathered{index}", at.parts[b], heads, exact=True))
            recvs.append(Message(lane.ranks[b], "grad_kv", name, tokens, heads, exact=True))
    return sends, recvs


def forward(w: Writer, lane: Lane) -> None:
    slices, at, n = _slices(lane), _gathered(lane), lane.names
    pending = w.post(0, lane.comm, *_gather(w, lane, at, slices, 0))
    for index, heads in enumerate(slices):
        query_heads = _query_heads(lane, heads)
        if not at.reorders and lane.sees(lane.me, lane.me):
            w.attend(n["q"], n["kv"], n["acc"], lane.mine, lane.mine, query_heads)
        w.wait(pending)
        pending = w.post(index + 1, lane.comm, *_gather(w, lane, at, slices, index + 1))
        if at.reorders:
            w.attend(n["q"], _put_in_order(w, lane, at, index, heads), n["acc"], lane.mine, at.ordered, query_heads)
            w.free(f"ordered{index}")
            continue
        for block in at.blocks:
            w.attend(n["q"], f"gathered{index}", n["acc"], lane.mine, block, query_heads)
        w.free(f"gathered{index}")


def _put_in_order(w: Writer, lane: Lane, at: _Gathered, index: int, heads: Heads) -> str:
    """A copy of a slice of the gathered keys, and of the member's own, in the sequence's order."""
    ordered = w.buffer(f"ordered{index}", "kv", at.ordered, heads)
    w.copy(lane.names["kv"], f"gathered{index}", lane.mine, heads)
    w.copy(f"gathered{index}", ordered, at.tokens, heads)
    w.free(f"gathered{index}")
    return ordered


def backward(w: Writer, lane: Lane) -> None:
    slices, at = _slices(lane), _gathered(lane)
    pending = w.post(0, lane.comm, *_gather(w, lane, at, slices, 0))
    for index in range(len(slices) + 2):  # a slice's gradients come home two batches after its keys came here
        now = index < len(slices)
        if now and not at.reorders and lane.sees(lane.me, lane.me):
            lane.backward(w, lane.mine, lane.mine, _query_heads(lane, slices[index]))
        w.wait(pending)
        _settle(w, lane, slices, index - 2)
        sends, recvs = _gather(w, lane, at, slices, index + 1)
        back, home = _return(w, lane, at, slices, index - 1)
        pending = w.post(index + 1, lane.comm, sends + back, recvs + home)
        if now:
            _compute(w, lane, at, index, slices[index])


def _compute(w: Writer, lane: Lane, at: _Gathered, index: int, heads: Heads) -> None:
    query_heads = _query_heads(lane, heads)
    grad = w.buffer(f"grad_gathered{index}", "grad_kv", at.tokens, heads, exact=True)
    if not at.reorders:
        for block in at.blocks:
            lane.backward(w, lane.mine, block, query_heads, kv=f"gathered{index}", grad_kv=grad)
        w.free(f"gathered{index}")
        return
    held = _put_in_order(w, lane, at, index, heads)
    into = w.buffer(f"grad_ordered{index}", "grad_kv", at.ordered, heads, exact=True)
    lane.backward(w, lane.mine, at.ordered, query_heads, kv=held, grad_kv=into)
    w.copy(into, grad, at.tokens, heads)
    w.add(into, lane.names["grad_kv"], lane.mine)
    w.free(held, into)


def _settle(w: Writer, lane: Lane, slices: list[Heads], index: int) -> None:
    """Add the gradients of slice `index` that came home, in the order of ranks, and let go of what was sent."""
    if not 0 <= index < len(slices):
        return
    for b in range(lane.size):
        if b != lane.me:
            w.add(f"returned{index}.{b}", lane.names["grad_kv"])
            w.free(f"returned{index}.{b}")
    w.free(f"grad_gathered{index}")


ALL_GATHER = Exchange(forward, backward, "Llama 3, arXiv 2407.21783, section 3.3.2")


def compact_forward(w: Writer, lane: Lane) -> None:
    forward(w, dataclasses.replace(lane, compact=True))


def compact_backward(w: Writer, lane: Lane) -> None:
    backward(w, dataclasses.replace(lane, compact=True))


COMPACT_ALL_GATHER = Exchange(compact_forward, compact_backward, "FlashCP, section 4.3: sharding-aware communication")
