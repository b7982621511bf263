"""Documents kept whole, cut as little as balance needs, the longest spread over a few ranks (FlashCP; papers' planner
idea, our search).

Every rank gets equally many tokens and, within a ratio, the mean work. A document that is too much work for a rank is
cut where its parts weigh the same, for as few ranks as can carry it; all parts are dealt, the heaviest first; tokens
are made equal; then a local search (`search.py`) exchanges spans between ranks: it pairs early parts of documents with
late ones, lets early holders have the short documents, and moves the cuts.
"""

import numpy as np

from parallel.plan.layout import PackedLayout
from parallel.plan.mesh import MeshSpec
from parallel.plan.tokens import TokenSet
from parallel.price.cluster import key_bytes, predict_needs
from parallel.price.needs import Needs
from parallel.sharding.dealing import deal, in_order
from parallel.sharding.gathered import GatheredShares
from parallel.sharding.per_document import per_document
from parallel.sharding.planner import DEFAULT, Setting
from parallel.sharding.search import BytesCost, Effort, Search, TimeCost
from parallel.sharding.seating import seat_on_nodes
from parallel.sharding.shares import DOC, HI, LO, REAL, Shares

FAST = Effort(steps=44, fractions=(1.0, 0.3), pairs=105)
DEEP = Effort(steps=100, fractions=(1.0, 0.7, 0.4, 0.2, 0.05), pairs=250, restarts=12, kicks=2, again=15)
STARTS = (0.95, 0.6, 0.45)  # of a deep search: of the limit, what a part of a long document takes at most
RESTARTS = 40_000  # of a start, over the square of its spans: small batches have room for more
MARGIN = 0.9995  # the search aims this little below the limit


def whole_document(layout: PackedLayout, units: int, setting: Setting = DEFAULT) -> list[TokenSet]:
    """Unit u of n takes floor(T / n) tokens, one more for the first T mod n units; the same on every machine.

    Work is counted for a causal mask without a window. The ratio binds objective=bytes: where no plan within it is
    found (a few tokens a unit), the better balanced of this one and per_document is taken. For time, balance is worth
    what it saves.
    """
    layout = layout.without_empty()  # what holds no token is dealt to nobody
    if units == 1 or layout.num_documents == 0:
        return per_document(layout, units)
    found = _candidates(layout, units, setting)
    if setting.planner.objective == "time":
        best = min(found, key=lambda shares: _seconds(shares, setting)) if len(found) > 1 else found[0]
        return _token_sets(layout, best)
    best = found[0]
    if best.work.max() > setting.planner.ratio * best.work.mean():
        simple = per_document(layout, units)
        if Needs.of(layout, simple).work.max() < best.work.max():
            return simple
    return _token_sets(layout, best)


def _seconds(shares: Shares, setting: Setting) -> float:
    mesh = MeshSpec(cp_outer=len(shares.want), node_size=setting.node)
    return predict_needs(_needs(shares), mesh, setting.shape, setting.cluster, setting.gathered).total_s


def _needs(shares: Shares) -> Needs:
    rows = [shares.rows(rank) for rank in range(len(shares.want))]
    rank, spans = np.repeat(np.arange(len(rows)), [len(some) for some in rows]), np.concatenate(rows)
    rank, spans = rank[spans[:, REAL] > 0], spans[spans[:, REAL] > 0].astype(np.int64)
    order = np.lexsort((spans[:, LO], spans[:, DOC]))
    document, start, stop = spans[order][:, [DOC, LO, HI]].T
    return Needs(len(rows), rank[order], document, start, np.ones_like(start), stop - start)


def _candidates(layout: PackedLayout, units: int, setting: Setting) -> list[Shares]:
    """Shares sought among all ranks; for time on several nodes also among nodes first, and the plain order."""
    T, planner, node = layout.total_tokens, setting.planner, setting.node
    lengths, bytes_only = layout.lengths.tolist(), planner.objective == "bytes"
    want = [T // units + (unit < T % units) for unit in range(units)]
    effort = DEEP if planner.effort == "deep" else FAST
    effort = effort._replace(steps=effort.steps * max(1, units // 8))
    work = planner.ratio * MARGIN * sum(n * (n + 1) // 2 for n in lengths)
    whole = [(document, 0, length) for document, length in enumerate(lengths)]

    short, starts = 0.0 if bytes_only else setting.cluster.short_rows, []
    for carried in STARTS if effort.restarts else STARTS[:1]:
        starts.append(Shares(lengths, want, short))
        deal(starts[-1], range(units), whole, layout.padding_tokens, work / units, carried=carried)
    flat = starts[0]
    if effort.restarts:
        spans = sum(len(some) for documents in flat.held for some in documents.values())
        effort = effort._replace(restarts=min(200, max(effort.restarts, RESTARTS // spans**2)))
    if bytes_only or units <= node:
        return [_least(starts, setting, effort, work / units)]
    even = flat.copy()
    if max(lengths) > min(want) or max(even.received) > 0:  # some are cut
        even = Shares(lengths, want, short)  # an early part that fills a rank goes out to all who hold later ones
        deal(even, range(units), whole, layout.padding_tokens, work / units, full=0.0)
    sought = Search(even.copy(), _time_cost(even, setting), effort).run()
    found = [in_order(flat), even, seat_on_nodes(even, node), seat_on_nodes(sought, node)]
    if units % node == 0:
        found.append(_nodes_first(flat, whole, setting, effort, layout.padding_tokens, work))
    return found


def _least(starts: list[Shares], setting: Setting, effort: Effort, limit: float) -> Shares:
    """The best of searches from `starts`; of a deep one also the fast one's."""
    tries = [(shares.copy(), effort) for shares in starts]
    if effort.restarts:
        tries.append((starts[0], FAST))
    found: list[Shares] = []
    for shares, bound in tries:
        if setting.gathered:  # two searches in the time of one
            bound = bound._replace(steps=bound.steps // 2, restarts=bound.restarts // 2)
        shares = Search(shares, _cost(shares, setting, limit), bound).run()
        if setting.gathered:  # on for what a gather sends, from where few keys are needed
            shares = GatheredShares.of(shares)
            shares = Search(shares, _cost(shares, setting, limit), bound).run()
        found.append(shares)
    cost = _cost(found[0], setting, limit)
    costs = [cost.value(shares.work, shares.received) for shares in found]
    return found[costs.index(min(costs))]


def _cost(shares: Shares, setting: Setting, limit: float) -> BytesCost | TimeCost:
    if setting.planner.objective == "bytes":
        return BytesCost(max(sum(shares.want) / 40, float(shares.received.max())), limit)
    return _time_cost(shares, setting)


def _nodes_first(
    like: Shares, whole: list[tuple[int, int, int]], setting: Setting, effort: Effort, padding: int, work: float
) -> Shares:
    """Documents dealt to nodes, and each node's to its ranks; `work` is all ranks' limit together."""
    units, node = len(like.want), setting.node
    nodes = Shares(like.lengths, [sum(like.want[i : i + node]) for i in range(0, units, node)], like.short)
    deal(nodes, range(units // node), whole, padding, work * node / units)
    nodes = Search(nodes, _time_cost(nodes, setting, node), effort).run()
    ranks = Shares(like.lengths, like.want, like.short)
    for number, documents in enumerate(nodes.held):
        inside = sum(hi for _, hi in documents.get(nodes.padding, ()))
        spans = [(d, lo, hi) for d, some in documents.items() if d != nodes.padding for lo, hi in some]
        deal(ranks, range(number * node, (number + 1) * node), spans, inside, work / units)
    return Search(ranks, _time_cost(ranks, setting), effort, group=node).run()


def _token_sets(layout: PackedLayout, shares: Shares) -> list[TokenSet]:
    """The ranks' spans in the flat buffer; padding is handed out in its order."""
    ends = np.arange(1, layout.num_rows + 1) * layout.row_length
    free = [(stop - pad, stop) for stop, pad in zip(ends.tolist(), (layout.row_length - layout.row_tokens).tolist())]
    sets = []
    for rank, documents in enumerate(shares.held):
        rows = shares.rows(rank)
        rows = rows[rows[:, REAL] > 0].astype(np.int64)
        at = layout.starts[rows[:, DOC]]
        ranges = [np.stack([at + rows[:, LO], at + rows[:, HI]], 1)]
        left = documents[shares.padding][0][1] if shares.padding in documents else 0
        while left:
            first, stop = free.pop(0)
            size = min(stop - first, left)
            ranges.append(np.array([[first, first + size]]))
            left -= size
            if size < stop - first:
                free.insert(0, (first + size, stop))
        joined = np.concatenate(ranges)
        joined = joined[joined[:, 0].argsort()]
        sets.append(TokenSet.from_array(np.concatenate([joined, np.ones_like(joined[:, :1])], 1)))
    return sets


def _time_cost(shares: Shares, setting: Setting, node: int = 1) -> TimeCost:
    """Of ranks, whose keys come over the links inside a node; or of nodes of `node` ranks, one of which receives."""
    per_pair = sum(setting.cluster.seconds_per_pair(setting.shape)) / node
    _, rate = setting.cluster.wire("intra" if node == 1 else "inter")
    times = len(shares.want) - 1 if isinstance(shares, GatheredShares) else 1  # a key sent goes to all others
    return TimeCost(per_pair * float(shares.work.mean()), per_pair, times * sum(key_bytes(setting.shape)) / rate)
