"""Partial attention results joined by their log-sum-exp, and the attention sink, which is a partial without a value.

Softmax over a union of key sets is the average of the softmaxes over each, weighted by exp(lse). (Online softmax:
Milakov and Gimelshein, arXiv 1805.02867; used between devices by Ring Attention, arXiv 2310.01889.)
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kernels.arguments import spelled
from kernels.attention.checks import DTYPES, first_order
from kernels.compile.runtime import triton_installed


def merge(
    outs: Sequence[Float[Tensor, "T H D"]] | Float[Tensor, "n T H D"],
    lses: Sequence[Float[Tensor, "H T"]] | Float[Tensor, "n H T"],
) -> tuple[Float[Tensor, "T H D"], Float[Tensor, "H T"]]:
    """Attention over all keys from n partial results over disjoint sets of keys.

    `outs` are the partial outputs [T, H, D] and `lses` their natural-log sums of exponentials [H, T], as lists or
    stacked along a leading dim. Arithmetic is fp32 (fp64 for fp64). A partial whose lse is -inf or +inf (some kernels'
    mark for a row without keys) weighs nothing, whatever its out holds; where all are so, the result is (0, -inf).
    Returns fresh tensors: out in the dtype of `outs`, lse in fp32 (fp64 for fp64). Differentiable in outs and lses
    through both results; partials that weigh nothing get gradient 0.

    Raises:
        ValueError: no partials, or partials whose number, shapes or dtypes disagree.
    """
    outs, lses = _listed("outs", outs), _listed("lses", lses)
    check_partials(outs, lses)
    if torch.compiler.is_compiling():
        return merge_op(outs, lses)
    if outs[0].device.type == "cuda" and outs[0].dtype != torch.float64 and triton_installed():
        from kernels.merge.triton_merge import merge_triton  # a machine without a GPU may lack Triton

        return merge_triton(outs, lses)
    out, lse = _Merge.apply(*outs, *lses)
    return out, lse


@torch.no_grad()
def merge_into(
    out: Float[Tensor, "T H D"],
    lse: Float[Tensor, "H T"],
    part: Float[Tensor, "T H D"],
    part_lse: Float[Tensor, "H T"],
) -> None:
    """Merge a partial result of other keys into the running `out` and `lse`, in place, by the rules of `merge`.

    `out` and `lse` are fp32 or fp64; `part` may be narrower. Where all weigh nothing, out becomes 0 and lse -inf. Not
    differentiable.

    Raises:
        ValueError: shapes that disagree, or running results in half precision, which would lose digits each time.
    """
    _check_running(out, lse, part, part_lse)
    adjacent = out.is_contiguous() and lse.is_contiguous()
    if out.device.type == "cuda" and out.dtype == torch.float32 and adjacent and triton_installed():
        from kernels.merge.triton_merge import merge_into_triton  # a machine without a GPU may lack Triton

        return merge_into_triton(out, lse, part, part_lse)
    mine, theirs = _live_lse(lse, lse.dtype), _live_lse(part_lse, lse.dtype)
    base, total = _pool([mine, theirs])
    part = _weighted(part.to(out.dtype), _share(theirs, base, total))  # first: it may be `out` itself
    out.copy_(_weighted(out, _share(mine, base, total))).add_(part)
    lse.copy_(base + total.log())


def sink_gradient(
    sink: Float[Tensor, " H"], lse: Float[Tensor, "H T"], delta: Float[Tensor, "H T"]
) -> Float[Tensor, " H"]:
    """d sink[h] = -sum_i p_sink[h, i] delta[h, i], over the rows that the sink is part of.

    lse includes the sink; delta = rowsum(dout * out) - dlse.
    """
    chance = (sink.to(lse.dtype)[:, None] - torch.where(lse == -float("inf"), 0, lse)).exp_()
    return torch.where(chance == 0, 0, chance * -delta).sum(1).to(sink.dtype)


def _check_running(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Raise ValueError unless (part, part_lse) fits into the running (out, lse)."""
    want = (out.shape[1], out.shape[0])
    if out.shape != part.shape or not lse.shape == part_lse.shape == want:
        raise ValueError(
            f"out is {tuple(out.shape)} and the partial {tuple(part.shape)}, with lses {tuple(lse.shape)} and "
            f"{tuple(part_lse.shape)}; give both as [T, H, D] with lse [H, T] = {want}"
        )
    if out.dtype not in (torch.float32, torch.float64) or lse.dtype != out.dtype:
        raise ValueError(
            f"a running result must be fp32 or fp64, but out is {out.dtype} and lse {lse.dtype}; cast once, at the end"
        )


def _listed(name: str, partials: Sequence[Tensor] | Tensor) -> list[Tensor]:
    """Partials in a list, stacked or listed."""
    if isinstance(partials, Tensor) and partials.dim():
        return list(partials.unbind(0))
    if isinstance(partials, Tensor) or not isinstance(partials, Sequence):
        raise ValueError(f"{name} must be tensors in a list or stacked along a leading dim, not {spelled(partials)}")
    return list(partials)


def check_partials(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    """Raise ValueError unless there are n >= 1 outs [T, H, D] of one dtype and n lses [H, T]."""
    if not outs or len(outs) != len(lses):
        raise ValueError(f"merge got {len(outs)} outputs and {len(lses)} lses; give at least one and as many of each")
    for name, partials in (("outs", outs), ("lses", lses)):
        for x in partials:
            if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.device != outs[0].device:
                raise ValueError(f"{name} must be floating tensors on one device, but one is {spelled(x)}")
    if outs[0].dim() != 3:
        raise ValueError(f"a partial output must be [T, H, D], not {tuple(outs[0].shape)}")
    T, H, _ = outs[0].shape
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != outs[0].shape or out.dtype != outs[0].dtype:
            raise ValueError(
                f"partial {i} has out {tuple(out.shape)} {out.dtype}, but partial 0 has "
                f"{tuple(outs[0].shape)} {outs[0].dtype}; cast or cut them to agree"
            )
        if lse.shape != (H, T):
            raise ValueError(f"partial {i} has lse {tuple(lse.shape)}, but [H, T] = {(H, T)} is needed; transpose it?")


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *partials: Tensor) -> tuple[Tensor, Tensor]:
        outs, lses = partials[: len(partials) // 2], partials[len(partials) // 2 :]
        high = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
        base, total = _pool([_live_lse(lse, high) for lse in lses])
        out = torch.zeros(outs[0].shape, dtype=high, device=outs[0].device)
        for part, lse in zip(outs, lses):
            out += _weighted(part.to(high), _share(_live_lse(lse, high), base, total))
        ctx.save_for_backward(*partials, out, base, total)
        ctx.set_materialize_grads(False)
        return out.to(outs[0].dtype, copy=True), base + total.log()

    @staticmethod
    @first_order
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        dout, dlse = grads
        *partials, out, base, total = ctx.saved_tensors
        outs, lses = partials[: len(partials) // 2], partials[len(partials) // 2 :]
        douts: list[Tensor | None] = []
        dlses: list[Tensor | None] = []
        dout = None if dout is None else dout.to(out.dtype)
        delta = None if dout is None else (dout * out).sum(-1).T
        for part, lse in zip(outs, lses):
            weight = _share(_live_lse(lse, out.dtype), base, total)
            change = torch.zeros_like(weight) if dlse is None else dlse.to(out.dtype)
            if dout is not None and delta is not None:
                alive = torch.where((weight == 0).T[..., None], 0, part.to(out.dtype))
                change = change + (dout * alive).sum(-1).T - delta
            dlses.append(torch.where(weight == 0, 0, weight * change).to(lse.dtype))
            douts.append(None if dout is None else _weighted(dout, weight).to(part.dtype))
        return (*douts, *dlses)


def _live_lse(lse: Tensor, dtype: torch.dtype) -> Tensor:
    """lse with +inf, which marks an empty row in some kernels, written as -inf."""
    lse = lse.to(dtype)
    return torch.where(lse == float("inf"), -float("inf"), lse)


def _pool(lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(base, total) with sum_i exp(lse_i) = exp(base) * total; total is 0 where all lses are -inf."""
    top = lses[0]
    for lse in lses[1:]:
        top = torch.maximum(top, lse)
    base = torch.where(top == -float("inf"), 0, top)  # (-inf) - (-inf) would be NaN
    total = torch.zeros_like(base)
    for lse in lses:
        total += (lse - base).exp_()
    return base, total


def _share(lse: Tensor, base: Tensor, total: Tensor) -> Tensor:
    """The weight of a partial in the merged result; exp(lse - merged lse) would lose digits where lses are large."""
    return (lse - base).exp_().div_(torch.where(total == 0, 1, total))


def _weighted(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H, D] times weight [H, T], with 0 where the weight is 0 even if x is NaN there."""
    w = weight.T[..., None]
    return torch.where(w == 0, 0, x * w)


@torch.library.custom_op("longfold::merge", mutates_args=())
def merge_op(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """`merge` of lists as one operator in a compiler's graph, so that its rules for empty rows are not traced apart."""
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
