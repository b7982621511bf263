"""Distributions of document lengths, in tokens.

Every mix maps uniform random numbers to lengths, so that a document's length is a function of (seed, mix, index) and
any document can be asked for without drawing those before it.

    draw_lengths("web", tokens=65536, seed=0)   # one packed batch's worth: lengths that sum to exactly 65536
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1024  # documents drawn at a time: indices i // _BLOCK share a generator
_GIANT, _OTHERS = 131_072, 64  # one giant takes as many tokens as the 64 others together

_QUANTILES = np.array(
    [0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 85, 90, 92, 94, 95, 96, 97, 98, 98.5, 99, 99.3, 99.6, 99.8, 99.9, 99.95,
     99.99, 100]
)  # fmt: skip
_WLB = np.array(
    [1, 63, 324, 646, 1283, 1932, 2582, 3227, 3860, 4514, 5156, 5470, 5784, 5917, 6045, 6110, 6173, 6236, 10078, 13209,
     26058, 46547, 78660, 99302, 119793, 122617, 124235, 124913]
)  # fmt: skip
_PROLONG = np.array(
    [575, 678, 801, 919, 1130, 1347, 1594, 1913, 2361, 3018, 4050, 4834, 6051, 6753, 7745, 8378, 9207, 10430, 12308,
     13806, 16269, 18718, 24169, 32975, 47397, 74671, 239610, 340149]
)  # fmt: skip
# Instruction data: thousands of documents in bins of 512 tokens up to 3,584, then a tail to 16,384.
_SFT_EDGES = np.array([1, 512, 1024, 1536, 2048, 2560, 3072, 3584, 16384])
_SFT_COUNTS = np.array([75, 360, 620, 450, 250, 170, 130, 130])


@dataclass(frozen=True)
class Mix:
    """A distribution of document lengths.

    `lengths(uniform [n, 2], index [n], context)` gives int64 [n], each at least 1; `context` is the longest document
    that the mix may draw where it says so. `source` is where the figures come from.
    """

    source: str
    lengths: Callable[[NDArray[np.float64], NDArray[np.int64], int], NDArray[np.int64]]


def _lognormal(u: NDArray[np.float64], median: float, mean: float, cap: int) -> NDArray[np.int64]:
    """The lognormal with this median and mean, cut at `cap`: mean / median = exp(sigma^2 / 2)."""
    sigma = math.sqrt(2 * math.log(mean / median))
    normal = np.array([NormalDist().inv_cdf(p) for p in np.clip(u, 1e-12, 1 - 1e-12).tolist()])
    return np.clip(np.rint(median * np.exp(sigma * normal)), 1, cap).astype(np.int64)


def _web(u: NDArray[np.float64], index: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    return _lognormal(u[:, 0], 400.0, 625.0, _GIANT)


def _code(u: NDArray[np.float64], index: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    return _lognormal(u[:, 0], 2000.0, 5000.0, context)


def _long_sft(u: NDArray[np.float64], index: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    bounds = np.concatenate([[0.0], np.cumsum(_SFT_COUNTS) / _SFT_COUNTS.sum()])
    # Linear in length inside a bin; the tail's single wide bin is linear in log length, as its density falls.
    short = np.interp(u[:, 0], bounds, _SFT_EDGES)
    tail = np.exp(np.interp(u[:, 0], bounds[-2:], np.log(_SFT_EDGES[-2:])))
    short = np.where(u[:, 0] > bounds[-2], tail, short)
    long = 8192 + u[:, 0] * (65536 - 8192)
    return np.rint(np.where(u[:, 1] < 0.9, short, long)).astype(np.int64)


def _one_giant(u: NDArray[np.float64], index: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    giant = min(_GIANT, context)
    return np.where(index % (_OTHERS + 1) == 0, giant, max(1, giant // _OTHERS)).astype(np.int64)


def _table(quantiles: NDArray[np.int64]) -> Callable[..., NDArray[np.int64]]:
    def lengths(u: NDArray[np.float64], index: NDArray[np.int64], context: int) -> NDArray[np.int64]:
        return np.rint(np.exp(np.interp(u[:, 0] * 100, _QUANTILES, np.log(quantiles)))).astype(np.int64)

    return lengths


MIXES: dict[str, Mix] = {
    "web": Mix("ours: lognormal, median 400, mean 625 (RefinedWeb's 600B tokens / 960M documents), cap 131072", _web),
    "code": Mix("ours: lognormal, median 2000, mean 5000 (shaped as Python source trees), cap at the context", _code),
    "long_sft": Mix("ours: 90% short instruction data (a published histogram) and 10% uniform 8k to 64k", _long_sft),
    "one_giant": Mix("ours: one document of 131072 and 64 of 2048; smaller contexts keep the proportion", _one_giant),
    "wlb": Mix("DistCA's approximation of WLB-LLM's production histogram, 99,519 documents, mean 3,962", _table(_WLB)),
    "prolong": Mix("ProLong's documents as published in DistCA's simulator, 77,932, mean 3,052", _table(_PROLONG)),
}


def _mix(name: str) -> Mix:
    if name not in MIXES:
        raise ValueError(f"mix {name!r} is unknown; choose one of {', '.join(MIXES)}")
    return MIXES[name]


@lru_cache(maxsize=64)
def _block(mix: str, seed: int, block: int, context: int) -> NDArray[np.int64]:
    rng = np.random.default_rng([seed, zlib.crc32(mix.encode()), block])
    index = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.int64)
    lengths = _mix(mix).lengths(rng.random((_BLOCK, 2)), index, context)
    lengths.setflags(write=False)
    return lengths


def sample_length(mix: str, seed: int, index: int, context: int = _GIANT) -> int:
    """Tokens of document `index` of the endless sequence that `mix` and `seed` name.

    Args:
        mix: a name in MIXES.
        seed: at least 0.
        index: at least 0.
        context: tokens; the cap of `code` and the size of `one_giant`'s giant (up to 131072).
    """
    return int(_block(mix, seed, index // _BLOCK, context)[index % _BLOCK])


def draw_lengths(mix: str, tokens: int, seed: int, context: int | None = None) -> list[int]:
    """Document lengths that sum to exactly `tokens`; the last one is cut to fit.

    `one_giant` has no randomness: a giant of half of the tokens comes first, then 64 others that differ by at most 1
    (131072 and 64 x 2048 at 262144 tokens), fewer where there are not 64 tokens for them.

    Args:
        mix: a name in MIXES.
        tokens: their sum, at least 0.
        seed: at least 0; the same seed draws the same lengths.
        context: tokens, the cap of `code`; None takes `tokens`.

    Raises:
        ValueError: an unknown mix, or a negative number of tokens.
    """
    _mix(mix)
    if tokens < 0:
        raise ValueError(f"tokens={tokens}; give 0 or more")
    if mix == "one_giant":
        rest = tokens - tokens // 2
        count = min(_OTHERS, rest)
        small, more = divmod(rest, count) if count else (0, 0)
        return [n for n in (tokens // 2, *(small + (i < more) for i in range(count))) if n]
    lengths: list[int] = []
    left, index = tokens, 0
    while left:
        lengths.append(min(left, sample_length(mix, seed, index, tokens if context is None else context)))
        left -= lengths[-1]
        index += 1
    return lengths
