"""The public face of parallel: attention over a sequence that is split among ranks; plans, proved and run.

    from parallel.api import AttentionShape, MaskSpec, MeshSpec, PackedLayout, load_strategy, run_loopback, verify

On real ranks:

    cp = ContextParallel(load_strategy("usp"), mesh, Groups(mesh, rank), rank)
    cp.bind(layout, shape)                                 # once a batch: plan, masks
    out = cp.attention(cp.shard(q), cp.shard(k), cp.shard(v))   # in every layer; differentiable
    whole = cp.unshard(out)

In one process, to see that a plan is right: `run_loopback(plan, q, k, v, dout)`.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.attention.backends import choose_rounds
from kernels.attention.problem import scale_of
from kernels.mask_spec import CAUSAL, MaskSpec
from parallel.auto import Resolved, resolve
from parallel.plan.ir import AttentionShape
from parallel.plan.layout import PackedLayout
from parallel.plan.mesh import MeshSpec
from parallel.plan.placement import Placement
from parallel.plan.plan import Plan
from parallel.proof.verify import PlanError, verify
from parallel.runtime.ahead import Ahead
from parallel.runtime.attention import Engine, planned_attention
from parallel.runtime.bind import DTYPES, BoundPlan, token_index
from parallel.runtime.buffers import BufferPool
from parallel.runtime.comm import Recorder, TorchTransport, gather_uneven
from parallel.runtime.executor import Options
from parallel.runtime.groups import Groups
from parallel.runtime.loopback import LoopbackResult, run_loopback
from parallel.strategy import Strategy, load_strategy

__all__ = [
    "AttentionShape", "ContextParallel", "Groups", "LoopbackResult", "MaskSpec", "MeshSpec", "PackedLayout", "Plan",
    "PlanError", "Strategy", "load_strategy", "run_loopback", "verify",
]  # fmt: skip


class LayerContext(Protocol):
    """What a layer tells its attention (`models.attend.AttentionContext`)."""

    @property
    def layer(self) -> int: ...
    @property
    def mask(self) -> MaskSpec: ...
    @property
    def softmax_scale(self) -> float: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def sink(self) -> Tensor | None: ...


class Batch(NamedTuple):
    """What a batch's plans depend on."""

    layout: PackedLayout
    shape: AttentionShape
    masks: tuple[MaskSpec, ...]


class ContextParallel:
    """One rank's attention under a strategy. `bind` it to each batch, then call it in every layer.

    Args:
        rank: the world rank.
        backend: a key of kernels.api.BACKENDS, or auto.
    """

    def __init__(self, strategy: Strategy, mesh: MeshSpec, groups: Groups, rank: int, backend: str = "auto") -> None:
        self.strategy, self.mesh, self.groups, self.backend = strategy, mesh, groups, backend
        self.rank = mesh.cp_index(rank)
        self.recorder = Recorder()
        self.transport = TorchTransport(groups, self.rank)
        self._pools: dict[torch.device, BufferPool] = {}
        self.plans: Ahead[Batch, Resolved] = Ahead(self._plan)
        self.resolved: Resolved | None = None  # what the bound batch runs, and what auto weighed
        self._bound: dict[MaskSpec, BoundPlan] = {}
        self._engine: Engine | None = None
        self._placement: Placement | None = None
        self._index = torch.zeros(0, dtype=torch.int64, device="cpu")

    def bind(
        self,
        layout: PackedLayout,
        shape: AttentionShape,
        masks: Sequence[MaskSpec] = (CAUSAL,),
        device: torch.device | str = "cpu",
    ) -> None:
        """Take the batch's plans for this rank, one for each distinct mask among the layers, or make them now.

        Every rank of the cp group must bind the same layout: their plans' hashes are compared.

        Raises:
            ValueError: what the strategy refuses, or ranks whose plans differ; the same on every rank, before any
                attention is sent.
        """
        device = torch.device(device)
        if not masks:
            raise ValueError("masks is empty, so no plan would be made; give the MaskSpec of each layer")
        self.resolved = self.plans.get(Batch(layout, shape, tuple(masks)))
        plans = self.resolved.plans
        self._agree(plans, device)
        self._bound = {mask: BoundPlan(plan, self.rank, device) for mask, plan in plans.items()}
        self._placement = next(iter(plans.values())).placement
        self._index = token_index(self._placement.sets[self.rank], device)
        pool = self._pools.setdefault(device, BufferPool(device))
        rounds = choose_rounds(self.backend, torch.empty(0, 1, 1, dtype=DTYPES[shape.dtype], device=device))
        self._engine = Engine(self.transport, pool, rounds, self.recorder)

    def prepare(self, layout: PackedLayout, shape: AttentionShape, masks: Sequence[MaskSpec] = (CAUSAL,)) -> None:
        """Begin to plan a batch that will be bound later, on a thread of its own."""
        self.plans.prepare(Batch(layout, shape, tuple(masks)))

    def _plan(self, batch: "Batch") -> Resolved:
        return resolve(self.strategy, self.mesh, *batch, ranks=[self.rank])

    def _agree(self, plans: dict[MaskSpec, Plan], device: torch.device) -> None:
        """Raise ValueError on every rank unless all have made the same plans. Always compared: a rank that skipped it
        because it knows its own plan would leave the others waiting."""
        group = self.groups.get("cp")
        if group is None:
            return
        name = "".join(plan.hash for plan in plans.values())
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        mine = torch.tensor([list(digest)], dtype=torch.uint8, device=device)
        found = [part.tolist()[0] for part in gather_uneven(mine, [1] * self.mesh.cp, group)]
        strangers = [rank for rank, other in enumerate(found) if other != found[0]]
        if strangers:
            raise ValueError(
                f"the ranks of a sequence have planned different batches: {strangers} differ from rank 0 of "
                f"{self.mesh.cp}; give every rank of a cp group the same layout"
            )

    @property
    def placement(self) -> Placement:
        """Who owns which tokens of the bound batch. ValueError before `bind`."""
        if self._placement is None:
            raise ValueError("no batch is bound; call bind(layout, shape) first")
        return self._placement

    def shard(self, x: Tensor) -> Tensor:
        """This rank's tokens of `x[T, ...]`, in the order in which `attention` takes them.

        Raises:
            ValueError: another number of tokens than the bound batch has.
        """
        total = self.placement.layout.total_tokens
        if x.shape[0] != total:
            raise ValueError(f"x has {x.shape[0]} tokens and the bound batch {total}; shard whole batches, once")
        return x[self._index.to(x.device)]

    def unshard(self, x: Tensor) -> Tensor:
        """All ranks' `x[t, ...]` put together in the sequence's order, on every rank; not differentiable.

        Raises:
            ValueError: another number of tokens than this rank owns.
        """
        sets = self.placement.sets
        if x.shape[0] != sets[self.rank].count:
            raise ValueError(f"x has {x.shape[0]} tokens, and rank {self.rank} owns {sets[self.rank].count}")
        parts = gather_uneven(x.detach(), [tokens.count for tokens in sets], self.groups.get("cp"))
        whole = x.new_empty(self.placement.layout.total_tokens, *x.shape[1:])
        for tokens, part in zip(sets, parts):
            whole[token_index(tokens, x.device)] = part
        return whole

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: MaskSpec = CAUSAL,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """`q[t, H, D], k[t, Hkv, D], v[t, Hkv, Dv] -> out[t, H, Dv]` over the whole sequence, for this rank's tokens.

        Raises:
            ValueError: no batch is bound, or no plan was made for the mask, or tensors of another shape.
        """
        if self._engine is None or mask not in self._bound:
            made = "; ".join(str(one) for one in self._bound) or "none"
            raise ValueError(f"no plan was made for the mask ({mask}); bind(layout, shape, masks=[...]) made: {made}")
        scale = scale_of(q, softmax_scale)
        return planned_attention(self._engine, self._bound[mask], q, k, v, Options(scale, softcap, sink))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ctx: LayerContext) -> Tensor:
        """As `models.attend.Attend`."""
        return self.attention(
            q, k, v, mask=ctx.mask, softmax_scale=ctx.softmax_scale, softcap=ctx.softcap, sink=ctx.sink
        )

    def work(self) -> float:
        """Allowed pairs that this rank computes in the bound batch, all masks, a head's pair counting 1 / H."""
        own = [(bound.plan, bound.programs["forward"]) for bound in self._bound.values()]
        return sum(plan.work_of(program) / plan.shape.H for plan, program in own)

    def take_exposed(self) -> float:
        """Seconds that `bind` has waited for plans since the last call."""
        exposed, self.plans.exposed_s = self.plans.exposed_s, 0.0
        return exposed

    def take_bytes(self) -> dict[str, int]:
        """`{"kv/intra": bytes, ...}` sent or copied by this rank since the last call."""
        found = self.recorder.by_link(self.mesh, self.groups.cp_ranks)
        self.recorder.bytes.clear()
        return found
