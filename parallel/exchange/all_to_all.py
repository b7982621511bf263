"""Tokens for heads inside a group (DeepSpeed-Ulysses, arXiv 2309.14509): each rank all tokens of its unit, some heads.

Query heads split as evenly as they go, and a rank receives only the key heads that they need: with more ranks than key
heads, or heads that do not divide, some key heads go to several ranks. Their gradients then come back as partial sums,
in fp32, and are added in the order of ranks. What is complete (out, dq, and dk, dv of heads that one rank holds) comes
back in the model's dtype: it would be cast to that anyway.
"""

from parallel.exchange.lane import Exchange, Lane, Scene
from parallel.plan.ir import Heads, Message
from parallel.plan.placement import Placement
from parallel.plan.tokens import TokenSet
from parallel.plan.writer import Writer

COMM = "cp_inner"


class HeadGroup:
    """The ranks of one unit from the view of `rank`: who holds which heads, and which tokens."""

    def __init__(self, scene: Scene, placement: Placement, rank: int) -> None:
        self.scene, self.shape, self.rank = scene, scene.shape, rank
        n, self.placement = placement.split, placement
        self.unit_index, self.me = divmod(rank, n)
        self.unit: TokenSet = placement.units[self.unit_index]
        self.ranks = range(self.unit_index * n, (self.unit_index + 1) * n)
        self.tokens = [placement.sets[r] for r in self.ranks]
        self.heads = [head_split(self.shape.H, n, i) for i in range(n)]
        self.key_heads = [self.shape.key_heads(heads) for heads in self.heads]
        stops = [stop for _, stop in self.key_heads]
        self.repeats = any(first < stop for (first, _), stop in zip(self.key_heads[1:], stops))

    @property
    def mine(self) -> TokenSet:
        return self.tokens[self.me]

    @property
    def room(self) -> int:
        return max(unit.count for unit in self.placement.units)

    @property
    def others(self) -> list[int]:
        return [i for i in range(len(self.ranks)) if i != self.me]

    def heads_of(self, kind: str, member: int) -> Heads:
        return self.key_heads[member] if kind in ("kv", "grad_kv") else self.heads[member]

    def _message(self, i: int, kind: str, buffer: str, tokens: TokenSet, heads: Heads, exact: bool = False) -> Message:
        return Message(self.ranks[i], kind, buffer, tokens, heads, exact)  # pyright: ignore[reportArgumentType]

    def scatter_heads(self, w: Writer, batch: int, kinds: dict[str, str], saved: bool) -> dict[str, str]:
        """`x[T@inner, H] -> x[T, H@inner]` for each (kind: buffer); the buffers that then hold the member's heads."""
        sends, recvs, made = [], [], {}
        for kind, source in kinds.items():
            own = self.heads_of(kind, self.me)
            name = f"{source}.heads"
            role = "saved" if saved else "temporary"
            made[kind] = w.buffer(name, kind, self.unit, own, False, role, self.room)  # pyright: ignore[reportArgumentType]
            for i in self.others:
                sends.append(self._message(i, kind, source, self.mine, self.heads_of(kind, i)))
                recvs.append(self._message(i, kind, name, self.tokens[i], own))
        pending = w.post(batch, COMM, sends, recvs)
        for kind, source in kinds.items():
            w.copy(source, made[kind], self.mine, self.heads_of(kind, self.me))
        w.wait(pending)
        return made

    def gather_heads(self, w: Writer, batch: int, kinds: dict[str, tuple[str, str]]) -> None:
        """`x[T, H@inner] -> x[T@inner, H]` of complete results, for each kind: (source, into)."""
        sends, recvs = [], []
        for kind, (source, into) in kinds.items():
            for i in self.others:
                sends.append(self._message(i, kind, source, self.tokens[i], self.heads_of(kind, self.me)))
                recvs.append(self._message(i, kind, into, self.mine, self.heads_of(kind, i)))
        pending = w.post(batch, COMM, sends, recvs)
        for kind, (source, into) in kinds.items():
            w.copy(source, into, self.mine, self.heads_of(kind, self.me))
        w.wait(pending)

    def sum_key_gradients(self, w: Writer, batch: int, source: str, into: str) -> None:
        """Partial dk, dv of heads that several ranks hold, added up in the order of ranks."""
        own, sends, recvs = self.key_heads[self.me], [], []
        parts = {}
        for i in self.others:
            parts[i] = w.buffer(f"{into}.{i}", "grad_kv", self.mine, self.key_heads[i], exact=True)
            sends.append(self._message(i, "grad_kv", source, self.tokens[i], own, exact=True))
            recvs.append(self._message(i, "grad_kv", parts[i], self.mine, self.key_heads[i], exact=True))
        pending = w.post(batch, COMM, sends, recvs)
        w.wait(pending)
        for i in range(len(self.ranks)):
            w.add(source if i == self.me else parts[i], into, self.mine)
        w.free(*parts.values())


def head_split(heads: int, ranks: int, index: int) -> Heads:
    """The heads of part `index`, as even as they go."""
    return index * heads // ranks, (index + 1) * heads // ranks


def _forward(w: Writer, lane: Lane) -> None:
    lane.attend_own(w)


def _backward(w: Writer, lane: Lane) -> None:
    lane.attend_own_backward(w)


# Nothing is left to exchange across: `compose` has made the group hold whole sequences.
ALL_TO_ALL = Exchange(_forward, _backward, "DeepSpeed-Ulysses, arXiv 2309.14509", hierarchical=False)
