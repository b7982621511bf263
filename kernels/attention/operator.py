"""Attention in a compiler's graph: `longfold::attention` and its backward, over the table of backends.

Under torch.compile the mask travels as its four tensors, so that other documents are other values of the same graph,
and whatever a backend derives from them on the host stays inside the operator, opaque to the compiler.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.attention.autograd import Passes, Saved
from kernels.attention.backends import choose_backend
from kernels.attention.checks import first_order
from kernels.attention.problem import Problem, scale_of, sum_dtype
from kernels.mask import IntervalMask


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
    problem = Problem.checked(q, k, v, masks_of(sides), softmax_scale, softcap, sink)
    with torch.autocast(q.device.type, enabled=False):
        return _passes(backend, q).forward(problem)


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
    high = sum_dtype(q.dtype)
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
    saved = Saved(Problem(q, k, v, masks_of(sides), scale_of(q, softmax_scale), softcap, sink), out, lse)
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


def _passes(backend: str, q: Tensor) -> Passes:
    return choose_backend(backend, q).passes()
