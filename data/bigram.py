"""The baseline beside a model's validation: what a bigram table of the training text pays for the same labels."""

import math
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from data.batch import PackedBatch
from data.loader import PackedLoader

_CHUNK = 1 << 20  # tokens counted at a time


def _chunks(train: PackedLoader, max_tokens: int) -> Iterator[NDArray[np.int64]]:
    """Codes previous * vocab + next of the training documents, at most about `max_tokens` of them, in large arrays."""
    documents = range(max_tokens) if train.indices is None else train.indices.tolist()
    held: list[NDArray[np.int64]] = []
    size = total = 0
    for document in documents:
        ids = train.source.tokens(document, 0, min(train.source.length(document), max_tokens - total))
        held.append(ids[:-1].astype(np.int64) * train.tokenizer.vocab_size + ids[1:])
        size += len(ids)
        total += len(ids)
        if size >= _CHUNK or total >= max_tokens:
            yield np.concatenate(held)
            held, size = [], 0
        if total >= max_tokens:
            return
    if held:
        yield np.concatenate(held)


def bigram_bits_per_byte(
    train: PackedLoader, eval_batches: Iterable[PackedBatch], add_k: float = 0.01, max_tokens: int = 1 << 24
) -> float:
    """Bits per byte of a bigram table on exactly the labels of `eval_batches`.

    P(next | previous) = (count + k) / (count of previous + k V), counted over the training documents. As for a model,
    the bits of all labels, ends of documents included, are divided by the labels that are bytes.

    Args:
        train: the loader of the train split; its place in the stream does not matter and does not move.
        eval_batches: for example the loader of the eval split.
        add_k: k, added to every count.
        max_tokens: training tokens to count at most; of documents without end, the first.

    Raises:
        ValueError: documents tokenised beforehand (their tokens are no bytes), or no byte to predict.
    """
    if not train.source.counts_bytes:
        raise ValueError("bits per byte need text: these documents were tokenised beforehand, and a token is no byte")
    vocab = train.tokenizer.vocab_size
    counts = np.zeros(vocab * vocab, np.int64)
    for codes in _chunks(train, max_tokens):
        counts += np.bincount(codes, minlength=vocab * vocab)
    table = counts.reshape(vocab, vocab)
    bits = np.log2(table.sum(1, keepdims=True) + add_k * vocab) - np.log2(table + add_k)
    total, num_bytes = 0.0, 0
    for batch in eval_batches:
        valid = batch.labels >= 0
        total += math.fsum(bits[batch.tokens[valid].numpy(), batch.labels[valid].numpy()].tolist())
        num_bytes += batch.predicted_bytes
    if not num_bytes:
        raise ValueError("the evaluation predicts no bytes; raise data.eval_rows or data.eval_fraction")
    return total / num_bytes
