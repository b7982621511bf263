"""Only the keys that are needed, in compiled rounds: the exchange of HSAP (between groups; all_to_all inside them).

For each pair of members whose documents meet, one message: the keys that some query there sees; or, where that costs
fewer bytes in a step and does not overload the other side, the queries, with partial results coming back. Messages are
dealt to rounds by an edge colouring, the heaviest first, so that a round's messages weigh much the same and each
round's computation hides the next, lighter round's transfer. Forward, the few partial results go back in free places of
later rounds. Backward, batches that fetch and batches that bring gradients home take turns, so that a rank holds the
gradients of two rounds at most. Buffers are reserved for the most that any batch can need (`slabs`).

(HSAP: sequence-aware transfers between groups, dropped where documents do not meet; how it schedules is not published,
see docs/fidelity.md.)
"""

from collections import defaultdict

from parallel.exchange.colouring import colour_edges, degree
from parallel.exchange.lane import Exchange, Lane
from parallel.exchange.pairwise import Edge, Schedule, pairwise_backward, pairwise_forward
from parallel.plan.ir import token_bytes
from parallel.plan.writer import Writer

OVERLOAD = 1.03  # a rank may come to this times the mean work by taking queries
MOST_MOVED = 1  # times that a rank takes queries, or gives its own: each needs room for queries and results


def forward(w: Writer, lane: Lane) -> None:
    pairwise_forward(w, lane, _kept(lane))


def backward(w: Writer, lane: Lane) -> None:
    pairwise_backward(w, lane, _kept(lane))


def _kept(lane: Lane) -> Schedule:
    """The schedule, made once for all members of all lanes with as many heads."""
    kept, heads = lane.dealt.kept, (lane.heads[1] - lane.heads[0], lane.key_heads[1] - lane.key_heads[0])
    found = kept.get(("sequence_aware", heads))
    if found is None:
        found = kept["sequence_aware", heads] = _compile(lane)
    return found


def _compile(lane: Lane) -> Schedule:
    edges = _direct(lane, _edges(lane))
    edges.sort(key=lambda edge: (-_weight(lane, edge), edge.queries, edge.keys))
    pairs = [(edge.sender, edge.receiver) for edge in edges]
    colours = colour_edges(pairs)
    rounds: list[list[Edge]] = [[] for _ in range(degree(pairs))]
    for edge, colour in zip(edges, colours):
        rounds[colour].append(edge)
    rounds.sort(key=lambda some: -max(_weight(lane, edge) for edge in some))
    moved = [[edge for edge in some if edge.moves == "queries"] for some in rounds]
    there, back = _take_turns(len(rounds))
    returns = {(edge.queries, edge.keys): back[number] for number, some in enumerate(rounds) for edge in some}
    return Schedule(
        rounds,
        {"forward": range(1, len(rounds) + 1), "backward": there},
        {"forward": _returns(rounds, moved), "backward": returns},
    )


def _take_turns(rounds: int) -> tuple[list[int], list[int]]:
    """Batches of each round's fetch and of its results: fetch 1, fetch 2, results 1, fetch 3, results 2, ..."""
    order = [("fetch", 0)] if rounds else []
    for number in range(rounds):
        order += [("fetch", number + 1)] if number + 1 < rounds else []
        order.append(("results", number))
    batch = {what: at for at, what in enumerate(order, 1)}
    return [batch["fetch", n] for n in range(rounds)], [batch["results", n] for n in range(rounds)]


def _edges(lane: Lane) -> list[Edge]:
    """Every pair of members whose documents meet, keys moving."""
    sets, sight, edges = lane.sets, lane.scene.sight, []
    for queries in range(lane.size):
        for keys in range(lane.size):
            if queries != keys and lane.sees(queries, keys):
                q, k = sets[queries], sets[keys]
                edges.append(Edge(queries, keys, "keys", sight.needed_queries(q, k), sight.needed_keys(q, k)))
    return edges


def _weight(lane: Lane, edge: Edge) -> int:
    """Bytes that an edge moves forward and back in a step."""
    shape = lane.scene.shape

    def size(kind: str, exact: bool) -> int:
        heads = lane.key_heads if kind in ("kv", "grad_kv") else lane.heads
        return sum(n for _, n in token_bytes(kind, heads, exact, shape))  # pyright: ignore[reportArgumentType]

    if edge.moves == "keys":
        each = 2 * size("kv", False) + size("grad_kv", True)
    else:
        each = 2 * size("q", False) + size("grad_out", False)
        each += size("partial", True) + size("stats", True) + size("grad_q", True)
    return edge.tokens.count * each


def _direct(lane: Lane, edges: list[Edge]) -> list[Edge]:
    """Queries move instead where that takes fewer bytes, the most profitable first, within the receiver's work."""
    turned = [Edge(e.queries, e.keys, "queries", e.q_tokens, e.k_tokens) for e in edges]
    gain = {i: _weight(lane, edges[i]) - _weight(lane, turned[i]) for i in range(len(edges))}
    wanted = sorted((i for i in gain if gain[i] > 0), key=lambda i: (-gain[i], i))
    if not wanted:
        return edges
    sight, chosen = lane.scene.sight, list(edges)
    work = [sight.work(tokens) for tokens in lane.sets]
    limit = max(max(work), OVERLOAD * sum(work) / len(work))
    taken: dict[int, int] = defaultdict(int)
    given: dict[int, int] = defaultdict(int)
    for i in wanted:
        moved = sight.pairs(turned[i].q_tokens, turned[i].k_tokens)
        taker, giver = turned[i].receiver, turned[i].sender
        if work[taker] + moved <= limit and taken[taker] < MOST_MOVED and given[giver] < MOST_MOVED:
            taken[taker] += 1
            given[giver] += 1
            work[taker] += moved
            work[giver] -= moved
            chosen[i] = turned[i]
    return chosen


def _returns(rounds: list[list[Edge]], going_back: list[list[Edge]]) -> dict[tuple[int, int], int]:
    """A batch for each result that goes back: an early one in which both ranks are free, or else one after the rounds.

    A rank still sends at most one and receives at most one message in a batch, and there are no more batches than the
    rounds and the results' own degree.
    """
    last = len(rounds)
    results = [(number, edge) for number, some in enumerate(going_back, 1) for edge in some]
    pairs = [(edge.receiver, edge.sender) for _, edge in results]
    most = last + degree(pairs)
    out: dict[int, int] = defaultdict(int)  # rank -> batches in which it sends, as bits
    into: dict[int, int] = defaultdict(int)
    for number, some in enumerate(rounds, 1):
        for edge in some:
            out[edge.sender] |= 1 << number
            into[edge.receiver] |= 1 << number
    found: dict[tuple[int, int], int] = {}
    for (number, edge), (sender, receiver) in zip(results, pairs):
        taken = out[sender] | into[receiver]
        batch = min(number + 2, last + 1)
        while taken >> batch & 1:
            batch += 1
        if batch > most:  # the free places were spent badly: all results after the rounds, by a colouring of their own
            colours = colour_edges(pairs)
            return {(e.queries, e.keys): last + 1 + c for (_, e), c in zip(results, colours)}
        out[sender] |= 1 << batch
        into[receiver] |= 1 << batch
        found[edge.queries, edge.keys] = batch
    return found


def slabs(lane: Lane) -> list[tuple[int, int]]:
    """(bytes, number) of what to reserve for temporaries and wires, whatever the documents."""
    shape, heads, keys = lane.scene.shape, lane.heads, lane.key_heads

    def size(kind: str, exact: bool = False) -> int:
        each = token_bytes(kind, keys if kind in ("kv", "grad_kv") else heads, exact, shape)  # pyright: ignore[reportArgumentType]
        return lane.room * sum(n for _, n in each)

    moved = 2 * MOST_MOVED  # taken and given
    return [
        (size("kv"), 4),  # of two rounds, what came in and what goes out
        (size("q"), moved),
        (size("grad_out"), moved),
        (size("stats", True), moved),
        (size("partial", True), moved),
        (size("grad_q", True), moved),
        (size("grad_kv", True), 5),  # one being computed, and of two rounds what goes home and what comes home
    ]


SEQUENCE_AWARE = Exchange(forward, backward, "HSAP; the rounds are ours", sends_only_needed=True, slabs=slabs)
