"""A lane: the ranks among which an exchange runs, and one rank's buffers in it.

Without an inner level the lane is the whole cp group. With all_to_all inside, there is one lane for each inner index,
whose ranks hold the same heads of whole units of tokens; the exchange does not notice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.mask_spec import MaskSpec
from parallel.plan.ir import AttentionShape, Heads, Message
from parallel.plan.mesh import MeshSpec
from parallel.plan.tokens import EMPTY, TokenSet
from parallel.plan.visibility import Visibility
from parallel.plan.writer import Writer


@dataclass(frozen=True)
class Scene:
    """What all ranks share while a plan is made: the mask in closed form, the shape, and the exchange's options."""

    sight: Visibility
    shape: AttentionShape
    head_slices: int | None

    @property
    def local(self) -> bool:
        """Whether keys out of a window's or a chunk's reach need not travel."""
        return self.sight.mask.local


class Dealt:
    """Tokens dealt to the members of lanes, and what is found out about them once for all ranks.

    `kept` is where an exchange keeps what depends on these sets alone.
    """

    def __init__(self, scene: Scene, sets: tuple[TokenSet, ...]) -> None:
        self.scene, self.sets = scene, sets
        self.kept: dict[Any, Any] = {}

    @cached_property
    def sees(self) -> NDArray[np.bool_]:
        """[queries' member, keys' member]: whether some query of one sees some key of the other."""
        return self.scene.sight.any_of(self.sets, self.sets)

    @cached_property
    def everything(self) -> TokenSet:
        """All members' tokens, one member's after the other's."""
        return TokenSet.concatenate(self.sets)

    def halo(self, queries: int, keys: int) -> TokenSet:
        """The keys of member `keys` that travel to `queries`: all, or those in reach of a window or a chunk."""
        if not self.scene.local:
            return self.sets[keys]
        found = self.kept.get(("halo", queries, keys))
        if found is None and not self.sees[queries, keys]:
            found = self.kept["halo", queries, keys] = EMPTY
        if found is None:
            found = self.scene.sight.needed_keys(self.sets[queries], self.sets[keys])
            self.kept["halo", queries, keys] = found
        return found


@dataclass(frozen=True)
class Lane:
    """Member `me` of a lane.

    Attributes:
        dealt: the tokens that each member holds.
        ranks: the members' cp ranks.
        lap_size: members per inner lap where the lane is a double ring; otherwise all of them.
        comm: the communicator of the lane.
        heads: the query heads that the lane works on; its keys are those that these heads need.
        compact: gather only keys that some other member needs.
        names: buffers that hold q, kv, acc, grad_out, stats, grad_q and grad_kv of the member's own tokens.
    """

    dealt: Dealt
    ranks: tuple[int, ...]
    me: int
    lap_size: int
    comm: str
    heads: Heads
    names: dict[str, str]
    compact: bool = False

    @property
    def scene(self) -> Scene:
        return self.dealt.scene

    @property
    def sets(self) -> tuple[TokenSet, ...]:
        return self.dealt.sets

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def room(self) -> int:
        """Tokens to reserve for what a member sends: the most that any holds, which no document changes."""
        return max(tokens.count for tokens in self.sets)

    @property
    def mine(self) -> TokenSet:
        return self.sets[self.me]

    @cached_property
    def key_heads(self) -> Heads:
        return self.scene.shape.key_heads(self.heads)

    def message(self, member: int, kind: str, buffer: str, tokens: TokenSet, exact: bool = False) -> Message:
        """Tokens of `kind` to or from `member`, for all heads of the lane."""
        heads = self.key_heads if kind in ("kv", "grad_kv") else self.heads
        return Message(self.ranks[member], kind, buffer, tokens, heads, exact)  # pyright: ignore[reportArgumentType]

    def attend_own(self, w: Writer) -> None:
        """The member's queries over its own keys."""
        if self.sees(self.me, self.me):
            n = self.names
            w.attend(n["q"], n["kv"], n["acc"], self.mine, self.mine, self.heads)

    def attend_own_backward(self, w: Writer) -> None:
        if self.sees(self.me, self.me):
            self.backward(w, self.mine, self.mine)

    def backward(
        self, w: Writer, q_tokens: TokenSet, k_tokens: TokenSet, heads: Heads | None = None, **other: str
    ) -> None:
        """The gradients of a block; `other` replaces buffers of `names`."""
        n = {**self.names, **other}
        w.attend_backward(
            n["q"], n["kv"], n["grad_out"], n["stats"], n["grad_q"], n["grad_kv"],
            q_tokens, k_tokens, self.heads if heads is None else heads,
        )  # fmt: skip

    def sees(self, queries: int, keys: int) -> bool:
        """Whether some query of member `queries` sees some key of member `keys`."""
        return bool(self.dealt.sees[queries, keys])


Emit = Callable[[Writer, Lane], None]


@dataclass(frozen=True)
class Exchange:
    """How queries meet keys in a lane.

    Attributes:
        forward, backward: write one member's steps.
        hierarchical: whether it runs across groups that exchange heads inside.
        shardings: those it makes sense with; None for any.
        why_sharding: the reason where some are left out.
        sends_only_needed: no key or query travels that its receiver does not need.
        check: raises ValueError for what it cannot do.
        slabs: (bytes, number) of buffers to reserve for a member, whatever the documents; None: as they are needed.
    """

    forward: Emit
    backward: Emit
    source: str
    hierarchical: bool = True
    shardings: tuple[str, ...] | None = None
    why_sharding: str = ""
    sends_only_needed: bool = False
    check: Callable[[MeshSpec, AttentionShape, MaskSpec], None] = lambda mesh, shape, mask: None
    slabs: Callable[[Lane], list[tuple[int, int]]] | None = None
