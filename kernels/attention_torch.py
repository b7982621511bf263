"""Document-masked attention on CPU out of torch's dense flash operator, called on the parts of the mask's staircase.

Parts over the same queries merge by log-sum-exp. Backward hands each part the merged out and lse, so that the parts'
gradients simply add up (FlashAttention-2, arXiv 2307.08691, section 3.1). Half precision is computed in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import first_order
from kernels.dense import CappedDense, Dense, FlashDense
from kernels.mask import IntervalMask
from kernels.staircase import Batch, Slice, StaircasePlan, plan_staircase


def attention_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Sequence[IntervalMask],
    scale: float,
    softcap: float | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out [Tq, H, Dv], lse [H, Tq]) of `kernels.api.attention`, in fp64 for fp64 inputs and in fp32 otherwise."""
    dense = FlashDense(scale) if softcap is None else CappedDense(scale, softcap)
    covered = max(mask.Tq for mask in masks)
    out, lse = _StaircaseAttention.apply(q, k, v, sink, plan_staircase(masks), dense, covered)
    return out, lse


class _StaircaseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, plan: StaircasePlan, dense: Dense, covered: int
    ) -> tuple[Tensor, Tensor]:
        width = max(q.shape[-1], v.shape[-1])
        out, lse = run_forward(plan, dense, _widen(q, width), _widen(k, width), _widen(v, width))
        if out.shape[-1] != v.shape[-1]:
            out = out[..., : v.shape[-1]].contiguous()
        if sink is not None:
            whole = lse.clone()
            whole[:covered] = torch.logaddexp(lse[:covered], sink.to(lse.dtype).expand(covered, -1))
            out.mul_((lse - whole.masked_fill(whole == -float("inf"), 0)).exp_()[..., None])
            lse = whole
        ctx.plan, ctx.dense, ctx.covered = plan, dense, covered
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        return out.to(q.dtype), lse.T.contiguous()

    @staticmethod
    @first_order
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        dout, dlse = grads
        q, k, v, sink, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 7
        dout = torch.zeros_like(out) if dout is None else dout.to(out.dtype)
        dlse = None if dlse is None else dlse.to(out.dtype).T
        D, Dv = q.shape[-1], v.shape[-1]
        width = max(D, Dv)
        if dlse is not None and width == Dv:
            width += 8 - Dv % 8  # room for the column that carries dlse
        wide_out, wide_dout = _widen(out, width), _widen(dout, width)
        if dlse is not None:
            wide_out, wide_dout = _carry_dlse(wide_out, wide_dout, dlse, Dv)
        wide_q, wide_k, wide_v = _widen(q, width), _widen(k, width), _widen(v, width)
        dq, dk, dv = run_backward(ctx.plan, ctx.dense, wide_q, wide_k, wide_v, wide_out, lse, wide_dout)
        dsink = None if sink is None else _sink_gradient(sink, out, lse, dout, dlse, ctx.covered)
        return (
            dq[..., :D].to(q.dtype).contiguous(),
            dk[..., :D].to(k.dtype).contiguous(),
            dv[..., :Dv].to(v.dtype).contiguous(),
            dsink, None, None, None,
        )  # fmt: skip


def _widen(x: Tensor, width: int) -> Tensor:
    """x in compute precision, zero-padded to `width` columns, with adjacent columns; x itself where that holds."""
    x = x if x.dtype == torch.float64 else x.float()
    if x.shape[-1] < width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _carry_dlse(out: Tensor, dout: Tensor, dlse: Tensor, column: int) -> tuple[Tensor, Tensor]:
    """Write dlse [T, H] into a spare column, whose v is 0, such that rowsum(dout * out) becomes delta = ... - dlse."""
    out[..., column] = -dlse
    dout[..., column] = 1
    return out, dout


def _sink_gradient(sink: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, covered: int) -> Tensor:
    """d sink[h] = sum_i p_sink[i] (dlse[i] - rowsum(dout * out)[i]) over the rows that the mask covers."""
    out, lse, dout = out[:covered], lse[:covered], dout[:covered]
    chance = (sink.to(lse.dtype) - lse.masked_fill(lse == -float("inf"), 0)).exp_()
    change = -torch.where(out == 0, 0, dout * out).sum(-1)  # rows without keys have out 0 and perhaps a NaN in dout
    if dlse is not None:
        change = change + dlse[:covered]
    return torch.where(chance == 0, 0, chance * change).sum(0).to(sink.dtype)


def run_forward(plan: StaircasePlan, dense: Dense, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out [Tq, H, D] and lse [Tq, H] of a plan; q, k, v of one width in fp32 or fp64."""
    if len(plan.slices) == 1 and not plan.batches and plan.slices[0].q1 - plan.slices[0].q0 == q.shape[0]:
        return _forward_slice(dense, plan.slices[0], q, k, v)
    out = q.new_zeros(q.shape)
    lse = q.new_full(q.shape[:2], -float("inf"))
    for part in plan.slices:
        o, log = _forward_slice(dense, part, q, k, v)
        rows = slice(part.q0, part.q1)
        if part.fresh_q:
            out[rows], lse[rows] = o, log
        else:
            _merge_into(out[rows], lse[rows], o, log)
    for batch in plan.batches:
        o, log = _forward_batch(dense, batch, q, k, v)
        if not batch.fresh_q:
            old_out, old_lse = out.index_select(0, batch.q_rows), lse.index_select(0, batch.q_rows)
            _merge_into(old_out, old_lse, o, log)
            o, log = old_out, old_lse
        out.index_copy_(0, batch.q_rows, o)
        lse.index_copy_(0, batch.q_rows, log)
    return out, lse


def _forward_slice(dense: Dense, part: Slice, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    qs, ks, vs = _blocks(part, q[part.q0 : part.q1], k[part.k0 : part.k1], v[part.k0 : part.k1])
    o, log = dense.forward(qs, ks, vs, part.kind != "full", None)
    return _joined(part, o), _joined(part, log)


def _blocks(part: Slice, *tokens: Tensor) -> list[Tensor]:
    """[count * n, H, ...] as [count, H, n, ...], reversed where row i sees all but i keys, which makes it causal."""
    blocks = [x.unflatten(0, (part.count, -1)) for x in tokens]
    return [_headed(x.flip(1) if part.kind == "anticausal" else x) for x in blocks]


def _joined(part: Slice, x: Tensor) -> Tensor:
    """[count, H, n, ...] as [count * n, H, ...]."""
    x = _headed(x)
    return (x.flip(1) if part.kind == "anticausal" else x).flatten(0, 1)


def _forward_batch(dense: Dense, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    qs, ks, vs = _gather(batch, q, k, v)
    o, log = dense.forward(qs, ks, vs, batch.bias is None, _bias(batch, q))
    o = _headed(o).reshape(batch.n * batch.R, *q.shape[1:]).index_select(0, batch.q_slot)
    log = log.transpose(1, 2).reshape(batch.n * batch.R, -1).index_select(0, batch.q_slot)
    return o, log


def _merge_into(out: Tensor, lse: Tensor, o: Tensor, log: Tensor) -> None:
    """Merge a partial (o, log) into the running (out, lse), in place. lse [n, H]."""
    whole = torch.logaddexp(lse, log)
    base = whole.masked_fill(whole == -float("inf"), 0)
    out.mul_((lse - base).exp_()[..., None]).addcmul_(o, (log - base).exp_()[..., None])
    lse.copy_(whole)


def run_backward(
    plan: StaircasePlan, dense: Dense, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of a plan, given the merged out [Tq, H, D] and lse [Tq, H]."""
    dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for part in plan.slices:
        gq, gk, gv = _backward_slice(dense, part, q, k, v, out, lse, dout)
        for grad, g, first, stop, fresh in (
            (dq, gq, part.q0, part.q1, part.fresh_q),
            (dk, gk, part.k0, part.k1, part.fresh_k),
            (dv, gv, part.k0, part.k1, part.fresh_k),
        ):
            if fresh:
                grad[first:stop] = g
            else:
                grad[first:stop] += g
    for batch in plan.batches:
        gq, gk, gv = _backward_batch(dense, batch, q, k, v, out, lse, dout)
        _scatter(dq, gq, batch.q_slot, batch.q_rows, batch.fresh_q, True)
        _scatter(dk, gk, batch.k_slot, batch.k_rows, batch.fresh_k, batch.distinct_k)
        _scatter(dv, gv, batch.k_slot, batch.k_rows, batch.fresh_k, batch.distinct_k)
    return dq, dk, dv


def _backward_slice(
    dense: Dense, part: Slice, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, ...]:
    rows, cols = slice(part.q0, part.q1), slice(part.k0, part.k1)
    do, qs, ks, vs, o, log = _blocks(part, dout[rows], q[rows], k[cols], v[cols], out[rows], lse[rows])
    return tuple(_joined(part, g) for g in dense.backward(do, qs, ks, vs, o, log, part.kind != "full", None))


def _backward_batch(
    dense: Dense, batch: Batch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, ...]:
    qs, ks, vs = _gather(batch, q, k, v)
    tiles = (batch.n, batch.R)
    do = dout.new_zeros(batch.n * batch.R, *dout.shape[1:])  # padding rows must send nothing to dk, dv
    do.index_copy_(0, batch.q_slot, dout.index_select(0, batch.q_rows))
    o, log = out.index_select(0, batch.q_index), lse.index_select(0, batch.q_index)
    do, o, log = (x.unflatten(0, tiles).transpose(1, 2) for x in (do, o, log))
    g = dense.backward(do, qs, ks, vs, o, log, batch.bias is None, _bias(batch, q))
    return tuple(_headed(x).flatten(0, 1) for x in g)


def _scatter(grad: Tensor, g: Tensor, slot: Tensor, rows: Tensor, fresh: bool, distinct: bool) -> None:
    """Store or add the entries `slot` of g to the rows of grad, in a fixed order."""
    g = g.index_select(0, slot)
    if not distinct:
        grad.index_put_((rows,), g, accumulate=True)
    elif fresh:
        grad.index_copy_(0, rows, g)
    else:
        grad.index_copy_(0, rows, g.add_(grad.index_select(0, rows)))


def _gather(batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tiles' tokens as [n, heads, R or C, D]."""
    qs = q.index_select(0, batch.q_index).unflatten(0, (batch.n, batch.R))
    ks, vs = (x.index_select(0, batch.k_index).unflatten(0, (batch.n, batch.C)) for x in (k, v))
    return _headed(qs), _headed(ks), _headed(vs)


def _bias(batch: Batch, q: Tensor) -> Tensor | None:
    return None if batch.bias is None else batch.bias.to(q.dtype)


def _headed(x: Tensor) -> Tensor:
    """Swap tokens and heads: [B, T, H, D] <-> [B, H, T, D]."""
    return x.transpose(1, 2)
