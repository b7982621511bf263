"""The two directions of a backend as one differentiable call in eager; `operator.py` has it for a compiler's graph."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.attention.checks import first_order
from kernels.mask import IntervalMask

Masks = Sequence[IntervalMask]
Forward = Callable[[Tensor, Tensor, Tensor, Masks, float, float | None, Tensor | None], tuple[Tensor, Tensor]]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Saved:
    """What backward needs of a forward: its inputs, and out [Tq, H, Dv] and lse [H, Tq] as `Passes.forward` gave."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    out: Tensor
    lse: Tensor
    masks: Masks
    scale: float
    softcap: float | None


@dataclass(frozen=True)
class Passes:
    """The two directions of a backend on checked inputs, outside autograd.

    Attributes:
        forward: (q, k, v, masks, scale, softcap, sink) -> (out, lse).
        backward: (saved, dout, dlse, need_q, need_kv) -> (dq, dk, dv, dsink); a missing dout or dlse is zero, one of
            them is there. What is not needed may be None.
        wide: whether forward's out is fp32 (fp64 for fp64), to be rounded afterwards, rather than in q's dtype.
    """

    forward: Forward
    backward: Callable[[Saved, Tensor | None, Tensor | None, bool, bool], Gradients]
    wide: bool


def differentiable(
    passes: Passes,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Masks,
    scale: float,
    softcap: float | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out [Tq, H, Dv] in q's dtype, lse [H, Tq]), differentiable once."""
    out, lse = _Attention.apply(q, k, v, sink, passes, masks, scale, softcap)
    return out, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        passes: Passes,
        masks: Masks,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = passes.forward(q, k, v, masks, scale, softcap, sink)
        ctx.passes, ctx.options = passes, (masks, scale, softcap)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        return out.to(q.dtype), lse

    @staticmethod
    @first_order
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        dout, dlse = grads
        if dout is None and dlse is None:
            return (None,) * 8
        need_q, need_k, need_v, _ = ctx.needs_input_grad[:4]
        saved = Saved(*ctx.saved_tensors, *ctx.options)
        return *ctx.passes.backward(saved, dout, dlse, need_q, need_k or need_v), None, None, None, None


def scale_of(q: Tensor, softmax_scale: float | None) -> float:
    """The factor of the logits: 1 / sqrt(D) by default."""
    return q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
