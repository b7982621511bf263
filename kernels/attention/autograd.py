"""The two directions of a backend as one differentiable call in eager; `operator.py` has it for a compiler's graph."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.attention.checks import first_order
from kernels.attention.problem import Problem

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Saved:
    """What backward needs of a forward: its problem, and out [Tq, H, Dv] and lse [H, Tq] as `Passes.forward` gave."""

    problem: Problem
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Passes:
    """The two directions of a backend, outside autograd.

    Attributes:
        forward: problem -> (out, lse).
        backward: (saved, dout, dlse, need_q, need_kv) -> (dq, dk, dv, dsink); a missing dout or dlse is zero, one of
            them is there. What is not needed may be None.
        wide: whether forward's out is fp32 (fp64 for fp64), to be rounded afterwards, rather than in q's dtype.
    """

    forward: Callable[[Problem], tuple[Tensor, Tensor]]
    backward: Callable[[Saved, Tensor | None, Tensor | None, bool, bool], Gradients]
    wide: bool


def differentiable(passes: Passes, problem: Problem) -> tuple[Tensor, Tensor]:
    """(out [Tq, H, Dv] in q's dtype, lse [H, Tq]), differentiable once."""
    out, lse = _Attention.apply(problem.q, problem.k, problem.v, problem.sink, passes, problem)
    return out, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, passes: Passes, problem: Problem
    ) -> tuple[Tensor, Tensor]:
        out, lse = passes.forward(problem)
        # not the problem: tensors are kept by autograd alone, which others may offload or recompute
        ctx.passes, ctx.options = passes, (problem.masks, problem.scale, problem.softcap)
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
            return (None,) * 6
        need_q, need_k, need_v, _ = ctx.needs_input_grad[:4]
        q, k, v, sink, out, lse = ctx.saved_tensors
        masks, scale, softcap = ctx.options
        saved = Saved(Problem(q, k, v, masks, scale, softcap, sink), out, lse)
        return *ctx.passes.backward(saved, dout, dlse, need_q, need_k or need_v), None, None
