"""Orders over more than one shuffled list: a stream of shards, and a mixture of sources."""

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from data.packing import Piece
from data.sources.documents import FiniteDocuments, Source, bucket, name_hash
from data.sources.hub import HubStream
from data.split import DocumentOrder


@runtime_checkable
class Order(Protocol):
    """Which document comes next, and where that stands."""

    @property
    def passes(self) -> int:
        """Passes of which every document was pulled."""
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
    forward in blocks of documents that are shuffled. Held-out ones keep the stream's own order.

    Args:
        held_out: give the documents whose name's hash falls below `eval_fraction`, instead of the others.
        part: tokens, the longest part of a document, shuffled like documents; None leaves documents whole.
        once: stop after one pass.
    """

    def __init__(
        self, source: HubStream, eval_fraction: float, held_out: bool, seed: int, part: int | None, once: bool
    ) -> None:
        self._source, self._fraction, self._held_out, self._seed = source, eval_fraction, held_out, seed
        self._part, self._once = part, once
        self.restore([0, 0, 0, 0])

    def state(self) -> list[int]:
        """Epoch, shards done, first row of the block, documents or parts done of the block."""
        return [self.epoch, self._place, self._block, self._cursor]

    def restore(self, state: list[int]) -> None:
        self.epoch, self._place, self._block, self._cursor = state
        self._units: list[Piece] | None = None  # the block's documents or parts, in their order
        self._found = True  # whether this pass has given a document
        self._shards = self._shuffled(self._source.shards)

    @property
    def passes(self) -> int:
        """Passes of which every document was pulled; a stream's end shows only when more is asked of it."""
        return self.epoch

    def _shuffled(self, count: int, *where: int) -> list[int]:
        if self._held_out:
            return list(range(count))
        return np.random.default_rng([self._seed, 3, self.epoch, *where]).permutation(count).tolist()

    def pull(self) -> Piece | None:
        while self._place < len(self._shards) or not self._once:
            if self._place == len(self._shards):
                self._next_pass()
            shard = self._shards[self._place]
            if self._units is None:
                units = self._read(shard)
                self._units = [units[i] for i in self._shuffled(len(units), shard, self._block)]
            if self._cursor < len(self._units):
                self._found = True
                self._cursor += 1
                return self._units[self._cursor - 1]
            rows, last = self._source.block_rows(shard, self._block)
            self._place, self._block = (self._place + 1, 0) if last else (self._place, self._block + rows)
            self._cursor, self._units = 0, None
        return None

    def _read(self, shard: int) -> list[Piece]:
        """The documents of the split in the block, or their parts, as they lie there."""
        rows = range(self._source.block_rows(shard, self._block)[0])
        documents = [self._source.number(shard, self._block + row) for row in rows]
        buckets = bucket(np.array([name_hash(self._source.name(document)) for document in documents], np.uint64))
        found = []
        for document, low in zip(documents, (buckets < self._fraction).tolist()):
            if low == self._held_out:
                length = self._source.length(document)
                step = self._part or length
                bounds = ((start, min(start + step, length)) for start in range(0, length, step))
                found += [Piece(self.epoch, document, start, stop) for start, stop in bounds]
        return found

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
    def passes(self) -> int:
        return min(order.passes for order in self.orders)

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
        return StreamOrder(source, eval_fraction, held_out, seed, part, once)
    assert (indices is None) != isinstance(source, FiniteDocuments)
    return DocumentOrder(source, indices, seed, part, once)
