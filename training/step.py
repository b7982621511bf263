"""One optimiser step's forward and backward, and an evaluation: loss = sum over valid tokens / their global count."""

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from data.batch import PackedBatch
from models.attend import local_attend
from models.decoder import Decoder
from training.config import Precision


class NonFiniteLoss(ArithmeticError):
    """A NaN or infinite loss or gradient: names the step and the documents."""


@dataclass
class StepLoss:
    """The loss of a step in nats per token, and the documents that hold a loss which is not finite."""

    loss: float
    bad_documents: list[str]


def token_losses(model: Decoder, batch: PackedBatch, precision: Precision) -> Tensor:
    """Negative log-likelihood in nats of each token of `batch`, [rows * seq_len] fp32; 0 where the label is ignored."""
    device = next(model.parameters()).device
    layout = batch.layout
    model.check_lengths(int(layout.lengths.max(initial=0)))
    attend = local_attend(
        layout.starts.tolist(),
        layout.stops.tolist(),
        layout.total_tokens,
        model.config.layer_windows(),
        device=device,
        backend=model.config.attention,
    )
    with autocast(device, precision):
        hidden = model(batch.tokens.flatten().to(device), batch.positions.flatten().to(device), attend)
        return model.token_nll(hidden, batch.labels.flatten().to(device))


def autocast(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager:
    """bf16 autocast, or nothing."""
    if precision is Precision.bf16:
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def forward_backward(model: Decoder, batch: PackedBatch, accumulate: int, precision: Precision) -> StepLoss:
    """Accumulate the gradient of the step's loss over `accumulate` micro-batches into `.grad`.

    Every token weighs the same whatever micro-batch it lies in: each micro-batch's sum is divided by the whole step's
    count of valid tokens. A step without valid tokens has loss 0 and zero gradients.
    """
    count = max(1, batch.label_tokens)
    total, bad = 0.0, []
    for micro in batch.micro_batches(accumulate):
        nll = token_losses(model, micro, precision)
        loss = nll.sum(dtype=torch.float64 if nll.dtype == torch.float64 else torch.float32) / count
        loss.backward()
        value = loss.item()
        if not math.isfinite(value):
            bad += documents_with_bad_loss(micro, nll.detach())
        total += value
    return StepLoss(total, bad)


def documents_with_bad_loss(batch: PackedBatch, nll: Tensor) -> list[str]:
    """Names of the documents that hold a token whose loss is not finite."""
    bad = (~torch.isfinite(nll)).cpu().numpy()
    layout = batch.layout
    spans = zip(batch.documents, layout.starts.tolist(), layout.stops.tolist())
    return [document.name for document, start, stop in spans if bad[start:stop].any()]


@dataclass
class Evaluation:
    """Held-out loss in nats per token, and in bits per byte where every token stands for bytes (else None)."""

    loss: float
    bits_per_byte: float | None


@torch.no_grad()
def evaluate(
    model: Decoder, batches: Iterable[PackedBatch], precision: Precision, stop: Callable[[], bool] = lambda: False
) -> Evaluation | None:
    """Sum of losses over sum of counts, over all batches: never a mean of means. None once `stop()` says so."""
    total, tokens, size = 0.0, 0, 0
    for batch in batches:
        if stop():
            return None
        total += token_losses(model, batch, precision).sum(dtype=torch.float64).item()
        tokens += batch.label_tokens
        size += batch.predicted_bytes
    loss = total / max(1, tokens)
    return Evaluation(loss, total / math.log(2) / size if size else None)
