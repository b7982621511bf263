"""Cross-entropy of long rows over large vocabularies without ever holding their logits.

The loss of a step is the sum over its valid tokens divided by their global count, which the caller gives; a mean of
means would weigh ranks and micro-batches unequally.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

IGNORED = -100
BUDGET_BYTES = 256 * 2**20


def check_labels(labels: Int[Tensor, " T"], vocab_size: int) -> None:
    """Raises ValueError naming the first label outside [0, vocab_size) that is not the ignored value -100."""
    wrong = (labels != IGNORED) & ((labels < 0) | (labels >= vocab_size))
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        raise ValueError(
            f"label {int(labels[index])} at row {index} is outside the vocabulary of {vocab_size}; "
            f"labels lie in [0, {vocab_size - 1}], and {IGNORED} marks a token without a label"
        )


def chunked_cross_entropy(
    hidden: Float[Tensor, "T h"],
    weight: Float[Tensor, "V h"],
    labels: Int[Tensor, " T"],
    chunk: int | None = None,
    softcap: float | None = None,
    budget_bytes: int = BUDGET_BYTES,
) -> Float[Tensor, " T"]:
    """Negative log-likelihood of each label in nats, fp32 (fp64 for fp64); 0 where the label is -100.

    Logits `hidden @ weight.T` (then `softcap * tanh(logits / softcap)`, if given) exist for `chunk` rows at a time,
    by default as many as `budget_bytes` holds with two temporaries of their size, and are made again in backward.
    Operands follow autocast; products are summed, and the softmax is taken, in fp32. Ignored rows cost nothing.
    Gradients flow to `hidden` and `weight` and honour any upstream gradient per token; the weight's is summed in fp32.
    Looking at the labels waits for the device.

    Raises ValueError for a label outside the vocabulary, or a chunk, budget or softcap that is not positive.
    """
    if (chunk is not None and chunk < 1) or budget_bytes < 1:
        raise ValueError(f"chunk={chunk} and budget_bytes={budget_bytes} must be at least 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap} must be positive (None: no cap)")
    check_labels(labels, weight.shape[0])
    device = hidden.device.type
    dtype = hidden.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    if chunk is None:
        wide = 8 if dtype == torch.float64 else 4
        chunk = max(1, budget_bytes // (3 * wide * weight.shape[0]))
    return _ChunkedCrossEntropy.apply(hidden, weight, labels, chunk, softcap, dtype, budget_bytes)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Saves the log-sum-exp of each valid row; the gradient of a logit is (softmax - one_hot) * upstream."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        softcap: float | None,
        dtype: torch.dtype,
        budget_bytes: int,
    ) -> Tensor:
        valid = (labels != IGNORED).nonzero().squeeze(1)
        head = _operand(weight, dtype)
        wide = _wide(dtype)
        lse = torch.empty(valid.shape[0], dtype=wide, device=hidden.device)
        nll = torch.zeros(labels.shape[0], dtype=wide, device=hidden.device)
        for start in range(0, valid.shape[0], chunk):
            rows = valid[start : start + chunk]
            logits = _logits(_operand(hidden[rows], dtype), head, softcap)
            lse[start : start + chunk] = torch.logsumexp(logits, dim=1)
            chosen = logits.gather(1, labels[rows].long().unsqueeze(1)).squeeze(1)
            nll[rows] = lse[start : start + chunk] - chosen
        ctx.save_for_backward(hidden, weight, labels, valid, lse)
        ctx.chunk, ctx.softcap, ctx.dtype, ctx.budget_bytes = chunk, softcap, dtype, budget_bytes
        return nll

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, upstream: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, valid, lse = ctx.saved_tensors
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        head = _operand(weight, ctx.dtype)
        d_hidden = torch.zeros_like(hidden) if want_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=_wide(ctx.dtype), device=weight.device) if want_weight else None
        for start in range(0, valid.shape[0], ctx.chunk):
            rows = valid[start : start + ctx.chunk]
            states = _operand(hidden[rows], ctx.dtype)
            logits = _logits(states, head, ctx.softcap)
            d_logits = _d_logits(logits, lse[start : start + ctx.chunk], labels[rows], upstream[rows], ctx.softcap)
            d_logits = _operand(d_logits.to(ctx.dtype), ctx.dtype)
            if d_hidden is not None:
                d_hidden[rows] = _matmul(d_logits, head).to(hidden.dtype)
            if d_weight is not None:
                _accumulate(d_weight, d_logits, states, ctx.budget_bytes)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden, d_weight, None, None, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to `dtype`, and widened again where the device cannot multiply narrow numbers into fp32 sums."""
    x = x.to(dtype)
    return x if x.is_cuda else x.to(_wide(dtype))


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with fp32 sums and an fp32 result (fp64 for fp64), whatever autocast says."""
    with torch.autocast(a.device.type, enabled=False):
        if a.dtype == _wide(a.dtype):
            return torch.mm(a, b)
        return torch.mm(a, b, out_dtype=torch.float32)


def _logits(states: Tensor, head: Tensor, softcap: float | None) -> Tensor:
    logits = _matmul(states, head.T)
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _d_logits(logits: Tensor, lse: Tensor, labels: Tensor, upstream: Tensor, softcap: float | None) -> Tensor:
    """The gradient of the uncapped logits `[rows, V]`; overwrites `logits`."""
    slope = None if softcap is None else logits.div(softcap).square_().neg_().add_(1.0)
    grad = logits.sub_(lse.unsqueeze(1)).exp_()
    grad[torch.arange(labels.shape[0], device=labels.device), labels.long()] -= 1.0
    grad.mul_(upstream.unsqueeze(1))
    return grad if slope is None else grad.mul_(slope)


def _accumulate(d_weight: Tensor, d_logits: Tensor, states: Tensor, budget_bytes: int) -> None:
    """d_weight += d_logits.T @ states; narrow operands go by slices of the vocabulary, so that the product is small."""
    with torch.autocast(d_weight.device.type, enabled=False):
        if d_logits.dtype == d_weight.dtype:
            d_weight.addmm_(d_logits.T, states)
            return
    step = max(1, budget_bytes // (4 * d_weight.shape[1]))
    for start in range(0, d_weight.shape[0], step):
        columns = d_logits[:, start : start + step]
        d_weight[start : start + step] += _matmul(columns.T, states)
