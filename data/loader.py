"""Packed batches, one per optimiser step, the same for every number of ranks.

loader = PackedLoader(DataConfig(), vocab_size=258, seed=0)
batch = loader.batch(0)                    # every rank asks for the same batch and takes its share of it
for part in batch.micro_batches(2): ...
held_out = PackedLoader(DataConfig(), vocab_size=258, seed=0, split="eval")
for batch in held_out: ...                 # the same rows each time
"""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data.batch import PackedBatch, build_batch
from data.config import DataConfig
from data.order import MixtureOrder, Order, order_of
from data.packing import PACKINGS, Piece
from data.sources.documents import FiniteDocuments, Source
from data.sources.hub import HubStream
from data.sources.mixture import Mixture
from data.sources.table import open_source, open_tokenizer
from data.split import split_documents
from data.tokenizers.tokenizer import identity_text

SPLITS = ("train", "eval")
_STATE = 3


class PackedLoader:
    """Documents of one split, packed into rows.

    The train split has no end: each pass over the documents takes every one exactly once, in an order drawn from
    (seed, epoch). The eval split is one pass over the held-out documents in an order that no seed changes, cut to
    `config.eval_rows` rows. Neither knows of ranks or micro-batches: those split the batch that is the same for all.

    Args:
        config: what to read and how to pack it.
        vocab_size: ids that the model knows.
        seed: at least 0; the train split's order, and the documents of a synthetic source.
        split: train or eval.
        source: the other split's source: what of it has an end is used again, the rest opened anew.
        prefix: tokens at the start of each document (of each part, where it is cut) that see each other: they are no
            labels. None for causal documents.

    Raises:
        ValueError: a value or a document that cannot work; all documents are checked here, before training.
    """

    def __init__(
        self,
        config: DataConfig,
        vocab_size: int,
        seed: int,
        split: str = "train",
        source: Source | None = None,
        prefix: int | None = None,
    ) -> None:
        config.validate()
        if split not in SPLITS:
            raise ValueError(f"split={split!r} is unknown; choose one of {', '.join(SPLITS)}")
        if seed < 0:
            raise ValueError(f"seed={seed}; give 0 or more")
        self.tokenizer = open_tokenizer(config)
        if self.tokenizer.vocab_size > vocab_size:
            raise ValueError(
                f"tokenizer has {self.tokenizer.vocab_size} ids, model.vocab_size={vocab_size}; "
                f"set model.vocab_size={self.tokenizer.vocab_size} or more"
            )
        if split == "eval" and config.eval_fraction == 0:
            raise ValueError("data.eval_fraction=0 holds out no documents; raise it to evaluate")
        self.config = copy.deepcopy(config)
        self.split = split
        self.vocab_size, self.prefix = vocab_size, prefix
        self._seed = seed if split == "train" else 0
        # Drawn documents: the evaluation reads another stream, the same for every seed.
        drawn = 2 * seed + 2 if split == "train" else 1
        self.source = open_source(config, self.tokenizer, vocab_size, drawn, source)
        table = self.tokenizer.token_bytes
        self._token_bytes = None if table is None else torch.from_numpy(table.astype(np.int64))
        parts = self.source.sources if isinstance(self.source, Mixture) else [self.source]
        labels = config.labels()
        indices = [self._indices_of(part, label if len(parts) > 1 else None) for part, label in zip(parts, labels)]
        self._parts = list(zip(labels, parts, indices, strict=True))
        # the split's documents; None for a mixture, and for documents without end
        self.indices = self._parts[0][2] if len(parts) == 1 else None
        self._restart()

    def _indices_of(self, source: Source, label: str | None) -> NDArray[np.int64] | None:
        """The documents of the split; None for a source without an end."""
        if not isinstance(source, FiniteDocuments):
            return None
        return split_documents(source, self.config.eval_fraction, label)[SPLITS.index(self.split)]

    def _order_of(self, part: int | None, once: bool) -> Order:
        """The split's documents, from the first."""
        orders = [
            order_of(source, indices, self.config.eval_fraction, self._seed, self.split == "eval", part, once)
            for _, source, indices in self._parts
        ]
        return MixtureOrder(orders, self.source.weights) if isinstance(self.source, Mixture) else orders[0]

    def _restart(self) -> None:
        self._step = 0
        self._packer = PACKINGS[self.config.packing](self.config.seq_len, self.config.lookahead)
        part = self.config.seq_len if self._packer.shuffles_parts else None
        self._order = self._order_of(part, once=self.split == "eval")

    def documents(self) -> Iterator[int]:
        """The split's documents, whole, in an order of their own: one pass, where there is one. The stream stays."""
        order = self._order_of(None, once=True)
        while (piece := order.pull()) is not None:
            yield piece.document

    def total_tokens(self) -> int | None:
        """Tokens of one pass over the split's documents; None where some source has no end."""
        total = 0
        for _, part, found in self._parts:
            if found is None or not isinstance(part, FiniteDocuments):
                return None
            total += int(part.lengths()[found].sum())
        return total

    def _label(self, document: int) -> str:
        return self.source.label(document) if isinstance(self.source, Mixture) else self._parts[0][0]

    def _build(self, rows: list[list[Piece]]) -> PackedBatch:
        return build_batch(self.source, rows, self.config.seq_len, self._token_bytes, self._label, self.prefix or 0)

    def batch(self, step: int) -> PackedBatch:
        """The batch of optimiser step `step`, counted from 0. Asking in order costs least: a later step packs the
        lengths of those between, an earlier one packs again from the first.

        Raises:
            ValueError: a negative step, or one past the end of the eval split.
        """
        if step < 0:
            raise ValueError(f"step={step}; steps count from 0")
        if step < self._step:
            self._restart()
        while self._step < step:
            if not self._next_rows():
                break
        rows = self._next_rows() if self._step == step else []
        if not rows:
            raise ValueError(f"step={step} is past the end of the {self.split} split's {self._step} batches")
        return self._build(rows)

    def _next_rows(self) -> list[list[Piece]]:
        """The pieces of the next batch's rows; an empty list at the end of the eval split."""
        wanted = self.config.rows
        if self.split == "eval":
            wanted = min(wanted, self.config.eval_rows - self._step * self.config.rows)
        rows = [self._packer.row(self._order.pull) for _ in range(wanted)]
        if not any(rows):
            return []
        self._step += 1
        # The shape never changes: an evaluation that ends early fills its last batch with padding.
        return rows + [[]] * (self.config.rows - len(rows))

    def __iter__(self) -> Iterator[PackedBatch]:
        """Train: the batches from here on, without end. Eval: all of them, from the first."""
        if self.split == "eval":
            self._restart()
        while True:
            rows = self._next_rows()
            if not rows:
                return
            yield self._build(rows)

    @property
    def step(self) -> int:
        """The step of the batch that comes next, from 0."""
        return self._step

    @property
    def epoch(self) -> int:
        """Passes over the documents of which every token is in a batch by now; of a mixture by every source."""
        return min(self.epochs.values())

    @property
    def epochs(self) -> dict[str, int]:
        """The same for each source, by its label: a document that was pulled and waits for a row is still to come."""
        orders = self._order.orders if isinstance(self._order, MixtureOrder) else [self._order]
        found = {label: order.passes for (label, *_), order in zip(self._parts, orders)}
        for piece in self._packer.pending():
            label = self._label(piece.document)
            found[label] = min(found[label], piece.epoch)
        return found

    def describe(self) -> str:
        """The corpus in words, as '665 documents of stdlib'."""
        kinds = {True: "streamed documents", False: "documents without end"}
        sizes = [
            kinds[isinstance(source, HubStream)] if source.size is None else f"{source.size:,} documents"
            for _, source, _ in self._parts
        ]
        if len(sizes) == 1:
            return sizes[0]
        return ", ".join(f"{size} of {label}" for size, (label, *_) in zip(sizes, self._parts))

    def fingerprint(self) -> dict[str, Any]:
        """What the stream of batches is a function of; the corpus by its documents' names and content."""
        config = self.config
        keys = ("source", "seq_len", "rows", "packing", "lookahead", "eval_fraction")
        return {
            "documents": self.source.size,
            "corpus": self.source.fingerprint(),
            "tokenizer": identity_text(self.tokenizer),
            "split": self.split,
            "seed": self._seed,
            "prefix": self.prefix,
            **{key: getattr(config, key) for key in keys},
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as JSON-able data: small, whatever the corpus, and the same on every rank."""
        return {
            "format": _STATE,
            "fingerprint": self.fingerprint(),
            "step": self._step,
            "epochs": self.epochs,
            "order": self._order.state(),
            "pending": [list(piece) for piece in self._packer.pending()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state_dict` stood.

        Raises:
            ValueError: a state of another corpus or configuration; the sentence lists what differs.
        """
        if state.get("format") != _STATE:
            raise ValueError(
                f"the loader's state has format {state.get('format')!r}, expected {_STATE}; start anew "
                "with run.resume=never"
            )
        saved, now = state["fingerprint"], self.fingerprint()
        differing = [f"{key} was {saved.get(key)!r}, is {now[key]!r}" for key in now if saved.get(key) != now[key]]
        if differing:
            raise ValueError(
                f"the loader's state is of another stream of batches ({'; '.join(differing)}); "
                "restore these, or start anew with run.resume=never"
            )
        self._restart()
        self._step = state["step"]
        self._order.restore(state["order"])
        self._packer.restore([Piece(*piece) for piece in state["pending"]])
