"""`merge` in a compiler's graph: one operator each way, so that its rules for empty rows are not traced apart."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.attention.checks import first_order


@torch.library.custom_op("longfold::merge", mutates_args=())
def merge_op(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """`kernels.merge.merge.merge` of lists."""
    from kernels.merge.merge import merge  # which calls this operator under a compiler

    return merge(outs, lses)


@merge_op.register_fake
def _(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    T, H, _ = outs[0].shape
    high = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
    return outs[0].new_empty(outs[0].shape), outs[0].new_empty(H, T, dtype=high)


@torch.library.custom_op("longfold::merge_backward", mutates_args=())
def merge_backward_op(
    dout: Tensor | None, dlse: Tensor | None, outs: Sequence[Tensor], lses: Sequence[Tensor]
) -> list[Tensor]:
    """The gradients of outs, then of lses; merges once more rather than keep what lies between."""
    from kernels.merge.merge import merge

    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (*outs, *lses)]
        results = merge(leaves[: len(outs)], leaves[len(outs) :])
    used = [(result, grad) for result, grad in zip(results, (dout, dlse)) if grad is not None]
    found = torch.autograd.grad(
        [result for result, _ in used], leaves, [grad for _, grad in used], allow_unused=True, materialize_grads=True
    )
    return [grad.contiguous() for grad in found]


@merge_backward_op.register_fake
def _(dout: Tensor | None, dlse: Tensor | None, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (*outs, *lses)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    outs, lses = inputs
    ctx.n = len(outs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*outs, *lses)


@first_order
def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[list[Tensor | None], list[Tensor | None]]:
    if dout is None and dlse is None:
        return [None] * ctx.n, [None] * ctx.n
    partials = list(ctx.saved_tensors)
    grads: list[Tensor | None] = [*merge_backward_op(dout, dlse, partials[: ctx.n], partials[ctx.n :])]
    return grads[: ctx.n], grads[ctx.n :]


merge_op.register_autograd(_backward, setup_context=_save)
