"""A backend's attention as one differentiable call: an autograd.Function in eager, `longfold::attention` in a compiler.

Under torch.compile the mask travels as its four tensors, so that other documents are other values of the same graph,
and whatever a backend derives from them on the host stays inside the operator, opaque to the compiler.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.attention.checks import check_inputs, first_order
from kernels.mask import IntervalMask, require_disjoint

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


@torch.library.custom_op("longfold::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    sides: Sequence[Tensor],
    softmax_scale: float | None,
    softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `kernels.api.attention`, out as `Passes.forward` gives it. `sides` are each band's four tensors."""
    masks = masks_of(sides)
    check_inputs(q, k, v, masks, softmax_scale, softcap, sink)
    require_disjoint(masks)
    with torch.autocast(q.device.type, enabled=False):
        return _passes(backend, q).forward(q, k, v, masks, scale_of(q, softmax_scale), softcap, sink)


@attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    sides: Sequence[Tensor],
    softmax_scale: float | None,
    softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    high = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2], dtype=high if _passes(backend, q).wide else q.dtype)
    return out, q.new_empty(q.shape[1], q.shape[0], dtype=high)


@torch.library.custom_op("longfold::attention_backward", mutates_args=())
def attention_backward_op(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sides: Sequence[Tensor],
    softmax_scale: float | None,
    softcap: float | None,
    backend: str,
    need_q: bool,
    need_kv: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsink), each empty where it is not needed."""
    saved = Saved(q, k, v, sink, out, lse, masks_of(sides), scale_of(q, softmax_scale), softcap)
    with torch.autocast(q.device.type, enabled=False):
        dq, dk, dv, dsink = _passes(backend, q).backward(saved, dout, dlse, need_q, need_kv)
    needed = (dq if need_q else None, dk if need_kv else None, dv if need_kv else None, dsink)
    tensors = [q.new_empty(0) if grad is None else grad.contiguous() for grad in needed]
    return tensors[0], tensors[1], tensors[2], tensors[3]


@attention_backward_op.register_fake
def _(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sides: Sequence[Tensor],
    softmax_scale: float | None,
    softcap: float | None,
    backend: str,
    need_q: bool,
    need_kv: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape if needed else (0,)) for x, needed in ((q, need_q), (k, need_kv), (v, need_kv)))
    return dq, dk, dv, q.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sink, sides, *options = inputs
    ctx.options, ctx.bands = options, len(sides)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sink, *output, *sides)


@first_order
def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    nothing = [None] * ctx.bands, None, None, None
    if dout is None and dlse is None:
        return None, None, None, None, *nothing
    q, k, v, sink, out, lse, *sides = ctx.saved_tensors
    need_q, need_k, need_v, *_ = ctx.needs_input_grad
    need_kv = need_k or need_v
    dq, dk, dv, dsink = attention_backward_op(dout, dlse, q, k, v, sink, out, lse, sides, *ctx.options, need_q, need_kv)
    return (dq if need_q else None, *((dk, dv) if need_kv else (None, None)), None if sink is None else dsink, *nothing)


attention_op.register_autograd(_backward, setup_context=_save)


def masks_of(sides: Sequence[Tensor]) -> tuple[IntervalMask, ...]:
    """Bands from the four tensors of each, with what was derived from them before."""
    return tuple(IntervalMask.of_sides(*sides[i : i + 4]) for i in range(0, len(sides), 4))


def scale_of(q: Tensor, softmax_scale: float | None) -> float:
    """The factor of the logits: 1 / sqrt(D) by default."""
    return q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)


def _passes(backend: str, q: Tensor) -> Passes:
    from kernels.attention.backends import choose_backend  # the table's entries are built on this file

    return choose_backend(backend, q).passes()
