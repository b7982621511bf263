"""Idle early ranks take late ranks' work (DistFlashAttn, arXiv 2310.03294): about half the rounds of a causal ring.

With contiguous causal shards, rank r has r + 1 blocks to compute and early ranks wait. In round t a rank fetches the
keys of the rank t before it; a rank with none there instead helps: it takes the queries of the rank n - t after it
over its own keys, and sends the partial result back. n / 2 rounds cover all distances.
"""

from kernels.mask_spec import MaskSpec
from parallel.exchange.lane import Exchange, Lane
from parallel.exchange.pairwise import Edge, Schedule, pairwise_backward, pairwise_forward, straight
from parallel.plan.ir import AttentionShape
from parallel.plan.mesh import MeshSpec
from parallel.plan.writer import Writer


def _schedule(lane: Lane) -> Schedule:
    n = lane.size
    rounds = []
    for t in range(1, n // 2 + 1):
        fetched = [(p, p - t, "keys") for p in range(t, n)]
        helped = [(p + n - t, p, "queries") for p in range(t)] if 2 * t < n else []
        rounds.append([_edge(lane, *pair) for pair in fetched + helped if lane.sees(pair[0], pair[1])])
    for t in range(1, n):  # a prefix that several ranks share sees later ranks' keys
        ahead = [(p, p + t, "keys") for p in range(n - t) if lane.sees(p, p + t)]
        rounds += [[_edge(lane, *pair) for pair in ahead]] if ahead else []
    return straight(rounds)


def _edge(lane: Lane, queries: int, keys: int, moves: str) -> Edge:
    q, k, sight = lane.sets[queries], lane.sets[keys], lane.scene.sight
    return Edge(queries, keys, moves, sight.needed_queries(q, k), sight.needed_keys(q, k))  # pyright: ignore[reportArgumentType]


def forward(w: Writer, lane: Lane) -> None:
    pairwise_forward(w, lane, _kept(lane))


def backward(w: Writer, lane: Lane) -> None:
    pairwise_backward(w, lane, _kept(lane))


def _kept(lane: Lane) -> Schedule:
    """The schedule, made once for all members."""
    kept = lane.dealt.kept
    if "helper" not in kept:
        kept["helper"] = _schedule(lane)
    return kept["helper"]


def check(mesh: MeshSpec, shape: AttentionShape, mask: MaskSpec) -> None:
    if not mask.causal:
        raise ValueError("exchange=helper relies on a causal mask, under which early ranks idle; use exchange=ring")


HELPER = Exchange(
    forward, backward, "DistFlashAttn, arXiv 2310.03294",
    shardings=("contiguous",), why_sharding="only contiguous causal shards leave early ranks idle",
    sends_only_needed=True, check=check,
)  # fmt: skip
