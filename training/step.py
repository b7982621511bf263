"""One optimiser step's forward and backward, and an evaluation: loss = sum over valid tokens / their global count."""

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from data.batch import PackedBatch
from models.decoder import Decoder
from parallel.weights.data_parallel import release, sync_gradients
from training.config import Precision
from training.share import Share


class NonFiniteLoss(ArithmeticError):
    """A NaN or infinite loss or gradient: names the step and the documents."""


@dataclass
class StepLoss:
    """This rank's part of a step's loss in nats per token, and its documents with a loss that is not finite."""

    loss: float
    bad_documents: list[str]


def token_losses(share: Share, micro: PackedBatch, precision: Precision) -> Tensor:
    """Negative log-likelihood in nats of this rank's tokens of `micro`, fp32; 0 where the label is ignored."""
    part = share.part(micro, precision)
    with autocast(share.device, precision):
        return share.module(part.tokens, part.positions, part.labels, part.attend)


def autocast(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager:
    """bf16 autocast, or nothing."""
    if precision is Precision.bf16:
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def forward_backward(
    model: Decoder, batch: PackedBatch, accumulate: int, precision: Precision, share: Share | None = None
) -> StepLoss:
    """Accumulate this rank's share of the gradient over `accumulate` micro-batches, then sum over ranks, into `.grad`.

    Every token weighs the same whatever micro-batch or rank it lies in: each sum is divided by the whole step's count
    of valid tokens. A rank without valid tokens adds 0; a step without any has loss 0 and zero gradients.
    """
    share = share or Share(model)
    count = max(1, batch.label_tokens)
    total, bad = 0.0, []
    micros = share.micro_batches(batch, accumulate)
    for index, micro in enumerate(micros, 1):
        with sync_gradients(share.module, index == len(micros)):
            nll = token_losses(share, micro, precision)
            loss = nll.sum(dtype=torch.float64) / count
            loss.backward()
        value = loss.item()
        if not math.isfinite(value):
            bad += share.bad_documents(micro, nll.detach())
        total += value
    return StepLoss(total, bad)


@dataclass
class Evaluation:
    """Held-out loss in nats per token, and in bits per byte where every token stands for bytes (else None)."""

    loss: float
    bits_per_byte: float | None


@torch.no_grad()
def evaluate(
    model: Decoder,
    batches: Iterable[PackedBatch],
    precision: Precision,
    stop: Callable[[], bool] = lambda: False,
    share: Share | None = None,
) -> Evaluation | None:
    """Sum of losses over sum of counts, over all batches and ranks: never a mean of means. None once `stop()` says so.

    `stop` is asked before every batch, on every rank, and must give all of them the same answer.
    """
    share = share or Share(model)
    total, tokens, size = 0.0, 0, 0
    try:
        ahead = iter(batches)
        after = next(ahead, None)
        while (batch := after) is not None:
            if stop():
                return None
            after = next(ahead, None)
            if after is not None:
                share.prepare(after, 1, precision)
            (micro,) = share.micro_batches(batch)
            total += token_losses(share, micro, precision).sum(dtype=torch.float64).item()
            tokens += batch.label_tokens
            size += batch.predicted_bytes
    finally:
        release(share.module)
    total = share.total(total)
    loss = total / max(1, tokens)
    return Evaluation(loss, total / math.log(2) / size if size else None)
