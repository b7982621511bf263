"""Which rank gets which share, where ranks differ by their neighbours: those with documents in common on one node."""

import numpy as np

from parallel.sharding.shares import Shares


def seat_on_nodes(shares: Shares, node: int) -> Shares:
    """The same shares on ranks so that those with documents in common sit on one node, as far as that goes."""
    ranks = len(shares.want)
    common = _traffic(shares)
    free, order = list(range(ranks)), []
    members: list[int] = []
    for seat in range(ranks):
        if seat % node == 0:
            members = []
        fits = [rank for rank in free if shares.want[rank] == shares.want[seat]]
        near = common[fits][:, members].sum(1) if members else common[fits][:, free].sum(1)
        chosen = fits[int(near.argmax())]
        free.remove(chosen)
        members.append(chosen)
        order.append(chosen)
    return shares.seated(order)


def _traffic(shares: Shares) -> np.ndarray:
    """[ranks, ranks]: keys that travel between two, either way."""
    ranks = len(shares.want)
    total = np.zeros((ranks, ranks))
    holders: dict[int, list[int]] = {}
    for rank, documents in enumerate(shares.held):
        for document in documents:
            holders.setdefault(document, []).append(rank)
    for document, some in holders.items():
        for q in some:
            end = shares.end[q, document]
            for k in some:
                if k != q and document != shares.padding:
                    total[q, k] += sum(max(0, min(hi, end) - lo) for lo, hi in shares.held[k][document])
    return total + total.T
