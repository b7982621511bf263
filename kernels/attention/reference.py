"""The definition of correct: attention on dense scores, differentiated by autograd. O(Tq * Tk) memory, any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention.autograd import Gradients, Passes, Saved
from kernels.attention.problem import Problem
from kernels.attention.rounds import Rounds, Stats, row_delta
from kernels.mask import IntervalMask
from kernels.merge.merge import sink_gradient


def dense_mask(masks: Sequence[IntervalMask], Tq: int, Tk: int) -> Tensor:
    """Allowed pairs [Tq, Tk] of the union of bands, False in the padding."""
    allowed = torch.zeros(Tq, Tk, dtype=torch.bool, device=masks[0].device)
    for mask in masks:
        keys = torch.arange(Tk, device=mask.device)
        allowed[: mask.Tq] |= (keys >= mask.k_start[:, None]) & (keys < mask.k_end[:, None])
    return allowed


def attention_reference(problem: Problem) -> tuple[Tensor, Tensor]:
    """(out [Tq, H, Dv], lse [H, Tq]) of `kernels.api.attention`, in fp64 for fp64 inputs and in fp32 otherwise."""
    q, k, v, masks, sink, high = problem.q, problem.k, problem.v, problem.masks, problem.sink, problem.high
    allowed = dense_mask(masks, q.shape[0], k.shape[0])
    sees, seen = allowed.any(1), allowed.any(0)
    group = q.shape[1] // k.shape[1]
    # what the mask leaves out may hold NaN, and 0 * NaN is NaN
    q_live = torch.where(sees[:, None, None], q, 0).to(high)
    k_live = torch.where(seen[:, None, None], k, 0).to(high).repeat_interleave(group, 1)
    v_live = torch.where(seen[:, None, None], v, 0).to(high).repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q_live, k_live) * problem.scale
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    extra = q.new_full(q.shape[1:2], -float("inf"), dtype=high) if sink is None else sink.to(high)
    column = extra[:, None, None].expand(-1, q.shape[0], 1)
    scores = torch.cat([scores.masked_fill(~allowed, -float("inf")), column], -1)
    normal = sees | (extra > -float("inf"))[:, None]  # rows with anything to normalise over
    scores = torch.where(normal[..., None], scores, 0)
    # softmax rather than exp(scores - lse): the lse of huge logits is rounded coarsely
    prob = torch.where(sees[:, None], scores.softmax(-1)[..., :-1], 0)
    out = torch.einsum("hqk,khd->qhd", prob, v_live)
    out = torch.where(sees[:, None, None], out, 0)
    covered = torch.arange(q.shape[0], device=q.device) < problem.covered
    return out.to(q.dtype), torch.where(normal & covered, scores.logsumexp(-1), -float("inf"))


def _forward(problem: Problem) -> tuple[Tensor, Tensor]:
    out, lse = attention_reference(problem)
    return out.contiguous(), lse.contiguous()


class ReferenceRounds(Rounds):
    """Rounds on dense scores, gradients written out; few operations, for many small cases."""

    def _forward(self, problem: Problem, out: Tensor, lse: Tensor) -> None:
        mask, heads = problem.mask, problem.k.shape[1]
        n, m = mask.Tq, mask.Tk
        hidden, blind, unseen = _hidden(mask)
        q = _by_key_head(problem.q[:n], heads, lse.dtype, blind)
        k, v = (_by_key_head(x[:m], heads, lse.dtype, unseen) for x in (problem.k, problem.v))
        scores, _ = _scores(q, k, hidden, problem.scale, problem.softcap)
        scores = scores.view(-1, n, m)
        before, running = lse[:, :n, None], out[:n].transpose(0, 1)
        top = torch.maximum(scores.amax(-1, keepdim=True), before)
        base = torch.where(top == -float("inf"), 0, top)
        prob, weight = scores.sub_(base).exp_(), (before - base).exp_()
        total = prob.sum(-1, keepdim=True).add_(weight)
        acc = torch.where(weight == 0, 0, running * weight)  # what was there may be NaN
        acc += (prob.view(heads, -1, m) @ v).view_as(acc)
        running.copy_(acc.div_(torch.where(total == 0, 1, total)))
        before.copy_(base.add_(total.log_()))

    def _backward(self, problem: Problem, dout: Tensor, stats: Stats, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        mask, heads, scale = problem.mask, problem.k.shape[1], problem.scale
        n, m = mask.Tq, mask.Tk
        hidden, blind, unseen = _hidden(mask)
        q, dout = (_by_key_head(x[:n], heads, dq.dtype, blind) for x in (problem.q, dout))
        k, v = (_by_key_head(x[:m], heads, dq.dtype, unseen) for x in (problem.k, problem.v))
        scores, slope = _scores(q, k, hidden, scale, problem.softcap)
        lse, delta = (x[:, :n].reshape(heads, -1, n, 1) for x in (stats.lse, stats.delta))
        prob = (scores - lse).exp_().masked_fill_(hidden, 0)
        ds = (dout @ v.transpose(1, 2)).view_as(prob).sub_(delta).mul_(prob)
        if slope is not None:
            ds *= slope
        if blind is not None:
            ds.masked_fill_(hidden, 0)
        prob, ds = prob.flatten(1, 2), ds.flatten(1, 2)
        dq[:n].add_((ds @ k).view(dq.shape[1], n, -1).transpose(0, 1), alpha=scale)
        dk[:m].add_((ds.transpose(1, 2) @ q).transpose(0, 1), alpha=scale)
        dv[:m].add_((prob.transpose(1, 2) @ dout).transpose(0, 1))


def _hidden(mask: IntervalMask) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Pairs [Tq, Tk] that the mask hides; queries and keys without any pair, None if there are none. Kept on it."""
    if "hidden" not in mask.cache:
        hidden = ~dense_mask([mask], mask.Tq, mask.Tk)
        gaps = mask.has_gaps()
        mask.cache["hidden"] = hidden, hidden.all(1) if gaps else None, hidden.all(0) if gaps else None
    return mask.cache["hidden"]


def _by_key_head(x: Tensor, heads: int, dtype: torch.dtype, dead: Tensor | None) -> Tensor:
    """[T, H, D] as [Hkv, G * T, D] in the precision of the arithmetic, 0 in the rows `dead` [T], which may hold NaN."""
    x = x.to(dtype)
    if dead is not None:
        x = torch.where(dead[:, None, None], 0, x)
    return x.transpose(0, 1).reshape(heads, -1, x.shape[2])


def _scores(q: Tensor, k: Tensor, hidden: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Logits [Hkv, G, Tq, Tk], -inf where hidden, and with a soft cap their derivative by the uncapped logit."""
    scores = (q @ k.transpose(1, 2)).mul_(scale).view(k.shape[0], q.shape[1] // hidden.shape[0], *hidden.shape)
    slope = None
    if softcap is not None:
        bend = scores.div_(softcap).tanh_()
        slope = 1 - bend * bend
        scores = bend * softcap
    return scores.masked_fill_(hidden, -float("inf")), slope


def _backward(saved: Saved, dout: Tensor | None, dlse: Tensor | None, need_q: bool, need_kv: bool) -> Gradients:
    """By the rounds' formulas: autograd cannot record inside an operator."""
    problem, lse = saved.problem, saved.lse
    q, k, v = problem.q, problem.k, problem.v
    dout = torch.zeros_like(saved.out) if dout is None else dout
    rounds, delta = ReferenceRounds(), row_delta(saved.out, dout, lse, dlse)
    dq, dk, dv = (x.new_zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    for mask in problem.masks:
        rounds.backward(q, k, v, dout, Stats(delta, lse), mask, dq, dk, dv, problem.scale, problem.softcap)
    dsink = None
    if problem.sink is not None:
        covered = problem.covered
        dsink = sink_gradient(problem.sink, lse[:, :covered], delta[:, :covered])
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink


PASSES = Passes(_forward, _backward, wide=False)
