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
    device = hidden.device.type
    dtype = hidden.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    if chunk is None:
        wide = 8 if dtype == torch.float64 else 4
        chunk = max(1, budget_bytes // (3 * wide * weight.shape[0]))
    options = (chunk, softcap, dtype, budget_bytes)
    if torch.compiler.is_compiling():
        return cross_entropy_op(hidden, weight, labels, *options)[0]
    check_labels(labels, weight.shape[0])
    return _ChunkedCrossEntropy.apply(hidden, weight, labels, *options)


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
        valid = _valid(labels)
        nll, lse = _losses(hidden, weight, labels, valid, chunk, softcap, dtype)
        ctx.save_for_backward(hidden, weight, labels, valid, lse)
        ctx.options = chunk, softcap, dtype, budget_bytes
        return nll

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, upstream: Tensor
    ) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = _gradients(upstream, *ctx.saved_tensors, *ctx.options, *ctx.needs_input_grad[:2])
        return d_hidden, d_weight, None, None, None, None, None


@torch.library.custom_op("longfold::cross_entropy", mutates_args=())
def cross_entropy_op(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int,
    softcap: float | None,
    dtype: torch.dtype,
    budget_bytes: int,
) -> tuple[Tensor, Tensor]:
    """In a compiler's graph, where the loop over valid rows must not be seen: nll [T], and lse of the valid, then 0."""
    check_labels(labels, weight.shape[0])
    nll, lse = _losses(hidden, weight, labels, _valid(labels), chunk, softcap, dtype)
    return nll, torch.cat((lse, lse.new_zeros(labels.shape[0] - lse.shape[0])))


@cross_entropy_op.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int,
    softcap: float | None,
    dtype: torch.dtype,
    budget_bytes: int,
) -> tuple[Tensor, Tensor]:
    nll, lse = (hidden.new_empty(labels.shape, dtype=_wide(dtype)) for _ in range(2))
    return nll, lse


@torch.library.custom_op("longfold::cross_entropy_backward", mutates_args=())
def cross_entropy_backward_op(
    upstream: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    lse: Tensor,
    chunk: int,
    softcap: float | None,
    dtype: torch.dtype,
    budget_bytes: int,
    want_hidden: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of hidden and weight, empty where they are not wanted."""
    options = (chunk, softcap, dtype, budget_bytes, want_hidden, want_weight)
    grads = _gradients(upstream, hidden, weight, labels, _valid(labels), lse, *options)
    d_hidden, d_weight = (hidden.new_empty(0) if grad is None else grad for grad in grads)
    return d_hidden, d_weight


@cross_entropy_backward_op.register_fake
def _(
    upstream: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    lse: Tensor,
    chunk: int,
    softcap: float | None,
    dtype: torch.dtype,
    budget_bytes: int,
    want_hidden: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if want_hidden else (0,)),
        weight.new_empty(weight.shape) if want_weight else hidden.new_empty(0),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, labels, *options = inputs
    ctx.options = options
    ctx.save_for_backward(hidden, weight, labels, output[1])


def _backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    want_hidden, want_weight = ctx.needs_input_grad[:2]
    grads = cross_entropy_backward_op(upstream, *ctx.saved_tensors, *ctx.options, want_hidden, want_weight)
    d_hidden, d_weight = (grad if want else None for grad, want in zip(grads, (want_hidden, want_weight)))
    return d_hidden, d_weight, None, None, None, None, None


cross_entropy_op.register_autograd(_backward, setup_context=_save)


def _valid(labels: Tensor) -> Tensor:
    return (labels != IGNORED).nonzero().squeeze(1)


def _losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    valid: Tensor,
    chunk: int,
    softcap: float | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """nll [T], 0 where the label is ignored, and the log-sum-exp of each valid row."""
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
    return nll, lse


def _gradients(
    upstream: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    valid: Tensor,
    lse: Tensor,
    chunk: int,
    softcap: float | None,
    dtype: torch.dtype,
    budget_bytes: int,
    want_hidden: bool,
    want_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    head = _operand(weight, dtype)
    d_hidden = torch.zeros_like(hidden) if want_hidden else None
    d_weight = torch.zeros(weight.shape, dtype=_wide(dtype), device=weight.device) if want_weight else None
    for start in range(0, valid.shape[0], chunk):
        rows = valid[start : start + chunk]
        states = _operand(hidden[rows], dtype)
        logits = _logits(states, head, softcap)
        d_logits = _d_logits(logits, lse[start : start + chunk][: len(rows)], labels[rows], upstream[rows], softcap)
        d_logits = _operand(d_logits.to(dtype), dtype)
        if d_hidden is not None:
            d_hidden[rows] = _matmul(d_logits, head).to(hidden.dtype)
        if d_weight is not None:
            _accumulate(d_weight, d_logits, states, budget_bytes)
    return d_hidden, None if d_weight is None else d_weight.to(weight.dtype)


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
