"""One rank's share of every batch: its replica's rows, its part of their tokens, and the module that learns."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from data.batch import IGNORE, PackedBatch
from models.attend import Attend, local_attend
from models.decoder import Decoder
from models.initialise import Distribute, in_full
from parallel.api import ContextParallel
from parallel.plan.ir import CLASSES, AttentionShape
from parallel.plan.mesh import LINKS
from parallel.strategy import Strategy
from parallel.weights.data_parallel import parallelise, placed_like, settle
from training.config import Precision
from training.team import Team

AHEAD = 24  # micro-batches planned ahead, so that a step's and the next one's plans are all kept
Fill = Callable[[Decoder, Distribute], None]  # gives every parameter its value, or the part of it that lies there
DTYPES = {torch.float32: "fp32", torch.float64: "fp64"}


class TokenLosses(nn.Module):
    """The decoder and its loss as one forward: what data parallelism wraps, so that it sees every use of a weight."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor, labels: Tensor, attend: Attend) -> Tensor:
        """Negative log-likelihood in nats of each token, [T] fp32; 0 where the label is ignored."""
        return self.model.token_nll(self.model(tokens, positions, attend), labels)


@dataclass(frozen=True)
class LocalTokens:
    """The tokens [t] that this rank holds of a micro-batch, and attention among all the ranks that hold it."""

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    attend: Attend


class Share:
    """What one rank of `team` does of a step; without a team, all of it.

    Args:
        model: whole weights, the same on every rank; sharded in place where the strategy says so.
        strategy: how the ranks of a replica share its tokens, and all ranks the weights.
        fill: of a model on the meta device: fills it once it is allocated, so that no rank ever holds more than its
            share of sharded weights.
    """

    def __init__(
        self, model: Decoder, team: Team | None = None, strategy: Strategy | None = None, fill: Fill | None = None
    ) -> None:
        self.model, self.team = model, team
        self.device = team.device if team and fill else next(model.parameters()).device
        self.replicas, self.replica, self.context = 1, 0, None
        self.module: nn.Module = TokenLosses(model)
        self._work = 0.0
        if team and strategy:
            mesh = team.mesh
            self.replicas, self.replica = mesh.dp, mesh.coordinates(team.rank).dp
            if mesh.cp > 1:
                self.context = ContextParallel(strategy, mesh, team.groups, team.rank, model.config.attention)
            group = team.groups.get("dp_cp")
            sharded = strategy.weights == "fully_sharded" and group is not None
            if fill and not sharded:
                self._allocate(team, fill, in_full)
            self.module = parallelise(self.module, model.layers, strategy.weights, group, self.device)
            if fill and sharded:
                self._allocate(team, fill, placed_like)
            settle(self.module, self._zero_loss)
        if model.config.compile:
            model.compile_layers()  # last: settling a single token would cost graphs of their own

    def _allocate(self, team: Team, fill: Fill, place: Distribute) -> None:
        self.model.to_empty(device=self.device)
        team.together(lambda: fill(self.model, place))

    def _zero_loss(self) -> Tensor:
        zero = torch.zeros(1, dtype=torch.long, device=self.device)
        attend = local_attend([0], [1], 1, self.model.config.layer_masks(), self.device, self.model.config.attention)
        return self.module(zero, zero, zero + IGNORE, attend).sum()

    def micro_batches(self, batch: PackedBatch, accumulate: int = 1) -> list[PackedBatch]:
        """This replica's rows, in `accumulate` parts; the i-th parts of all replicas are one process's i-th."""
        return batch.micro_batches(accumulate * self.replicas)[self.replica :: self.replicas]

    def part(self, micro: PackedBatch, precision: Precision) -> LocalTokens:
        """This rank's tokens of one of `micro_batches`; valid until the next call."""
        layout, config = micro.layout, self.model.config
        self.model.check_lengths(int(layout.lengths.max(initial=0)))
        masks = tuple(config.layer_masks())
        whole = [t.flatten() for t in (micro.tokens, micro.positions, micro.labels)]
        if self.context is None:
            spans = layout.starts.tolist(), layout.stops.tolist(), layout.total_tokens
            attend: Attend = local_attend(*spans, masks, self.device, config.attention)
            self._work += sum(layout.pairs(mask) for mask in set(masks))
        else:
            attend = self.context
            self.context.bind(layout, self._shape(precision), masks, self.device)
            # whole sequences are cut only here: labels and positions, made before, lose nothing at a boundary
            whole = [self.context.shard(t) for t in whole]
            self._work += self.context.work()
        tokens, positions, labels = (t.to(self.device) for t in whole)
        return LocalTokens(tokens, positions, labels, attend)

    def prepare(self, batch: PackedBatch, accumulate: int, precision: Precision) -> None:
        """Begin to plan the exchanges of a batch that comes later, on a thread."""
        if self.context is not None:
            for micro in self.micro_batches(batch, accumulate)[:AHEAD]:
                masks = tuple(self.model.config.layer_masks())
                self.context.prepare(micro.layout, self._shape(precision), masks)

    def _shape(self, precision: Precision) -> AttentionShape:
        config = self.model.config
        dtype = "bf16" if precision is Precision.bf16 else DTYPES[next(self.model.parameters()).dtype]
        return AttentionShape(config.heads, config.kv_heads, config.head_dim, config.head_dim, dtype)

    def choice(self) -> dict[str, float | str | None]:
        """What strategy=auto chose for the last micro-batch, by metric; None under another strategy."""
        resolved = self.context.resolved if self.context else None
        seconds = resolved.seconds if resolved else {}
        first = resolved.strategy.name if resolved and seconds else None
        second = resolved.runner_up if resolved and seconds else None
        return {
            "plan/choice": first,
            "plan/predicted_s": seconds[first] if first else None,
            "plan/runner_up": second or None,
            "plan/runner_up_s": seconds[second] if second else None,
        }

    def bad_documents(self, micro: PackedBatch, nll: Tensor) -> list[str]:
        """Names of the documents of which this rank holds a token of the last `part` with a loss that is not finite."""
        ids = torch.from_numpy(micro.layout.document_ids())
        if self.context is not None:
            ids = self.context.shard(ids)
        found = ids[~torch.isfinite(nll).cpu()].unique().tolist()
        return [micro.documents[index].name for index in found if index >= 0]

    def take_figures(self) -> dict[str, float]:
        """Since the last call: `work`, the allowed pairs that attention covered here, a layer of each mask;
        `exposed`, seconds of waiting for plans; and the bytes that exchanges moved from here, by metric. The same keys
        on every rank and under every strategy: what nothing moved is 0."""
        work, self._work = self._work, 0.0
        sent = self.context.take_bytes() if self.context else {f"{c}/{link}": 0 for c in CLASSES for link in LINKS}
        exposed = self.context.take_exposed() if self.context else 0.0
        return {"work": work, "exposed": exposed, **{f"comm/bytes/{key}": float(size) for key, size in sent.items()}}

    def total(self, value: float) -> float:
        """The sum of every rank's `value`."""
        return float(self.team.gather([value]).sum()) if self.team else value
