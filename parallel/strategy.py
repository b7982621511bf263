"""A strategy: the axes of a schedule as one dataclass, presets of `conf/strategy` read into it, and what it makes.

strategy = load_strategy("usp", cp_inner=2)
mesh = strategy.mesh(world=8, heads=16, kv_heads=4)
placement = strategy.shard(layout, mesh)                 # who owns which tokens
plan = strategy.plan(placement, shape, MaskSpec())       # what every rank sends, receives and computes

No torch here: a schedule can be planned, proved, priced and drawn on any machine.
"""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from math import gcd, prod
from pathlib import Path
from typing import Any

import yaml

from kernels.mask_spec import MaskSpec
from parallel.exchange import EXCHANGES, INNER_EXCHANGES
from parallel.exchange.compose import build_plan
from parallel.plan.ir import AttentionShape
from parallel.plan.layout import PackedLayout
from parallel.plan.mesh import AXES, MeshSpec
from parallel.plan.placement import Placement
from parallel.plan.plan import Plan
from parallel.sharding import SHARDINGS
from parallel.sharding.planner import DEFAULT, Planner, Setting

PRESETS = Path(__file__).resolve().parents[1] / "conf" / "strategy"
WEIGHTS = ("replicated", "fully_sharded")


@dataclass
class Strategy:
    """A point on the axes of a schedule; plain types, since it is also the schema of the configuration's `strategy`."""

    name: str = "local"  # in messages, figures and W&B tags: the preset that the run began from
    sharding: str = "contiguous"  # which rank owns which tokens: a key of SHARDINGS
    exchange: str = "none"  # how queries meet keys across cp_outer (all_to_all: across all of cp): EXCHANGES, or none
    inner_exchange: str | None = None  # inside each group of cp_inner ranks: all_to_all or ring; null: no inner level
    head_slices: int | None = None  # all_gather: parts of the key heads, gathered one after the other; null: up to 4
    planner: Planner = field(default_factory=Planner)  # whole_document: how a plan is searched for
    batch_groups: int | str = 1  # groups of ranks with rows of their own; auto: as many as divide the rows and cp
    weights: str = "replicated"  # replicated (DDP) or fully_sharded (FSDP2), over dp x cp
    pp: int | None = None  # pipeline stages; only 1 is supported, and null is 1
    dp: int | None = None  # replicas; null: 1, or the ranks that are left where cp_outer is given
    cp_outer: int | None = None  # groups of ranks that share a sequence; null: what is left
    cp_inner: int | None = None  # ranks of a group; null: the most that divide cp and the key heads and fit a node
    tp: int | None = None  # ranks that split each weight; only 1 is supported, and null is 1
    node_size: int = 8  # ranks that share a node's fast links
    buffer_bytes: int | None = None  # auto: most bytes of temporary buffers on a rank; null: no limit

    def __post_init__(self) -> None:
        if isinstance(self.planner, dict):  # as plain data has it
            self.planner = Planner(**self.planner)

    def validate(self) -> None:
        """Raise ValueError, one sentence, for values that no run could use, whatever the model and the world."""
        _choose("sharding", self.sharding, SHARDINGS)
        _choose("exchange", self.exchange, ["none", "auto", *EXCHANGES])
        _choose("inner_exchange", self.inner_exchange, [None, *INNER_EXCHANGES])
        _choose("weights", self.weights, WEIGHTS)
        self.planner.validate()
        if self.exchange == "auto":
            self._validate_auto()
        elif self.buffer_bytes is not None:
            raise ValueError(
                f"strategy.buffer_bytes={self.buffer_bytes} belongs to exchange=auto, and "
                f"exchange={self.exchange} would ignore it; leave it out"
            )
        if self.planner != Planner() and self.sharding != "whole_document" and self.exchange != "auto":
            raise ValueError(
                f"strategy.planner belongs to sharding=whole_document, and sharding={self.sharding} would ignore it; "
                "leave it out"
            )
        if self.batch_groups != "auto" and (not isinstance(self.batch_groups, int) or self.batch_groups < 1):
            raise ValueError(f"strategy.batch_groups={self.batch_groups!r}; give a number of at least 1, or auto")
        for axis in (*AXES, "node_size", "head_slices"):
            value = getattr(self, axis)
            if value is not None and value < 1:
                filled = "" if axis == "node_size" else ", or null to have it filled in"
                raise ValueError(f"strategy.{axis}={value}; give at least 1{filled}")
        for axis in ("pp", "tp"):
            if getattr(self, axis) not in (None, 1):
                raise ValueError(
                    f"strategy.{axis}={getattr(self, axis)} is not supported; use strategy.{axis}=1 and cp or dp"
                )
        if self.head_slices is not None and "all_gather" not in self.exchange:
            raise ValueError(
                f"strategy.head_slices={self.head_slices} belongs to exchange=all_gather or compact_all_gather, and "
                f"exchange={self.exchange} would ignore it; leave it out"
            )
        if self.exchange == "none":
            self._validate_local()
        if self.inner_exchange and self.exchange not in ("none", *_hierarchical()):
            raise ValueError(
                f"inner_exchange={self.inner_exchange} does not combine with exchange={self.exchange}; use "
                f"exchange={' or '.join(_hierarchical())}, or inner_exchange=null"
            )
        if self.inner_exchange == "ring" and self.exchange != "ring":
            raise ValueError(
                f"inner_exchange=ring is the inner lap of a double ring, and exchange={self.exchange} has no laps; use "
                "exchange=ring, or inner_exchange=all_to_all"
            )
        allowed = EXCHANGES[self.exchange].shardings if self.exchange in EXCHANGES else None
        if allowed and self.sharding not in allowed:
            raise ValueError(
                f"exchange={self.exchange} takes sharding={' or '.join(allowed)}, not {self.sharding}: "
                f"{EXCHANGES[self.exchange].why_sharding}"
            )

    def _validate_local(self) -> None:
        """Without an exchange a sequence stays whole, and nothing reads these axes."""
        plain = Strategy()
        for axis in ("sharding", "inner_exchange", "batch_groups"):
            if getattr(self, axis) != getattr(plain, axis):
                raise ValueError(
                    f"strategy.{axis}={getattr(self, axis)} splits a sequence, and exchange=none keeps it on one rank; "
                    f"leave it out, or choose an exchange ({', '.join(EXCHANGES)})"
                )

    def _validate_auto(self) -> None:
        """auto sets these axes itself, batch by batch."""
        plain = Strategy()
        for axis in ("sharding", "inner_exchange", "head_slices", "batch_groups", "cp_inner"):
            if getattr(self, axis) not in (getattr(plain, axis), 1):
                raise ValueError(
                    f"strategy.{axis}={getattr(self, axis)} clashes with exchange=auto, which chooses it for each "
                    "batch; leave it out, or name the preset that you want"
                )
        if self.buffer_bytes is not None and self.buffer_bytes < 0:
            raise ValueError(f"strategy.buffer_bytes={self.buffer_bytes}; give 0 or more, or null for no limit")

    @property
    def label(self) -> str:
        """What runs, in a few words: the preset's name and every axis that is not the preset's."""
        return self.labelled()

    def labelled(self, unnamed: Collection[str] = ()) -> str:
        """`label` without the axes `unnamed`, as where a mesh is told beside it: 'local with exchange=ring'."""
        preset = load_strategy(self.name) if self.name in preset_names() else Strategy(self.name)
        mine, usual = (_flat(dataclasses.asdict(strategy)) for strategy in (self, preset))
        for values in (mine, usual):  # null fills these with 1
            values |= {axis: values[axis] or 1 for axis in ("pp", "dp", "tp")}
        changed = [
            f"{key}={'null' if value is None else value}"
            for key, value in mine.items()
            if value != usual[key] and key not in unnamed
        ]
        return f"{self.name} with {', '.join(changed)}" if changed else self.name

    def mesh(self, world: int, heads: int, kv_heads: int) -> MeshSpec:
        """The mesh on `world` ranks, null axes filled in.

        Raises:
            ValueError: axes that do not multiply to the world, or more ranks than an exchange of heads can use.
        """
        self.validate()
        given = {axis: getattr(self, axis) for axis in AXES}
        fixed = prod(size for size in given.values() if size is not None)
        if world % fixed:
            shown = " x ".join(f"{axis}={size}" for axis, size in given.items() if size not in (None, 1)) or "1"
            raise ValueError(f"{world} ranks do not divide by {shown} = {fixed}; change one of them")
        free = world // fixed
        if given["cp_inner"] is None:  # the inside first, then what is across, then replicas
            given["cp_inner"] = 1
            if self.exchange == "all_to_all":
                given["cp_inner"] = free
            elif self.inner_exchange and self.exchange != "none":
                given["cp_inner"] = self._inner_size(free, kv_heads)
            free //= given["cp_inner"]
        if given["cp_outer"] is None:
            given["cp_outer"] = 1 if self.exchange in ("none", "all_to_all") else free
            free //= given["cp_outer"]
        if given["dp"] is None:
            given["dp"], free = free, 1
        if free != 1:
            total, replicas = world // free, (given["dp"] or 1) * free
            raise ValueError(
                f"{self.labelled(AXES)}: the axes make up {total} ranks, and there are {world}; set "
                f"strategy.dp={replicas} for replicas, or leave an axis null"
            )
        mesh = MeshSpec(**{axis: size or 1 for axis, size in given.items()}, node_size=self.node_size)
        self._check_mesh(mesh, heads)
        return mesh

    def _inner_size(self, free: int, kv_heads: int) -> int:
        """The most of `free` ranks that a node holds whole groups of and, for heads, that divide the key heads."""
        sizes = [n for n in range(1, free + 1) if free % n == 0 and self.node_size % n == 0]
        return max(n for n in sizes if self.inner_exchange == "ring" or kv_heads % n == 0)

    def describe(self, mesh: MeshSpec, rows: int) -> str:
        """The strategy on a mesh in words, for a micro-batch of `rows` rows: what null axes have become."""
        if mesh.world == 1:
            return self.label
        text = f"{self.labelled(AXES)}: dp {mesh.dp} x cp_outer {mesh.cp_outer} x cp_inner {mesh.cp_inner}"
        if self.inner_exchange and 1 in (mesh.cp_outer, mesh.cp_inner):
            text += " (one level)"
        groups = 1 if self.exchange == "auto" else self.groups(rows, mesh.cp)
        if groups > 1 or self.batch_groups == "auto":
            text += f", {rows} rows on {groups} batch groups of {mesh.cp // groups} ranks"
        return text

    def _check_mesh(self, mesh: MeshSpec, heads: int) -> None:
        if self.exchange == "none" and mesh.cp > 1:
            raise ValueError(
                f"{self.labelled(AXES)}: exchange=none keeps a sequence on one rank, and cp_outer x cp_inner = "
                f"{mesh.cp}; choose an exchange ({', '.join(EXCHANGES)}), or use strategy.dp={mesh.cp} instead"
            )
        if self.exchange == "all_to_all" and mesh.cp_outer > 1:
            raise ValueError(
                f"exchange=all_to_all spans all of cp, so cp_outer={mesh.cp_outer} must be 1; use strategy=usp for two "
                "levels"
            )
        if self.exchange not in ("none", "all_to_all") and mesh.cp_inner > 1 and self.inner_exchange is None:
            raise ValueError(
                f"cp_inner={mesh.cp_inner} needs an exchange inside the group; set strategy.inner_exchange="
                f"{' or '.join(INNER_EXCHANGES)}, or use cp_outer={mesh.cp} alone"
            )
        if self.splits_heads and mesh.cp_inner > heads and self.batch_groups == 1:
            raise ValueError(
                f"cp_inner={mesh.cp_inner} ranks cannot share {heads} query heads; use cp_inner={heads} or less, or "
                "exchange=ring"
            )

    @property
    def splits_heads(self) -> bool:
        """Whether the ranks of an inner group exchange tokens for heads."""
        return self.exchange == "all_to_all" or self.inner_exchange == "all_to_all"

    def groups(self, rows: int, cp: int) -> int:
        """Batch groups of a micro-batch of `rows` packed rows on `cp` ranks: with auto, the most that divide both.

        Raises:
            ValueError: a number of groups that does not divide both.
        """
        if self.batch_groups == "auto":
            return gcd(rows, cp) if rows else 1
        groups = int(self.batch_groups)
        if rows % groups or cp % groups:
            raise ValueError(
                f"strategy.batch_groups={groups} does not divide the micro-batch's {rows} rows and the {cp} ranks that "
                f"share it; use {_divisors(gcd(rows, cp))}, or auto"
            )
        return groups

    def shard(self, layout: PackedLayout, mesh: MeshSpec, shape: AttentionShape = DEFAULT.shape) -> Placement:
        """Deal the tokens of `layout` to the cp ranks of `mesh`: rows to batch groups, and inside by the sharding.

        A planned sharding weighs attention of `shape` against its bytes; the others do not look at it.

        Raises:
            ValueError: an unknown sharding, or batch groups that do not divide the rows and the ranks.
        """
        self.validate()
        groups = self.groups(layout.num_rows, mesh.cp)
        ranks, rows = mesh.cp // groups, layout.num_rows // groups
        split = self._split(mesh, ranks)
        deal, units = SHARDINGS[self.sharding], []
        setting = Setting(
            self.planner, shape, max(1, mesh.node_size // split), gathered=self.exchange == "compact_all_gather"
        )
        for group in range(groups):
            part = layout if groups == 1 else layout.select_rows(group * rows, (group + 1) * rows)
            units += [unit.shift(group * rows * layout.row_length) for unit in deal(part, ranks // split, setting)]
        return Placement(layout, mesh, tuple(units), split, groups)

    def _split(self, mesh: MeshSpec, ranks: int) -> int:
        """Ranks that share a unit's heads, in a batch group of `ranks`."""
        if not self.splits_heads:
            return 1
        return ranks if self.exchange == "all_to_all" else gcd(mesh.cp_inner, ranks)

    def check_rows(self, mesh: MeshSpec, rows: int, heads: int) -> None:
        """Raise ValueError where a micro-batch of `rows` rows does not fit the mesh and the model's heads."""
        split = self._split(mesh, mesh.cp // self.groups(rows, mesh.cp))
        if split > heads:
            raise ValueError(
                f"{split} ranks of a group cannot share {heads} query heads; use cp_inner={heads} or less, more rows "
                "in a micro-batch, or exchange=ring"
            )

    def plan(self, placement: Placement, shape: AttentionShape, mask: MaskSpec, ranks: list[int] | None = None) -> Plan:
        """The steps of every cp rank, forward and backward; or of `ranks` alone, which costs their share of the time.

        Raises:
            ValueError: a combination that cannot work, with the numbers and a way out.
        """
        self.validate()
        if not isinstance(mask, MaskSpec):
            raise ValueError(
                f"mask={mask!r} is no MaskSpec; give MaskSpec() for causal, MaskSpec(window=...) and so on"
            )
        if self.exchange == "auto":
            raise ValueError(
                "exchange=auto plans through parallel.auto.resolve, which chooses a strategy for the batch"
            )
        self._check_mesh(placement.mesh, shape.H)
        self.check_rows(placement.mesh, placement.layout.num_rows, shape.H)
        exchange = EXCHANGES.get(self.exchange)
        if exchange is not None:
            exchange.check(placement.mesh, shape, mask)
        return build_plan(dataclasses.asdict(self), placement, shape, mask, exchange, ranks)


def load_strategy(name: str, **overrides: Any) -> Strategy:
    """The preset `name` of conf/strategy with some axes changed.

    Raises:
        ValueError: an unknown preset or axis, or axes that do not combine.
    """
    known = preset_names()
    _choose("strategy", name, known)
    values = yaml.safe_load((PRESETS / f"{name}.yaml").read_text())
    fields = {field.name for field in dataclasses.fields(Strategy)}
    for key in (*values, *overrides):
        if key not in fields:
            raise ValueError(f"strategy {name} has no axis {key!r}; choose among {', '.join(sorted(fields))}")
    chosen = {**values, **overrides}
    strategy = Strategy(**chosen)
    strategy.validate()
    return strategy


def preset_names() -> list[str]:
    """The presets of conf/strategy, in alphabetical order."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _divisors(n: int) -> str:
    return " or ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def _hierarchical() -> list[str]:
    return [name for name, exchange in EXCHANGES.items() if exchange.hierarchical]


def _choose(what: str, value: Any, known: Any) -> None:
    if value not in known:
        names = ", ".join("null" if name is None else str(name) for name in known)
        raise ValueError(f"{what}={value!r} is unknown; choose one of {names}")
