"""One rank's share of every batch: its replica's rows, its part of their tokens, and the module that learns."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from data.batch import IGNORE, PackedBatch
from models.attend import Attend, local_attend
from models.decoder import Decoder
from parallel.data_parallel import parallelise, settle
from training.rendezvous import Team


class TokenLosses(nn.Module):
    """The decoder and its loss as one forward: what data parallelism wraps, so that it sees every use of a weight."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor, labels: Tensor, attend: Attend) -> Tensor:
        """Negative log-likelihood in nats of each token, [T] fp32; 0 where the label is ignored."""
        return self.model.token_nll(self.model(tokens, positions, attend), labels)


@dataclass(frozen=True)
class Part:
    """The tokens [t] that this rank holds of a micro-batch, and attention among all the ranks that hold it."""

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    attend: Attend


class Share:
    """What one rank of `team` does of a step; without a team, all of it.

    Args:
        model: whole weights, the same on every rank; sharded in place where the strategy says so.
        weights: `strategy.weights`.
    """

    def __init__(self, model: Decoder, team: Team | None = None, weights: str = "replicated") -> None:
        self.model, self.team = model, team
        self.device = next(model.parameters()).device
        self.replicas = team.mesh.dp if team else 1
        self.replica = team.mesh.coordinates(team.rank).dp if team else 0
        group = team.groups.get("dp_cp") if team else None
        self.module = parallelise(TokenLosses(model), model.layers, weights, group)
        settle(self.module, self._zero_loss)

    def _zero_loss(self) -> Tensor:
        zero = torch.zeros(1, dtype=torch.long, device=self.device)
        config = self.model.config
        attend = local_attend([0], [1], 1, config.layer_windows(), self.device, config.attention)
        return self.module(zero, zero, zero + IGNORE, attend).sum()

    def micro_batches(self, batch: PackedBatch, accumulate: int = 1) -> list[PackedBatch]:
        """This replica's rows, in `accumulate` parts; the i-th parts of all replicas are one process's i-th."""
        return batch.micro_batches(accumulate * self.replicas)[self.replica :: self.replicas]

    def part(self, micro: PackedBatch) -> Part:
        """This rank's tokens of one of `micro_batches`; valid until the next call."""
        layout, config = micro.layout, self.model.config
        self.model.check_lengths(int(layout.lengths.max(initial=0)))
        attend = local_attend(
            layout.starts.tolist(),
            layout.stops.tolist(),
            layout.total_tokens,
            config.layer_windows(),
            device=self.device,
            backend=config.attention,
        )
        tokens, positions, labels = (t.flatten().to(self.device) for t in (micro.tokens, micro.positions, micro.labels))
        return Part(tokens, positions, labels, attend)

    def bad_documents(self, micro: PackedBatch, nll: Tensor) -> list[str]:
        """Names of the documents of which this rank holds a token with a loss that is not finite."""
        ids = torch.from_numpy(micro.layout.document_ids())
        found = ids[~torch.isfinite(nll).cpu()].unique().tolist()
        return [micro.documents[index].name for index in found if index >= 0]

    def total(self, value: float) -> float:
        """The sum of every rank's `value`."""
        return float(self.team.gather([value]).sum()) if self.team else value
