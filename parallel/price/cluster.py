"""What a schedule would take on a named cluster: attention by allowed pairs and short blocks, bytes by alpha-beta.

Constants are files of `conf/cluster`. A block of queries over keys costs its pairs, and on top `short_rows` rows of its
last row's pairs for each part of a document in it, which is how short kernels lose; partial results and reordered keys
cost a pass through memory. Times are those of a layer's attention, forward and backward.

    predict_needs(Needs.of(layout, placement.units), mesh, shape, load_cluster("h100_8")).total_s

`predict.py` prices a plan's steps with the same constants.
"""

from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from parallel.plan.ir import AttentionShape, token_bytes
from parallel.plan.mesh import MeshSpec
from parallel.price.needs import Needs

CLUSTERS = Path(__file__).resolve().parents[2] / "conf" / "cluster"
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 4, 10  # flops per pair, head and width: 2 and 5 matrix products


@dataclass(frozen=True)
class Cluster:
    """Constants of a cluster.

    Attributes:
        ranks, node_size: devices in all, and on a node.
        forward_flops, backward_flops: per second and rank, on long documents.
        short_rows: rows that a part of a document costs beyond its own.
        launch_s: seconds of a kernel's start.
        copy_bytes_s: bytes per second and rank, read or written.
        intra_bytes_s, inter_bytes_s: bytes per second and rank in one direction, inside a node and between nodes.
        intra_latency_s, inter_latency_s: seconds of a batch of messages.
    """

    name: str
    ranks: int
    node_size: int
    forward_flops: float
    backward_flops: float
    short_rows: float
    launch_s: float
    copy_bytes_s: float
    intra_bytes_s: float
    intra_latency_s: float
    inter_bytes_s: float
    inter_latency_s: float

    def seconds_per_pair(self, shape: AttentionShape) -> tuple[float, float]:
        """Seconds of an allowed pair with all heads, forward and backward."""
        width = shape.H * (shape.D + shape.Dv) / 2
        return FORWARD_PRODUCTS * width / self.forward_flops, BACKWARD_PRODUCTS * width / self.backward_flops

    def wire(self, link: str) -> tuple[float, float]:
        """(latency in seconds, bytes per second) of a link between ranks: intra or inter."""
        if link == "inter":
            return self.inter_latency_s, self.inter_bytes_s
        return self.intra_latency_s, self.intra_bytes_s


class AttentionTime(NamedTuple):
    """Seconds of a layer's attention on the rank that ends last: kernels, passes through memory, waiting; and all."""

    attn_s: float
    copy_s: float
    exposed_s: float
    total_s: float


@lru_cache(maxsize=16)
def load_cluster(name: str) -> Cluster:
    """The constants of `conf/cluster/<name>.yaml`. ValueError for an unknown cluster or a constant amiss."""
    known = sorted(path.stem for path in CLUSTERS.glob("*.yaml"))
    if name not in known:
        raise ValueError(f"cluster {name!r} is unknown; choose one of {', '.join(known)}")
    values = yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text())
    names = [field.name for field in fields(Cluster)]
    if sorted(values) != sorted(names):
        amiss = ", ".join(sorted(set(values) ^ set(names)))
        raise ValueError(f"cluster {name} has constants too many or too few: {amiss}")
    cluster = Cluster(name=values["name"], **{key: float(values[key]) for key in names[3:]},
                      ranks=values["ranks"], node_size=values["node_size"])  # fmt: skip
    if min(value for value in vars(cluster).values() if not isinstance(value, str)) <= 0:
        raise ValueError(f"cluster {name} has a constant of 0 or less; every one is a positive number")
    return cluster


def key_bytes(shape: AttentionShape) -> tuple[int, int]:
    """Bytes that one key moves forward (K, V) and backward (K, V again, and their gradients)."""
    heads = (0, shape.Hkv)
    there = sum(size for _, size in token_bytes("kv", heads, False, shape))
    return there, there + sum(size for _, size in token_bytes("grad_kv", heads, True, shape))


def predict_needs(
    needs: Needs, mesh: MeshSpec, shape: AttentionShape, cluster: Cluster, gathered: bool = False
) -> AttentionTime:
    """A placement's time where each key goes once to each rank that needs it, in rounds of one message a rank; or,
    `gathered`, to all ranks if one needs it.

    A rank's own block hides the first round and every round's computation the next one, so a rank is done when it has
    computed everything, or when all has come and the last round is computed, whichever is later.
    """
    keys = needs.keys
    if gathered:
        keys = np.tile(needs.sent_once, (needs.ranks, 1))
        np.fill_diagonal(keys, 0)
    received, sent = keys.sum(1), keys.sum(0)
    partners = np.maximum((keys > 0).sum(1), (keys > 0).sum(0))
    pairs = needs.work + cluster.short_rows * needs.last_rows
    last_round = received / np.maximum((received + needs.held) * partners, 1)  # of what a rank computes
    merged = np.minimum(received, needs.held) * shape.H * (shape.Dv + 1) * shape.item_bytes(True) * 2
    attention, copies, exposed = np.zeros(needs.ranks), np.zeros(needs.ranks), np.zeros(needs.ranks)
    for each, per_pair in zip(key_bytes(shape), cluster.seconds_per_pair(shape)):
        compute = pairs * per_pair + (1 + partners) * cluster.launch_s
        transfer = _transfer(keys, mesh, cluster, each)
        attention += compute
        copies += ((received + sent) * each + merged) / cluster.copy_bytes_s
        exposed += np.maximum(0, transfer - compute * (1 - last_round))
    total = attention + copies + exposed
    slowest = int(total.argmax())
    return AttentionTime(*(float(part[slowest]) for part in (attention, copies, exposed, total)))


def _transfer(keys: NDArray[np.int64], mesh: MeshSpec, cluster: Cluster, each: int) -> NDArray[np.float64]:
    """[ranks]: seconds in which a rank's messages travel, sends beside receives, one latency a partner."""
    node = np.arange(len(keys)) * (mesh.cp // len(keys)) // mesh.node_size
    seconds = np.zeros(len(keys))
    for link, mask in (("intra", node[:, None] == node), ("inter", node[:, None] != node)):
        latency, rate = cluster.wire(link)
        some = np.where(mask, keys, 0)
        count = np.maximum((some > 0).sum(0), (some > 0).sum(1))
        seconds += count * latency + np.maximum(some.sum(0), some.sum(1)) * each / rate
    return seconds
