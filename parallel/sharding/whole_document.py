"""Documents kept whole, cut as little as balance needs, the longest spread over a few ranks (FlashCP; papers' planner
idea, our search).

Every rank gets equally many tokens and, within a ratio, the mean work. A document that is too much work for a rank is
cut where its parts weigh the same, for as few ranks as can carry it; all parts are dealt, the heaviest first; tokens
are made equal; then a local search (`search.py`) exchanges spans between ranks: it pairs early parts of documents with
late ones, lets early holders have the short documents, and moves the cuts.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from parallel.plan.cost import key_bytes
from parallel.plan.layout import PackedLayout
from parallel.plan.needs import Needs
from parallel.plan.tokens import TokenSet
from parallel.sharding.per_document import per_document
from parallel.sharding.planner import DEFAULT, Setting
from parallel.sharding.search import BytesCost, Cost, Effort, Search, TimeCost, equalise
from parallel.sharding.shares import Shares, Span

FAST = Effort(steps=60, fractions=(1.0, 0.3), pairs=150)
DEEP = Effort(steps=100, fractions=(1.0, 0.5, 0.1), pairs=250, restarts=60, kicks=3, again=20)
CARRIED = 0.95  # of a rank's limit of work, what a part of a long document may take
MARGIN = 0.9995  # the search aims this little below the limit


def whole_document(layout: PackedLayout, units: int, setting: Setting = DEFAULT) -> list[TokenSet]:
    """Unit u of n takes floor(T / n) tokens, one more for the first T mod n units; the same on every machine.

    Work is counted for a causal mask without a window. Where no plan within the ratio is found (a few tokens a unit),
    the sharding with the lesser imbalance of this one and per_document is taken.
    """
    if units == 1 or layout.num_documents == 0:
        return per_document(layout, units)
    T = layout.total_tokens
    lengths = layout.lengths.tolist()
    limit = setting.planner.ratio * sum(n * (n + 1) // 2 for n in lengths) / units
    shares = Shares(lengths, [T // units + (unit < T % units) for unit in range(units)], _short_rows(setting))
    _deal(shares, layout.padding_tokens, limit * MARGIN)
    equalise(shares, BytesCost(max(T / 16, float(shares.received.max())), limit * MARGIN))
    cost = _cost(shares, setting, limit * MARGIN)
    effort = DEEP if setting.planner.effort == "deep" else FAST
    found = Search(shares, cost, effort._replace(steps=effort.steps * max(1, units // 8))).run()
    plans = [_token_sets(layout, found), per_document(layout, units)]
    return plans[_better(plans, layout, setting, cost, limit)]


def _short_rows(setting: Setting) -> float:
    return 0.0 if setting.planner.objective == "bytes" else setting.cluster.short_rows


def _better(plans: list[list[TokenSet]], layout: PackedLayout, setting: Setting, cost: Cost, limit: float) -> int:
    """The cheapest plan by its worst rank; for bytes, among those that keep the limit of work, or the best balanced."""
    needs = [Needs.of(layout, plan) for plan in plans]
    most = [int(need.work.max()) for need in needs]
    if setting.planner.objective == "bytes" and max(most) > limit:
        return int(np.argmin(most))
    worst = [cost(n.work + _short_rows(setting) * n.last_rows, n.received * 1.0).max() for n in needs]
    return int(np.argmin(worst))


def _token_sets(layout: PackedLayout, shares: Shares) -> list[TokenSet]:
    """The ranks' spans in the flat buffer; padding is handed out in its order."""
    ends = np.arange(1, layout.num_rows + 1) * layout.row_length
    free = [(stop - pad, stop) for stop, pad in zip(ends.tolist(), (layout.row_length - layout.row_tokens).tolist())]
    starts, sets = layout.starts.tolist(), []
    for documents in shares.held:
        ranges = []
        for document, spans in documents.items():
            if document != shares.padding:
                ranges += [(starts[document] + lo, starts[document] + hi) for lo, hi in spans]
                continue
            left = spans[0][1]
            while left:
                first, stop = free.pop(0)
                ranges.append((first, min(stop, first + left)))
                left -= ranges[-1][1] - first
                if ranges[-1][1] < stop:
                    free.insert(0, (ranges[-1][1], stop))
        sets.append(TokenSet.of(*sorted(ranges)))
    return sets


class _Part(NamedTuple):
    """Spans of one document for one rank."""

    work: float
    tokens: int
    document: int
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, document: int, spans: Iterable[Span]) -> "_Part":
        spans = tuple(spans)
        work = sum((hi - lo) * (lo + hi + 1) / 2 for lo, hi in spans)
        return cls(work, sum(hi - lo for lo, hi in spans), document, spans)


def _parts(document: int, length: int, ranks: int, tokens: int, limit: float) -> list[_Part]:
    """A document whole, or for as few ranks as can carry it: of equal work one after the other, or, where the first of
    these would nearly fill a rank, as a zigzag."""
    work = length * (length + 1) / 2
    if work <= limit and length <= tokens:
        return [_Part.of(document, [(0, length)])]
    n = min(ranks, length, max(-(-length // max(tokens, 1)), int(-(-work // (limit * CARRIED)))))
    cuts = [round(length * (i / n) ** 0.5) for i in range(n + 1)]
    if cuts[1] <= 0.9 * tokens:
        return [_Part.of(document, [span]) for span in zip(cuts, cuts[1:]) if span[0] < span[1]]
    edges = [i * length // (2 * n) for i in range(2 * n + 1)]
    pairs = [[(edges[i], edges[i + 1]), (edges[2 * n - 1 - i], edges[2 * n - i])] for i in range(n)]
    pairs[-1] = [(edges[n - 1], edges[n + 1])]
    return [_Part.of(document, [span for span in pair if span[0] < span[1]]) for pair in pairs]


def _deal(shares: Shares, padding: int, limit: float) -> None:
    """Deal all parts, the heaviest first, to the rank with the least work that has room; padding fills up."""
    want = np.array(shares.want)
    parts = [
        part
        for document, length in enumerate(shares.lengths)
        for part in _parts(document, length, len(want), int(want.min()), limit)
    ]
    parts.sort(key=lambda part: (-part.work, part.document, part.spans))
    tokens = np.zeros(len(want))
    for part in parts:
        over = np.maximum(shares.work + part.work - limit, 0) + 0.2 * shares.work
        badness = over / limit + np.maximum(tokens + part.tokens - want, 0) / (2 * want.max())
        badness[shares.end[:, part.document] > 0] += 10  # each part of a document to a rank of its own
        rank = int(badness.argmin())
        shares.put(rank, part.document, part.spans)
        tokens[rank] += part.tokens
    for rank, held in enumerate(tokens.astype(np.int64).tolist()):
        room = min(padding, max(0, shares.want[rank] - held))
        if room:
            shares.put(rank, shares.padding, ((0, room),))
        padding -= room


def _cost(shares: Shares, setting: Setting, limit: float) -> Cost:
    T = sum(shares.want)
    if setting.planner.objective == "bytes":
        return BytesCost(max(T / 40, float(shares.received.max())), limit)
    cluster, shape = setting.cluster, setting.shape
    limit *= float(shares.work.sum()) / sum(n * (n + 1) // 2 for n in shares.lengths)  # short rows count too
    per_pair = sum(cluster.seconds_per_pair(shape))
    _, rate = cluster.wire("inter" if len(shares.want) > cluster.node_size else "intra")
    return TimeCost(per_pair * float(shares.work.mean()), limit, per_pair, sum(key_bytes(shape)) / rate)
