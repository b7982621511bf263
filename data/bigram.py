"""The baseline beside a model's validation: what a bigram table of the training text pays for the same labels."""

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from data.batch import PackedBatch
from data.loader import PackedLoader
from data.sources.marks import plain_ids

_CHUNK = 1 << 20  # tokens counted at a time


def _pair_counts(
    train: PackedLoader, max_tokens: int, counted: Callable[[int, int], None]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sorted codes previous * vocab + next of the training documents' pairs, and how often each occurs.

    Only pairs that occur are held, whatever the vocabulary.
    """
    codes, counts = zip(*(np.unique(chunk, return_counts=True) for chunk in _chunks(train, max_tokens, counted)))
    found, inverse = np.unique(np.concatenate(codes), return_inverse=True)
    return found, np.bincount(inverse, np.concatenate(counts), found.size).astype(np.int64)


def _chunks(train: PackedLoader, max_tokens: int, counted: Callable[[int, int], None]) -> Iterator[NDArray[np.int64]]:
    """Codes of the pairs, of at most about `max_tokens` tokens, in large arrays."""
    held: list[NDArray[np.int64]] = []
    size = total = 0
    whole = train.total_tokens()
    most = max_tokens if whole is None else min(max_tokens, whole)
    for document in train.documents():
        ids = plain_ids(train.source.tokens(document, 0, min(train.source.length(document), max_tokens - total)))
        held.append(ids[:-1].astype(np.int64) * train.tokenizer.vocab_size + ids[1:])
        size += len(ids)
        total += len(ids)
        if size >= _CHUNK or total >= max_tokens:
            yield np.concatenate(held)
            held, size = [], 0
            counted(total, most)
        if total >= max_tokens:
            return
    if held:
        yield np.concatenate(held)


def bigram_bits_per_byte(
    train: PackedLoader,
    eval_batches: Iterable[PackedBatch],
    add_k: float = 0.01,
    max_tokens: int = 1 << 24,
    counted: Callable[[int, int], None] = lambda tokens, most: None,
) -> float:
    """Bits per byte of a bigram table on exactly the labels of `eval_batches`.

    P(next | previous) = (count + k) / (count of previous + k V), counted over the training documents. As for a model,
    the bits of all labels, ends of documents included, are divided by the bytes that they stand for.

    Args:
        train: the loader of the train split; its place in the stream does not matter and does not move.
        eval_batches: for example the loader of the eval split.
        add_k: k, added to every count.
        max_tokens: training tokens to count at most; of documents without end, the first.
        counted: told the tokens counted so far and the most that will be, now and then.

    Raises:
        ValueError: documents tokenised beforehand (their tokens are no bytes), or no byte to predict.
    """
    if not train.source.counts_bytes or train.tokenizer.token_bytes is None:
        raise ValueError("bits per byte need text: these documents were tokenised beforehand, or not as bytes")
    vocab = train.tokenizer.vocab_size
    codes, counts = _pair_counts(train, max_tokens, counted)
    previous = np.bincount(codes // vocab, counts, vocab)
    total, num_bytes = 0.0, 0
    for batch in eval_batches:
        valid = batch.labels >= 0
        before = batch.tokens[valid].numpy()
        wanted = before * vocab + batch.labels[valid].numpy()
        places = np.minimum(np.searchsorted(codes, wanted), codes.size - 1)
        seen = np.where(codes[places] == wanted, counts[places], 0)
        total += math.fsum((np.log2(previous[before] + add_k * vocab) - np.log2(seen + add_k)).tolist())
        num_bytes += batch.predicted_bytes
    if not num_bytes:
        raise ValueError("the evaluation predicts no bytes; raise data.eval_rows or data.eval_fraction")
    return total / num_bytes
