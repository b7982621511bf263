"""Document-masked attention on CPU out of torch's dense flash operator, called on the parts of the mask's staircase.

Parts over the same queries merge by log-sum-exp. Backward hands each part the merged out and lse, so that the parts'
gradients simply add up (FlashAttention-2, arXiv 2307.08691, section 3.1). Half precision is computed in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.autograd import Gradients, Passes, Saved, differentiable
from kernels.attention.dense import CappedDense, Dense, FlashDense
from kernels.attention.problem import Problem, adjacent, sum_dtype
from kernels.attention.rounds import Rounds, Stats, row_delta
from kernels.attention.staircase import Slice, TileBatch, plan_staircase
from kernels.merge.merge import merge_into, sink_gradient


def attention_torch(problem: Problem) -> tuple[Tensor, Tensor]:
    """(out [Tq, H, Dv], lse [H, Tq]) of `kernels.api.attention`, in fp64 for fp64 inputs and in fp32 otherwise."""
    return differentiable(PASSES, problem)


def _forward(problem: Problem) -> tuple[Tensor, Tensor]:
    q, k, v, sink = problem.q, problem.k, problem.v, problem.sink
    plan = plan_staircase(problem.masks)
    T, H, Dv = *q.shape[:2], v.shape[2]
    if sink is None and len(plan.slices) == 1 and not plan.batches and plan.slices[0].q1 - plan.slices[0].q0 == T:
        out, log = _forward_slice(choose_dense(problem), plan.slices[0], *_widened(q, k, v))
        return out[..., :Dv].contiguous(), log.T.contiguous()
    out = q.new_zeros(T, H, Dv, dtype=problem.high)
    lse = q.new_full((H, T), -float("inf"), dtype=problem.high)
    if sink is not None:
        lse[:, : problem.covered] = sink[:, None]  # a partial result of the sink alone
    forward_parts(problem, out, lse, sink is None)
    return out, lse


def _backward(saved: Saved, dout: Tensor | None, dlse: Tensor | None, need_q: bool, need_kv: bool) -> Gradients:
    problem, out, lse = saved.problem, saved.out, saved.lse
    q, k, v, sink = problem.q, problem.k, problem.v, problem.sink
    dout = torch.zeros_like(out) if dout is None else dout
    delta = None if dlse is None and sink is None else row_delta(out, dout, lse, dlse)
    dq, dk, dv = (x.new_zeros(x.shape, dtype=problem.high) for x in (q, k, v))
    merged = out if dlse is None else None
    backward_parts(problem, dout, merged, delta, lse, dq, dk, dv, True)
    dsink = None
    if sink is not None and delta is not None:
        covered = problem.covered
        dsink = sink_gradient(sink, lse[:, :covered], delta[:, :covered])
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink


PASSES = Passes(_forward, _backward, wide=True)


class TorchRounds(Rounds):
    """Rounds on the parts of the staircase; stats keep out, which the flash operator takes instead of delta."""

    def _forward(self, problem: Problem, out: Tensor, lse: Tensor) -> None:
        n = problem.mask.Tq
        unseen = lse[:, :n] == -float("inf")
        fresh = bool(unseen.all())
        if fresh:
            out[:n] = 0
        elif bool(unseen.any()):
            out[:n].masked_fill_(unseen.T[..., None], 0)
        forward_parts(problem, out, lse, fresh)

    def _backward(self, problem: Problem, dout: Tensor, stats: Stats, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        backward_parts(problem, dout, stats.out, stats.delta, stats.lse, dq, dk, dv, False)

    def _stats(self, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None) -> Stats:
        return Stats(row_delta(out, dout, lse, dlse), lse, out if dlse is None else None)


def choose_dense(problem: Problem) -> Dense:
    """How a part is computed."""
    return FlashDense(problem.scale) if problem.softcap is None else CappedDense(problem.scale, problem.softcap)


def _widened(*tensors: Tensor, width: int = 0) -> list[Tensor]:
    """Tensors in compute precision, zero-padded to one width, with adjacent columns; as they are where that holds."""
    width = max(width, *(x.shape[-1] for x in tensors))
    wide = []
    for x in tensors:
        x = x.to(sum_dtype(x.dtype))
        if x.shape[-1] < width:
            x = F.pad(x, (0, width - x.shape[-1]))
        wide.append(adjacent(x))
    return wide


def forward_parts(problem: Problem, out: Tensor, lse: Tensor, fresh: bool) -> None:
    """Merge the parts of a problem into out [Tq, H, Dv] and lse [H, Tq], which hold numbers in fp32 or fp64.

    `fresh`: they hold 0 and -inf, so that results are stored rather than merged where the plan allows it.
    """
    plan, dense = plan_staircase(problem.masks), choose_dense(problem)
    Dv, log = problem.v.shape[2], lse.T
    q, k, v = _widened(problem.q, problem.k, problem.v)
    for part in plan.slices:
        o, part_log = _forward_slice(dense, part, q, k, v)
        rows = slice(part.q0, part.q1)
        if fresh and part.fresh_q:
            out[rows], log[rows] = o[..., :Dv], part_log
        else:
            merge_into(out[rows], lse[:, rows], o[..., :Dv], part_log.T)
    for batch in plan.batches:
        o, part_log = _forward_batch(dense, batch, q, k, v)
        o = o[..., :Dv]
        if not (fresh and batch.fresh_q):
            old, old_log = out.index_select(0, batch.q_rows), log.index_select(0, batch.q_rows)
            merge_into(old, old_log.T, o, part_log.T)
            o, part_log = old, old_log
        out.index_copy_(0, batch.q_rows, o)
        log.index_copy_(0, batch.q_rows, part_log)


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


def _forward_batch(dense: Dense, batch: TileBatch, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    qs, ks, vs = _gather(batch, q, k, v)
    o, log = dense.forward(qs, ks, vs, batch.bias is None, _bias(batch, q))
    o = _headed(o).reshape(batch.n * batch.R, *q.shape[1:]).index_select(0, batch.q_slot)
    log = log.transpose(1, 2).reshape(batch.n * batch.R, -1).index_select(0, batch.q_slot)
    return o, log


def backward_parts(
    problem: Problem,
    dout: Tensor,
    out: Tensor | None,
    delta: Tensor | None,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    fresh: bool,
) -> None:
    """Add the parts' gradients to dq, dk, dv (fp32 or fp64), given the merged lse [H, Tq] and either out or delta.

    `fresh`: they hold 0, so that results are stored rather than added where the plan allows it.
    """
    plan, dense = plan_staircase(problem.masks), choose_dense(problem)
    q, k, v = problem.q, problem.k, problem.v
    lse, Dv = lse.T, v.shape[2]
    if out is None:
        assert delta is not None
        width = max(q.shape[2], Dv + 8 - Dv % 8 if q.shape[2] <= Dv else 0)
        out, dout = _carry_delta(delta, dout, width)
    out, dout, q, k, v = _widened(out, dout, q, k, v)
    for part in plan.slices:
        grads = _backward_slice(dense, part, q, k, v, out, lse, dout)
        for grad, g, first, stop, store in (
            (dq, grads[0], part.q0, part.q1, part.fresh_q),
            (dk, grads[1], part.k0, part.k1, part.fresh_k),
            (dv, grads[2], part.k0, part.k1, part.fresh_k),
        ):
            g = g[..., : grad.shape[2]]
            if fresh and store:
                grad[first:stop] = g
            else:
                grad[first:stop] += g
    for batch in plan.batches:
        gq, gk, gv = _backward_batch(dense, batch, q, k, v, out, lse, dout)
        store_q, store_k = fresh and batch.fresh_q, fresh and batch.fresh_k
        _scatter(dq, gq, batch.q_slot, batch.q_rows, store_q, True)
        _scatter(dk, gk, batch.k_slot, batch.k_rows, store_k, batch.distinct_k)
        _scatter(dv, gv, batch.k_slot, batch.k_rows, store_k, batch.distinct_k)


def _carry_delta(delta: Tensor, dout: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(stand-in for out, wider dout) with rowsum(dout * out) = delta [H, T], in a spare column, whose v is 0."""
    Dv, dout = dout.shape[2], F.pad(dout.to(delta.dtype), (0, width - dout.shape[2]))
    dout[..., Dv] = 1
    out = torch.zeros_like(dout)
    out[..., Dv] = delta.T
    return out, dout


def _backward_slice(
    dense: Dense, part: Slice, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, ...]:
    rows, cols = slice(part.q0, part.q1), slice(part.k0, part.k1)
    do, qs, ks, vs, o, log = _blocks(part, dout[rows], q[rows], k[cols], v[cols], out[rows], lse[rows])
    return tuple(_joined(part, g) for g in dense.backward(do, qs, ks, vs, o, log, part.kind != "full", None))


def _backward_batch(
    dense: Dense, batch: TileBatch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
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
    """Store or add the entries `slot` of g, cut to grad's width, to the rows of grad, in a fixed order."""
    g = g[..., : grad.shape[2]].index_select(0, slot)
    if not distinct:
        grad.index_put_((rows,), g, accumulate=True)
    elif fresh:
        grad.index_copy_(0, rows, g)
    else:
        grad.index_copy_(0, rows, g.add_(grad.index_select(0, rows)))


def _gather(batch: TileBatch, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tiles' tokens as [n, heads, R or C, D]."""
    qs = q.index_select(0, batch.q_index).unflatten(0, (batch.n, batch.R))
    ks, vs = (x.index_select(0, batch.k_index).unflatten(0, (batch.n, batch.C)) for x in (k, v))
    return _headed(qs), _headed(ks), _headed(vs)


def _bias(batch: TileBatch, q: Tensor) -> Tensor | None:
    return None if batch.bias is None else batch.bias.to(q.dtype)


def _headed(x: Tensor) -> Tensor:
    """Swap tokens and heads: [B, T, H, D] <-> [B, H, T, D]."""
    return x.transpose(1, 2)
