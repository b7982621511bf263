"""Puts a plan together: heads exchanged inside a group where the strategy says so, and an exchange of keys across.

The exchange across runs in a lane (`lane.py`) and is written once, whatever is inside. A double ring is one exchange
over both levels.
"""

import contextlib
import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any

from kernels.mask_spec import MaskSpec
from parallel.exchange.all_to_all import HeadGroup
from parallel.exchange.double_ring import DOUBLE_RING
from parallel.exchange.lane import Dealt, Exchange, Lane, Scene
from parallel.plan.ir import AttentionShape, Program
from parallel.plan.placement import Placement
from parallel.plan.plan import Plan
from parallel.plan.visibility import Visibility
from parallel.plan.writer import Writer

FLAT = {
    "q": "q",
    "kv": "kv",
    "acc": "acc",
    "grad_out": "grad_out",
    "stats": "stats",
    "grad_q": "grad_q",
    "grad_kv": "grad_kv",
}
HEADED = {name: f"{name}.heads" for name in FLAT} | {"acc": "acc", "stats": "stats"}
BEFORE, AFTER = -1, -2  # numbers of the batches around the exchange, on a communicator of their own


@dataclass(frozen=True)
class Composer:
    """What the ranks' programs have in common. `exchange` is None where a sequence stays on one rank or group."""

    axes: dict[str, Any]
    placement: Placement
    scene: Scene
    dealt: tuple[Dealt, ...]  # of each batch group
    exchange: Exchange | None
    double: bool

    def plan(self, ranks: Iterable[int] | None) -> Plan:
        """Write the programs of `ranks`, or of all. ValueError for a rank outside the cp group."""
        size = self.placement.mesh.cp
        wanted = list(range(size)) if ranks is None else sorted(set(ranks))
        if wanted and not 0 <= wanted[0] <= wanted[-1] < size:
            raise ValueError(f"ranks {wanted} are not all among the {size} ranks that share the sequence")
        forward: list[Program | None] = [None] * size
        backward: list[Program | None] = [None] * size
        with _uncollected(len(wanted) > 1):
            for rank in wanted:
                forward[rank], backward[rank] = self._forward(rank), self._backward(rank)
        claims = self.exchange is not None and self.exchange.sends_only_needed
        return Plan(
            self.axes, self.placement, self.scene.shape, self.scene.sight.mask, tuple(forward), tuple(backward), claims
        )

    def _lane(self, rank: int, group: HeadGroup | None) -> Lane:
        placement, n = self.placement, self.placement.group_units
        unit = rank // placement.split
        dealt, first, me = self.dealt[unit // n], unit // n * n, unit % n
        if group is None:
            lap = gcd(placement.mesh.cp_inner, n) if self.double else n
            ranks = tuple(range(first, first + n))
            return Lane(dealt, ranks, me, n if lap == 1 else lap, "cp", (0, self.scene.shape.H), FLAT)
        ranks = tuple(other * placement.split + group.me for other in range(first, first + n))
        return Lane(dealt, ranks, me, n, "cp_outer", group.heads[group.me], HEADED)

    def _group(self, rank: int) -> HeadGroup | None:
        return HeadGroup(self.scene, self.placement, rank) if self.placement.split > 1 else None

    def _across(self, lane: Lane) -> Exchange:
        """The exchange of a lane of several ranks: a ring over several laps is a double one."""
        assert self.exchange is not None
        return DOUBLE_RING if lane.lap_size < lane.size else self.exchange

    def _forward(self, rank: int) -> Program:
        w, shape, mine = Writer(rank), self.scene.shape, self.placement.sets[rank]
        group = self._group(rank)
        lane = self._lane(rank, group)
        room = max(tokens.count for tokens in self.placement.sets)
        w.buffer("q", "q", mine, (0, shape.H), role="input", capacity=room)
        w.buffer("kv", "kv", mine, (0, shape.Hkv), role="input", capacity=room)
        w.buffer("acc", "partial", lane.mine, lane.heads, exact=True, role="accumulator")
        if group:
            group.scatter_heads(w, BEFORE, {"q": "q", "kv": "kv"}, saved=True)
        if self.exchange is None or lane.size == 1:
            lane.attend_own(w)
        else:
            self._across(lane).forward(w, lane)
            w.program.slabs = self.exchange.slabs(lane) if self.exchange.slabs else []
        w.result("out", "acc")
        if group:
            w.buffer("out", "out", mine, (0, shape.H), role="result")
            group.gather_heads(w, AFTER, {"out": ("acc", "out")})
            w.result("out", "out")
        return w.program

    def _backward(self, rank: int) -> Program:
        w, shape, mine = Writer(rank), self.scene.shape, self.placement.sets[rank]
        group = self._group(rank)
        lane = self._lane(rank, group)
        room = max(tokens.count for tokens in self.placement.sets)
        w.buffer("grad_out", "grad_out", mine, (0, shape.H), role="input", capacity=room)
        for kind, heads in (("q", lane.heads), ("kv", lane.key_heads)):
            w.buffer(lane.names[kind], kind, lane.mine, heads, role="saved", capacity=lane.room)  # pyright: ignore[reportArgumentType]
        w.buffer("acc", "partial", lane.mine, lane.heads, exact=True, role="accumulator")
        if group:
            group.scatter_heads(w, BEFORE, {"grad_out": "grad_out"}, saved=False)
        w.buffer("stats", "stats", lane.mine, lane.heads, exact=True, capacity=lane.room)
        w.stats("acc", lane.names["grad_out"], "stats")
        role = "temporary" if group else "result"
        w.buffer(lane.names["grad_q"], "grad_q", lane.mine, lane.heads, exact=True, role=role)
        w.buffer(lane.names["grad_kv"], "grad_kv", lane.mine, lane.key_heads, exact=True, role=role)
        if self.exchange is None or lane.size == 1:
            lane.attend_own_backward(w)
        else:
            self._across(lane).backward(w, lane)
        w.free("stats")
        if group:
            self._return_gradients(w, group)
        w.result("grad_q", "grad_q")
        w.result("grad_kv", "grad_kv")
        return w.program

    def _return_gradients(self, w: Writer, group: HeadGroup) -> None:
        shape, mine = self.scene.shape, group.mine
        w.free("grad_out.heads")
        w.buffer("grad_q", "grad_q", mine, (0, shape.H), role="result")
        w.buffer("grad_kv", "grad_kv", mine, (0, shape.Hkv), exact=group.repeats, role="result")
        complete = {"grad_q": ("grad_q.heads", "grad_q")}
        if not group.repeats:
            complete["grad_kv"] = ("grad_kv.heads", "grad_kv")
        group.gather_heads(w, AFTER, complete)
        if group.repeats:
            group.sum_key_gradients(w, AFTER - 1, "grad_kv.heads", "grad_kv")
        w.free("grad_q.heads", "grad_kv.heads")


@contextlib.contextmanager
def _uncollected(pause: bool) -> Iterator[None]:
    """Without garbage collection, which would walk all ranks' steps again and again and find no cycle among them."""
    pause = pause and gc.isenabled()
    if pause:
        gc.disable()
    try:
        yield
    finally:
        if pause:
            gc.enable()


def build_plan(
    axes: dict[str, Any],
    placement: Placement,
    shape: AttentionShape,
    mask: MaskSpec,
    exchange: Exchange | None,
    ranks: Iterable[int] | None = None,
) -> Plan:
    """The programs of `ranks` (None: all) under `exchange` across, and heads exchanged inside where units are split."""
    scene = Scene(Visibility(placement.layout, mask), shape, axes.get("head_slices"))
    n = placement.group_units
    dealt = tuple(Dealt(scene, placement.units[i : i + n]) for i in range(0, len(placement.units), n))
    return Composer(axes, placement, scene, dealt, exchange, axes.get("inner_exchange") == "ring").plan(ranks)
