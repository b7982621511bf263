"""Documents drawn without end: lengths from a mix, tokens from an order-1 Markov chain over bytes."""

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from data.config import SourceConfig
from data.sources.kept import Kept
from data.sources.mixes import sample_length
from data.tokenizers.tokenizer import ByteTokenizer, Tokenizer

DRAWN_BYTES = 64 << 20  # documents kept: one that fills many rows is drawn once
_SUCCESSORS = 8
_LANGUAGE_SEED = 20_250_101  # the table is the same for every seed, as a language is for every document


class SyntheticDocuments:
    """Document i is a function of (seed, mix, i): begin-of-document, bytes, end-of-document.

    A byte is followed by one of 8 others with chances that fall as 1, 1/2, ..., 1/8. The chain is a walk of random
    steps around a randomly relabelled circle of 256, so whole documents come from one cumulative sum. Its entropy,
    `entropy_bits`, is what a perfect order-1 model pays for a byte.
    """

    size = None
    counts_bytes = True

    def __init__(self, mix: str, seed: int, context: int) -> None:
        self._mix, self._seed, self._context = mix, seed, context
        language = np.random.default_rng(_LANGUAGE_SEED)
        self._label = language.permutation(256).astype(np.int32)
        self._steps = language.choice(256, _SUCCESSORS, replace=False)
        weights = 1 / np.arange(1, _SUCCESSORS + 1)
        self._edges = np.cumsum(weights / weights.sum())[:-1]
        self._drawn: Kept[int, NDArray[np.int32]] = Kept(DRAWN_BYTES)
        self.entropy_bits = -sum(p * math.log2(p) for p in (weights / weights.sum()).tolist())

    def length(self, index: int) -> int:
        return sample_length(self._mix, self._seed, index, self._context)

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        length = self.length(index)
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise ValueError(f"tokens {start}:{stop} are outside {self.name(index)} of {length} tokens")
        return self._drawn.get(index, lambda: self._draw(index))[start:stop]

    def _draw(self, index: int) -> tuple[NDArray[np.int32], int]:
        length = self.length(index)
        rng = np.random.default_rng([self._seed, 1, index])
        first = int(rng.integers(256))
        walk = np.cumsum(self._steps[np.searchsorted(self._edges, rng.random(length))])
        out = self._label[(first + walk) % 256]
        out[0] = ByteTokenizer.bos
        if length > 1:
            out[-1] = ByteTokenizer.eos
        out.setflags(write=False)
        return out, out.nbytes

    def name(self, index: int) -> str:
        return f"{self._mix}[{index}]"

    def fingerprint(self) -> str:
        text = f"synthetic 1 {self._mix} {self._seed} {self._context}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def from_mix(
    config: SourceConfig, tokenizer: Tokenizer, vocab_size: int, seed: int, context: int
) -> SyntheticDocuments:
    """The documents of `config.mix`; `context` is what some mixes are cut or scaled to."""
    return SyntheticDocuments(config.mix, seed, context)
