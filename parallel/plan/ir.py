"""What a schedule is: for every rank a list of steps over named buffers, in each direction. `docs/plan.md` draws one.

A step names token ranges and ranges of heads, never the tokens themselves, so a plan stays small and can be proved
(`verify`), counted, drawn and executed from the same object. Ranks are numbered within their cp group.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from parallel.plan.tokens import TokenSet

Heads = tuple[int, int]  # half-open; of query heads, or of key heads for kinds that hold keys
ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
CLASSES = ("kv", "q", "out", "lse", "grad_kv", "grad_q", "grad_out")

Role = Literal["input", "saved", "accumulator", "result", "temporary"]
Kind = Literal["q", "kv", "out", "partial", "grad_out", "stats", "grad_q", "grad_kv"]


@dataclass(frozen=True)
class AttentionShape:
    """Query heads H, key heads Hkv, widths D of queries and keys and Dv of values, and the model's dtype.

    Raises:
        ValueError: heads that do not group, widths outside 1..256, an unknown dtype.
    """

    H: int
    Hkv: int
    D: int
    Dv: int
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        if self.H < 1 or self.Hkv < 1 or self.H % self.Hkv:
            raise ValueError(f"{self.Hkv} key heads do not divide {self.H} query heads; use a divisor")
        if not (1 <= self.D <= 256 and 1 <= self.Dv <= 256):
            raise ValueError(f"D={self.D} and Dv={self.Dv} must lie in 1..256; use more, narrower heads")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype={self.dtype!r} is unknown; choose one of {', '.join(ITEM_BYTES)}")

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.H // self.Hkv

    def key_heads(self, heads: Heads) -> Heads:
        """The key heads that query heads `heads` attend to."""
        first, stop = heads
        return (0, 0) if first == stop else (first // self.group, (stop - 1) // self.group + 1)

    def item_bytes(self, exact: bool) -> int:
        """Bytes of a number: of the model's dtype, or of a partial result (fp32; fp64 for fp64)."""
        return max(ITEM_BYTES[self.dtype], 4) if exact else ITEM_BYTES[self.dtype]


class Field(NamedTuple):
    """One tensor of a buffer, `[tokens, heads, width]`: its class of traffic, and whether it is exact by nature."""

    name: str
    traffic: str
    keys: bool  # its heads are key heads
    exact: bool  # fp32 (fp64 for fp64), never the model's dtype


def fields_of(kind: Kind) -> tuple[Field, ...]:
    """The tensors that make up a buffer or a message of `kind`, in wire order."""
    return _FIELDS[kind]


_FIELDS: dict[str, tuple[Field, ...]] = {
    "q": (Field("q", "q", False, False),),
    "kv": (Field("k", "kv", True, False), Field("v", "kv", True, False)),
    "out": (Field("out", "out", False, False),),
    "partial": (Field("out", "out", False, True), Field("lse", "lse", False, True)),
    "grad_out": (Field("dout", "grad_out", False, False),),
    "stats": (Field("lse", "lse", False, True), Field("delta", "lse", False, True)),
    "grad_q": (Field("dq", "grad_q", False, True),),
    "grad_kv": (Field("dk", "grad_kv", True, True), Field("dv", "grad_kv", True, True)),
}


def width_of(name: str, shape: AttentionShape) -> int:
    """Numbers per token and head of the field `name`."""
    if name in ("lse", "delta"):
        return 1
    return shape.D if name in ("q", "k", "dq", "dk") else shape.Dv


class Buffer(NamedTuple):
    """Tokens x heads of one kind on one rank.

    Attributes:
        exact: holds partial results, in fp32 (fp64 for fp64); else the model's dtype.
        role: input; saved (made forward, read backward); accumulator (saved, and the one partial result of a rank into
            which all others merge: where a sink joins, once); result; or temporary.
        capacity: tokens to reserve, whatever the documents; at least `tokens.count`.
    """

    kind: Kind
    tokens: TokenSet
    heads: Heads
    exact: bool = False
    role: Role = "temporary"
    capacity: int = 0

    @property
    def kept(self) -> bool:
        """Whether forward leaves it to backward."""
        return self.role in ("saved", "accumulator")

    def bytes(self, shape: AttentionShape) -> int:
        """Bytes to reserve for it."""
        return self.capacity * sum(c for _, c in token_bytes(self.kind, self.heads, self.exact, shape))


def token_bytes(kind: Kind, heads: Heads, exact: bool, shape: AttentionShape) -> list[tuple[str, int]]:
    """(class of traffic, bytes) of one token of `kind` for each of its tensors."""
    count = heads[1] - heads[0]
    return [
        (field.traffic, count * width_of(field.name, shape) * shape.item_bytes(exact and field.exact))
        for field in fields_of(kind)
    ]


class Message(NamedTuple):
    """Tokens x heads that travel to or from `peer`, out of or into a buffer; `exact` says how partial fields travel."""

    peer: int
    kind: Kind
    buffer: str
    tokens: TokenSet
    heads: Heads
    exact: bool = False


class Post(NamedTuple):
    """Start one grouped batch of messages on a communicator. All ranks of it use the same number for the same batch."""

    batch: int
    comm: str
    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]


class Wait(NamedTuple):
    """Until the batch is done, what it sends must not change and what it receives must not be read."""

    batch: int
    comm: str


class Attend(NamedTuple):
    """Merge attention of `q_tokens` over `k_tokens` for query heads `heads` into the partial result `into`."""

    q: str
    kv: str
    into: str
    q_tokens: TokenSet
    k_tokens: TokenSet
    heads: Heads


class MakeStats(NamedTuple):
    """What backward needs of a finished partial result: lse, and delta = rowsum(dout * out)."""

    partial: str
    grad_out: str
    into: str


class AttendBackward(NamedTuple):
    """Add the gradients of the same block of attention into `into_q` (dq) and `into_kv` (dk, dv)."""

    q: str
    kv: str
    grad_out: str
    stats: str
    into_q: str
    into_kv: str
    q_tokens: TokenSet
    k_tokens: TokenSet
    heads: Heads


class Merge(NamedTuple):
    """Merge a partial result into another by log-sum-exp."""

    source: str
    into: str


class Add(NamedTuple):
    """Add tokens x heads of a gradient into another."""

    source: str
    into: str
    tokens: TokenSet
    heads: Heads


class Copy(NamedTuple):
    """Move tokens x heads between two buffers of a rank; their orders of tokens may differ (a reorder)."""

    source: str
    into: str
    tokens: TokenSet
    heads: Heads


class Free(NamedTuple):
    """The buffer is not used again."""

    buffer: str


Step = Post | Wait | Attend | MakeStats | AttendBackward | Merge | Add | Copy | Free


@dataclass(slots=True)
class Program:
    """One rank's steps in one direction, and the buffers that they name.

    Attributes:
        results: which buffer holds `out`, or `grad_q` and `grad_kv`, at the end.
        slabs: (bytes, number) of slabs to reserve before the first batch, so that memory never changes afterwards.
    """

    rank: int
    buffers: dict[str, Buffer] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)
    slabs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def accumulators(self) -> list[str]:
        """The buffers of that role: one, as `verify` demands."""
        return [name for name, buffer in self.buffers.items() if buffer.role == "accumulator"]
