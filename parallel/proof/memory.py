"""A rank's buffers while its steps are run on symbols: what was written, what is in flight, what a sum is made of."""

from collections.abc import Callable
from dataclasses import dataclass, field

from parallel.plan.ir import Buffer, Heads, Kind, Program, fields_of
from parallel.plan.tokens import EMPTY, TokenSet
from parallel.proof.coverage import SINK, Block, covered, meets, repeats


class PlanError(ValueError):
    """A plan that must not run."""


Region = tuple[TokenSet, Heads]
Held = tuple[Block, TokenSet, Heads]  # what of a block's result lies in which tokens x heads
ZEROED = ("partial", "grad_q", "grad_kv")  # begin as zero, or as the identity of merging
LSE = ("partial", "stats")


@dataclass
class Content:
    """What a buffer holds: which of its tokens x heads were written, and for sums, which blocks went in."""

    written: list[Region] = field(default_factory=list)
    blocks: list[Held] = field(default_factory=list)
    sending: list[Region] = field(default_factory=list)
    receiving: list[Region] = field(default_factory=list)
    used: bool = False
    freed: bool = False


def keeps_sums(kind: Kind, exact: bool) -> bool:
    """Whether a buffer or a message holds its numbers in fp32 (fp64 for fp64), and so rounds no sum."""
    return exact and any(one.exact for one in fields_of(kind))


class Memory:
    """One rank's buffers in one direction. `fail` makes the error that a broken rule raises.

    `left` is what forward left behind, where this is backward.
    """

    def __init__(
        self, program: Program, direction: str, fail: Callable[[str], PlanError], left: dict[str, Content] | None
    ) -> None:
        self.buffers, self.fail = program.buffers, fail
        self.given = ("input", "saved", "accumulator") if direction == "backward" else ("input",)
        self.content: dict[str, Content] = {}
        for name, buffer in program.buffers.items():
            if left is not None and buffer.kept:
                self.content[name] = Content(left[name].written, left[name].blocks)
            else:
                whole = buffer.role == "input" or buffer.kind in ZEROED
                self.content[name] = Content([(buffer.tokens, buffer.heads)] if whole else [])
                if buffer.role == "accumulator":
                    sink = Block(buffer.tokens, EMPTY, buffer.heads, program.rank, SINK)
                    self.content[name].blocks.append((sink, buffer.tokens, buffer.heads))

    def buffer(self, name: str, *kinds: Kind) -> Buffer:
        """The buffer, of one of `kinds` where they are given."""
        if name not in self.buffers:
            raise self.fail(f"buffer {name} is not declared")
        found = self.buffers[name]
        if kinds and found.kind not in kinds:
            raise self.fail(f"{name} is a buffer of {found.kind}, and {' or '.join(kinds)} belongs there")
        return found

    def read(self, name: str, tokens: TokenSet, heads: Heads) -> Content:
        """Its content, where tokens x heads of it may be read now."""
        buffer, content = self.buffer(name), self.content[name]
        if content.freed:
            raise self.fail(f"{name} is read after it was freed")
        if meets(tokens, heads, content.receiving):
            raise self.fail(f"{name} is read while it is received")
        self._within(name, buffer, tokens, heads)
        if not covered(tokens, heads, content.written):
            raise self.fail(f"{name} is read where nothing was written")
        content.used = True
        return content

    def write(self, name: str, tokens: TokenSet, heads: Heads) -> Content:
        """Its content, where tokens x heads of it may be written now."""
        buffer, content = self.buffer(name), self.content[name]
        if content.freed:
            raise self.fail(f"{name} is written after it was freed")
        if meets(tokens, heads, content.sending):
            raise self.fail(f"{name} is written while a batch sends it")
        if meets(tokens, heads, content.receiving):
            raise self.fail(f"{name} is written while a batch receives it")
        if buffer.role in self.given:
            raise self.fail(f"{name} is an input and must not be written")
        self._within(name, buffer, tokens, heads)
        content.used = True
        return content

    def add_to(self, name: str, tokens: TokenSet, heads: Heads, blocks: list[Held]) -> None:
        """Blocks go into a sum, beside those that it holds."""
        buffer, content = self.buffer(name), self.write(name, tokens, heads)
        if not keeps_sums(buffer.kind, buffer.exact):
            raise self.fail(f"{name} is summed into and would be rounded each time; make it exact")
        content.blocks += blocks

    def put(self, name: str, tokens: TokenSet, heads: Heads, blocks: list[Held]) -> None:
        """Tokens x heads are replaced."""
        content = self.write(name, tokens, heads)
        if meets(tokens, heads, [held for _, *held in content.blocks]):  # pyright: ignore[reportArgumentType]
            raise self.fail(f"{name} already holds a sum there, which would be lost")
        content.written.append((tokens, heads))
        content.blocks += blocks

    def free(self, name: str) -> None:
        buffer, content = self.buffer(name), self.content[name]
        if buffer.role != "temporary":
            raise self.fail(f"{name} is freed and is no temporary")
        if content.freed:
            raise self.fail(f"{name} is freed twice")
        if content.sending:
            raise self.fail(f"{name} is freed while a batch sends it")
        if content.receiving:
            raise self.fail(f"{name} is freed while a batch receives it")
        content.freed = True

    def check_end(self) -> None:
        """At the program's end every temporary that was used is free."""
        for name, content in self.content.items():
            if self.buffers[name].role == "temporary" and content.used and not content.freed:
                raise self.fail(f"temporary buffer {name} is never freed")

    def _within(self, name: str, buffer: Buffer, tokens: TokenSet, heads: Heads) -> None:
        if tokens.count == 0 or heads[0] >= heads[1]:
            raise self.fail(f"nothing is read or written of {name}: {tokens} x heads {heads}")
        if repeats(tokens):
            raise self.fail(f"a token of {name} is named twice in {tokens}")
        within = buffer.heads[0] <= heads[0] and heads[1] <= buffer.heads[1]
        if not within or not covered(tokens, heads, [(buffer.tokens, buffer.heads)]):
            raise self.fail(f"{name} does not hold {tokens} x heads {heads}")
