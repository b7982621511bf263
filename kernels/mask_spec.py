"""Who sees whom inside a document, written once: for ints, numpy arrays and tensors alike. Needs nothing but Python.

    MaskSpec()                            causal: a query sees its own position and all before it
    MaskSpec(causal=False)                full
    MaskSpec(window=w)                    its own position and the w - 1 before it (as many after it, if not causal)
    MaskSpec(chunk=c)                     only its own chunk of c tokens, counted from the document's start (Llama 4)
    MaskSpec(prefix=P)                    causal, but the first min(P, length) tokens all see each other (prefix LM)
    MaskSpec(window=w, first=s)           the window, and the document's first s keys, if they lie before all that the
                                          window holds (StreamingLLM's sinks); beside a chunk likewise

A mask is a list of disjoint **bands**. In each a query sees one interval of keys, and both ends of the interval never
decrease from query to query: the form that kernels take (`kernels.mask.IntervalMask`). A band is made of **pieces**,
one after the other along the queries; in a piece the interval is bounded by distances to the query, by fixed
positions, and by chunks, so that plans can count and cut it in closed form (`parallel.plan.visibility`).

| | alone | with window | with chunk | with prefix | with first |
|---|---|---|---|---|---|
| causal | yes | yes | yes | yes | needs a window or a chunk |
| full (causal=False) | yes | yes | yes | no: all see each other already | needs a window or a chunk |
| window | | | no: a layer has one or the other | causal | yes |
| chunk | | | | causal | first <= chunk |
| prefix | | | | | yes, where first is allowed |
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

UNBOUNDED = 2**40  # a distance longer than any sequence
Ints = Any  # a Python int, an int64 numpy array or an int64 tensor


@dataclass(frozen=True)
class BandPiece:
    """Queries at positions [q_start, q_stop) of a document, and the keys that they see there.

    A query at position p sees keys k in [k_start, k_stop) with p - before <= k <= p + after and, where there is a
    `chunk`, in its own chunk.
    """

    before: int = UNBOUNDED
    after: int = UNBOUNDED
    q_start: int = -UNBOUNDED
    q_stop: int = UNBOUNDED
    k_start: int = 0
    k_stop: int = UNBOUNDED
    chunk: int | None = None

    def keys(self, position: Ints, length: Ints) -> tuple[Ints, Ints]:
        """[low, high): what queries at `position`, all of the piece, see in documents of `length` tokens."""
        low = _most(position - self.before, self.k_start)
        high = _least(_least(position + self.after + 1, self.k_stop), length)
        if self.chunk is not None:
            begin = position // self.chunk * self.chunk
            low, high = _most(low, begin), _least(high, begin + self.chunk)
        low = _least(low, length)
        return low, _most(high, low)

    def pairs(self, length: int) -> int:
        """Allowed (query, key) pairs of the piece in a document of `length` tokens, in closed form."""
        first, stop = max(self.q_start, 0), min(self.q_stop, length)
        chunk = self.chunk or max(length, 1)
        total, begin = 0, first // chunk * chunk
        inner = max(0, stop // chunk - -(-max(first, self.k_start) // chunk)) if self.k_stop >= length else 0
        if inner > 2:  # chunks that lie whole inside are all alike
            whole = -(-max(first, self.k_start) // chunk) * chunk
            total += inner * self._counted(whole, whole + chunk, whole, whole + chunk)
            edges = [*range(begin, whole, chunk), *range(whole + inner * chunk, stop, chunk)]
        else:
            edges = [*range(begin, stop, chunk)]
        for edge in edges:
            keys = max(self.k_start, edge), min(self.k_stop, length, edge + chunk)
            total += self._counted(max(first, edge), min(stop, edge + chunk), *keys)
        return total

    def _counted(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> int:
        """Pairs of queries [q_start, q_stop) and keys [k_start, k_stop) within `before` and `after`."""
        if q_stop <= q_start or k_stop <= k_start:
            return 0
        upto = [_sum_clipped(q_start + d - k_start, q_stop - q_start, k_stop - k_start) for d in (
            self.after + 1, -self.before)]  # fmt: skip
        return upto[0] - upto[1]


@dataclass(frozen=True)
class Band:
    """Pieces whose queries follow one another, the last without an end: one interval of keys a query, never decreasing.

    ValueError for pieces that are out of order.
    """

    pieces: tuple[BandPiece, ...]

    def __post_init__(self) -> None:
        stops = [piece.q_stop for piece in self.pieces]
        if not stops or [*stops[:-1]] != [p.q_start for p in self.pieces[1:]] or stops[-1] != UNBOUNDED:
            raise ValueError(f"a band's pieces must follow one another to the end, not {self.pieces}")

    def keys(self, position: Ints, length: Ints) -> tuple[Ints, Ints]:
        """[low, high): what queries at `position` see in documents of `length` tokens; low = high where nothing."""
        low, high = self.pieces[-1].keys(position, length)
        for piece in self.pieces[-2::-1]:
            here = position < piece.q_stop
            low, high = (_choose(here, a, b) for a, b in zip(piece.keys(position, length), (low, high)))
        start = self.pieces[0].q_start
        if start > 0:
            before, nothing = position < start, self.pieces[0].k_start
            low, high = _choose(before, nothing, low), _choose(before, nothing, high)
            low, high = _least(low, length), _least(high, length)
        return low, high


@dataclass(frozen=True)
class MaskSpec:
    """The mask inside a document; the module's docstring says what each option means and which go together.

    Frozen and hashable: plans, local masks and counts of pairs are kept by it.

    Raises:
        ValueError: an option below 1 or no whole number, or options that do not go together.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    prefix: int | None = None
    first: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool):
            raise ValueError(f"causal={self.causal!r} must be True or False; a window is MaskSpec(window=...)")
        for name in ("window", "chunk", "prefix", "first"):
            object.__setattr__(self, name, self._whole_number(name, getattr(self, name)))
        if self.window is not None and self.chunk is not None:
            raise ValueError(
                f"window={self.window} and chunk={self.chunk} do not go together: a layer has one or the other; leave "
                "one out"
            )
        if self.prefix is not None and not self.causal:
            raise ValueError(
                f"prefix={self.prefix} needs a causal mask: without one all tokens see each other; leave prefix out"
            )
        if self.first is not None and not self.local:
            raise ValueError(
                f"first={self.first} adds nothing where a query sees its whole past; set a window or a chunk, or leave "
                "first out"
            )
        if self.first is not None and self.chunk is not None and self.first > self.chunk:
            raise ValueError(
                f"first={self.first} reaches beyond the first chunk={self.chunk}; use at most {self.chunk}, or a window"
            )

    @staticmethod
    def _whole_number(name: str, value: Any) -> int | None:
        if value is None:
            return None
        try:
            number = operator.index(value)
        except TypeError:
            raise ValueError(f"{name}={value!r} is no whole number; give tokens, or leave {name} out (null)") from None
        if number >= UNBOUNDED:
            raise ValueError(f"{name}={value} is longer than any sequence; leave {name} out, or use below {UNBOUNDED}")
        if number < 1 or isinstance(value, bool):
            what = "hides a query's own position; use at least 1" if name == "window" else "must be at least 1"
            raise ValueError(f"{name}={value} {what}, or leave {name} out (null)")
        return number

    @property
    def local(self) -> bool:
        """Whether a query of a long document does not see all before it: keys out of reach need not travel."""
        return self.window is not None or self.chunk is not None

    @property
    def plain(self) -> bool:
        """Causal and nothing else: the mask that most schedules are made for."""
        return self == CAUSAL

    @cached_property
    def bands(self) -> tuple[Band, ...]:
        """Disjoint bands, whose union is the mask."""
        before = UNBOUNDED if self.window is None else self.window - 1
        body = BandPiece(before, 0 if self.causal else before, chunk=self.chunk)
        if self.prefix is None:
            main = Band((body,))
        else:
            square = BandPiece(q_stop=self.prefix, k_stop=self.prefix)
            rest = BandPiece(body.before, body.after, q_start=self.prefix, chunk=self.chunk)
            main = Band((square, rest))
        return (main,) if self.first is None else (main, self._beside(self.first))

    def _beside(self, first: int) -> Band:
        """The document's first keys, for queries whose window or chunk begins after them; cut where it holds some."""
        start = self.prefix or 0
        if self.window is not None:
            return Band((BandPiece(after=-self.window, q_start=start or -UNBOUNDED, k_stop=first),))
        return Band((BandPiece(q_start=max(start, self.chunk or 0), k_stop=first),))

    @cached_property
    def pieces(self) -> tuple[BandPiece, ...]:
        """All bands' pieces: disjoint, and their union is the mask."""
        return tuple(piece for band in self.bands for piece in band.pieces)

    def pairs(self, length: int) -> int:
        """Allowed (query, key) pairs of a document of `length` tokens: a Python int, in closed form."""
        return sum(piece.pairs(length) for piece in self.pieces)

    def options(self) -> Iterator[tuple[str, int]]:
        """(name, tokens) of what is set."""
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value is not None:
                yield field.name, value

    def __str__(self) -> str:
        """'causal, window 4,096, first 4'."""
        return ", ".join(["causal" if self.causal else "full", *(f"{name} {n:,}" for name, n in self.options())])


CAUSAL = MaskSpec()


def _least(a: Any, b: Any) -> Any:
    """min(a, b), element by element where one is an array."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return b.clip(max=a) if isinstance(a, int) else a.clip(max=b)


def _most(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return b.clip(min=a) if isinstance(a, int) else a.clip(min=b)


def _choose(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where the condition holds, else `no`."""
    return no + (yes - no) * condition


def _sum_clipped(base: int, n: int, most: int) -> int:
    """sum of min(max(base + i, 0), most) over 0 <= i < n."""
    begin = min(max(-base, 0), n)  # the first i above 0
    end = min(max(most - base, begin), n)  # the first i that reaches `most`
    return (begin + end - 1 + 2 * base) * (end - begin) // 2 + (n - end) * most
