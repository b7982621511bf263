"""Packs: the batches of the planner leaderboard, and the bounds that no plan beats.

A pack is documents of a mix in order until the total is full, the last one cut. Packs follow one another in one stream
of documents, so that any number of them are different samples of the same mix.
"""

from collections.abc import Iterator, Sequence

from data.sources.mixes import draw_lengths, sample_length


def packs(mix: str, tokens: int, count: int, seed: int = 0) -> Iterator[list[int]]:
    """The lengths of packs 0 to `count` - 1, each summing to `tokens`; one pack of `one_giant`, which is not random.

    Raises:
        ValueError: an unknown mix, or fewer than 1 token.
    """
    if tokens < 1:
        raise ValueError(f"a pack of {tokens} tokens holds nothing; give at least 1")
    if mix == "one_giant":
        yield draw_lengths(mix, tokens, seed)
        return
    index = 0
    for _ in range(count):
        lengths: list[int] = []
        left = tokens
        while left:
            lengths.append(min(left, sample_length(mix, seed, index, tokens)))
            left -= lengths[-1]
            index += 1
        yield lengths


def bounds(lengths: Sequence[int], ranks: int, padding: int = 0) -> tuple[float, float]:
    """Keys that the worst rank, and all, must receive where only keys move, as shares of an all-gather's.

    With t tokens a rank: the rank with the longest document's last token lacks all but t of its keys. A document of L
    tokens lies on at least k = ceil(L / t) ranks, and the least that they lack in all is with full parts, the first one
    left over. Each rank's part of the all-gather is T - t keys.
    """
    tokens = sum(lengths) + padding
    each = tokens / ranks
    if ranks == 1 or not tokens:
        return 0.0, 0.0
    total = 0.0
    for length in lengths:
        k = -(-length // each)
        total += (k - 1) * (length - (k - 1) * each) + each * (k - 1) * (k - 2) / 2
    return max(0.0, max(lengths) - each) / (tokens - each), total / (ranks * (tokens - each))
