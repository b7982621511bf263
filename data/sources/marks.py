"""Tokens that no model learns to predict: a prompt's. A source gives such a token's id as its complement, ~id, which is
negative, so that what is trained travels with the ids through every source."""

import numpy as np
from numpy.typing import NDArray


def marked(ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """`ids`, none of them to be predicted."""
    return np.where(ids >= 0, ~ids, ids).astype(np.int32)


def plain_ids(ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """The ids themselves."""
    return np.where(ids >= 0, ids, ~ids).astype(np.int32)


def trained(ids: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which tokens are to be predicted."""
    return ids >= 0


def pack_bits(flags: NDArray[np.bool_]) -> bytes:
    """What `trained` gave as bits, the first token in a byte's lowest bit."""
    return np.packbits(flags, bitorder="little").tobytes()


def mark_by_bits(ids: NDArray[np.int32], bits: NDArray[np.uint8], first: int) -> NDArray[np.int32]:
    """`ids`, which begin at token `first` of what `bits` were packed from, marked again."""
    low = first // 8
    wanted = bits[low : -(-(first + ids.size) // 8)]
    flags = np.unpackbits(wanted, bitorder="little")[first - 8 * low :][: ids.size].astype(bool)
    return np.where(flags, ids, ~ids).astype(np.int32)
