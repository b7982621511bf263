"""How a planned sharding is sought, and what it may know beyond the documents."""

from dataclasses import dataclass

from parallel.plan.ir import AttentionShape
from parallel.price.cluster import Cluster, load_cluster

EFFORTS = ("fast", "deep")
OBJECTIVES = ("time", "bytes")


@dataclass
class Planner:
    """The planner's options; plain types, since it is also the schema of the configuration's `strategy.planner`."""

    effort: str = "fast"  # fast: 20 ms at 131,072 tokens on 8 ranks; deep: 1 s, for a thread in the background
    objective: str = "time"  # time: the predicted critical path of attention; bytes: keys that the exchange sends
    ratio: float = 1.03  # most work (allowed pairs) of a rank over the mean, for objective=bytes
    cluster: str = "h100_8"  # whose constants objective=time uses: a file of conf/cluster

    def validate(self) -> None:
        """Raise ValueError, one sentence, for values that no run could use."""
        for name, value, known in (("effort", self.effort, EFFORTS), ("objective", self.objective, OBJECTIVES)):
            if value not in known:
                raise ValueError(f"strategy.planner.{name}={value!r} is unknown; choose {' or '.join(known)}")
        if not self.ratio >= 1.001:
            raise ValueError(f"strategy.planner.ratio={self.ratio} leaves no room to cut documents; use at least 1.001")
        load_cluster(self.cluster)


@dataclass(frozen=True)
class Setting:
    """What a sharding is made for.

    Attributes:
        node: units on a node.
        gathered: keys that another unit needs go to all units, as compact_all_gather sends them, not to those alone.
    """

    planner: Planner
    shape: AttentionShape
    node: int = 8
    gathered: bool = False

    @property
    def cluster(self) -> Cluster:
        return load_cluster(self.planner.cluster)


DEFAULT = Setting(Planner(), AttentionShape(32, 8, 128, 128, "bf16"))
