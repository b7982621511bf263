"""Rounds as an edge colouring: in a round a rank sends at most one message and receives at most one.

A bipartite graph of senders and receivers needs no more colours than its largest degree (Koenig 1916); a chain of swaps
frees a colour where none is free on both sides.
"""

from collections.abc import Callable, Sequence

Pair = tuple[int, int]  # sender, receiver


def degree(pairs: Sequence[Pair]) -> int:
    """Most messages that a rank sends, or that a rank receives."""
    counts: dict[tuple[str, int], int] = {}
    for sender, receiver in pairs:
        for end in (("out", sender), ("in", receiver)):
            counts[end] = counts.get(end, 0) + 1
    return max(counts.values(), default=0)


def colour_edges(pairs: Sequence[Pair]) -> list[int]:
    """A colour from 0 for each pair, `degree(pairs)` colours in all; early pairs get low ones where they can.

    Give the heaviest pairs first, and each colour holds pairs of much the same weight.
    """
    everything = (1 << degree(pairs)) - 1
    free: dict[tuple[str, int], int] = {}
    at: dict[tuple[str, int, int], int] = {}  # (side, rank, colour) -> pair
    colours = [-1] * len(pairs)

    def put(index: int, colour: int) -> None:
        sender, receiver = pairs[index]
        for end in (("out", sender), ("in", receiver)):
            free[end] = free.get(end, everything) & ~(1 << colour)
            at[*end, colour] = index
        colours[index] = colour

    def lift(index: int) -> None:
        sender, receiver = pairs[index]
        for end in (("out", sender), ("in", receiver)):
            free[end] |= 1 << colours[index]
            del at[*end, colours[index]]

    for index, (sender, receiver) in enumerate(pairs):
        here, there = free.get(("out", sender), everything), free.get(("in", receiver), everything)
        if not here & there:
            a, b = _lowest(here), _lowest(there)
            _swap_chain(pairs, at, put, lift, receiver, a, b)
            put(index, a)
        else:
            put(index, _lowest(here & there))
    return colours


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def _swap_chain(
    pairs: Sequence[Pair],
    at: dict[tuple[str, int, int], int],
    put: Callable[[int, int], None],
    lift: Callable[[int], None],
    receiver: int,
    a: int,
    b: int,
) -> None:
    """Swap colours a and b along the path that leaves `receiver` by colour a, so that a becomes free there."""
    chain, end, colour = [], ("in", receiver), a
    while (*end, colour) in at:
        index = at[*end, colour]
        chain.append((index, b if colour == a else a))
        end = ("out", pairs[index][0]) if end[0] == "in" else ("in", pairs[index][1])
        colour = b if colour == a else a
    for index, _ in chain:
        lift(index)
    for index, colour in chain:
        put(index, colour)
