"""Orders over more than one shuffled list: a stream of shards, and a mixture of sources."""

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from data.documents import FiniteDocuments, Source, name_hash
from data.hub import BLOCK, HubStream
from data.packing import Piece
from data.split import DocumentOrder


@runtime_checkable
class Order(Protocol):
    """Which document comes next, and where that stands."""

    @property
    def epoch(self) -> int:
        """Complete passes over the documents."""
        ...

    def pull(self) -> Piece | None:
        """The next document or part of one; None once a single pass is over."""
        ...

    def state(self) -> Any:
        """The place of the next document, as JSON-able data."""
        ...

    def restore(self, state: Any) -> None:
        """Go on where `state` was taken."""
        ...


class StreamOrder:
    """The documents of a stream that train, or those held out: shards in an order drawn from (seed, epoch), each read
    forward in blocks whose documents are shuffled. Held-out ones keep the stream's own order.

    Args:
        held_out: give the documents whose name's hash falls below `eval_fraction`, instead of the others.
        once: stop after one pass.
    """

    def __init__(self, source: HubStream, eval_fraction: float, held_out: bool, seed: int, once: bool = False) -> None:
        self._source, self._fraction, self._held_out, self._seed, self._once = (
            source, eval_fraction, held_out, seed, once
        )  # fmt: skip
        self.restore([0, 0, 0, 0])

    def state(self) -> list[int]:
        """Epoch, shards done, block of the shard, documents done of the block."""
        return [self.epoch, self._place, self._block, self._cursor]

    def restore(self, state: list[int]) -> None:
        self.epoch, self._place, self._block, self._cursor = state
        self._order: NDArray[np.int64] | None = None
        self._found = True  # whether this pass has given a document
        self._shards = self._shuffled(self._source.shards)

    def _shuffled(self, count: int, *where: int) -> NDArray[np.int64]:
        if self._held_out:
            return np.arange(count)
        return np.random.default_rng([self._seed, 3, self.epoch, *where]).permutation(count)

    def pull(self) -> Piece | None:
        while True:
            if self._place == self._shards.size:
                if self._once:
                    return None
                self._next_pass()
            shard = int(self._shards[self._place])
            if self._order is None:
                rows = self._source.block_rows(shard, self._block)
                self._order = self._shuffled(rows, shard, self._block)
            if self._cursor == self._order.size:
                full = self._order.size == BLOCK
                self._place, self._block, self._cursor = self._place + (not full), self._block + 1 if full else 0, 0
                self._order = None
                continue
            document = self._source.number(shard, self._block * BLOCK + int(self._order[self._cursor]))
            self._cursor += 1
            if (name_hash(self._source.name(document)) / 2**64 < self._fraction) == self._held_out:
                self._found = True
                return Piece(self.epoch, document, 0, self._source.length(document))

    def _next_pass(self) -> None:
        if not self._found:
            raise ValueError(
                f"data.eval_fraction={self._fraction} leaves no document of the stream to train on; lower it"
            )
        self.restore([self.epoch + 1, 0, 0, 0])
        self._found = False


class MixtureOrder:
    """Documents of several orders: the next one comes from the source that is furthest behind its share of tokens.

    So after any number of documents each source's tokens are its weight's share of all, to within the longest document,
    or part of one, of each. Nothing is drawn here: the mixture is a function of the sources' own orders. In a single
    pass, a source that is over leaves the rest to the others.
    """

    def __init__(self, orders: list[Order], weights: list[float]) -> None:
        self.orders, self._weights = orders, weights
        self._drawn = [0] * len(orders)

    @property
    def epoch(self) -> int:
        """Passes that every source has made."""
        return min(order.epoch for order in self.orders)

    def state(self) -> dict[str, Any]:
        return {"drawn": list(self._drawn), "orders": [order.state() for order in self.orders]}

    def restore(self, state: dict[str, Any]) -> None:
        self._drawn = list(state["drawn"])
        for order, each in zip(self.orders, state["orders"], strict=True):
            order.restore(each)

    def pull(self) -> Piece | None:
        behind = sorted(range(len(self.orders)), key=lambda k: self._drawn[k] / self._weights[k])
        for k in behind:
            piece = self.orders[k].pull()
            if piece is not None:
                self._drawn[k] += piece.length
                return piece._replace(document=piece.document * len(self.orders) + k)
        return None


def order_of(
    source: Source,
    indices: NDArray[np.int64] | None,
    eval_fraction: float,
    seed: int,
    held_out: bool,
    part: int | None,
    once: bool,
) -> Order:
    """The order of one source's documents; `indices` are the split's, for a source that has a last document."""
    if isinstance(source, HubStream):
        return StreamOrder(source, eval_fraction, held_out, seed, once)
    assert (indices is None) != isinstance(source, FiniteDocuments)
    return DocumentOrder(source, indices, seed, part, once)
