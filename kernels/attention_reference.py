"""The definition of correct: attention on dense scores, differentiated by autograd. O(Tq * Tk) memory, any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.mask import IntervalMask


def dense_mask(masks: Sequence[IntervalMask], Tq: int, Tk: int) -> Tensor:
    """Allowed pairs [Tq, Tk] of the union of bands, False in the padding."""
    allowed = torch.zeros(Tq, Tk, dtype=torch.bool, device=masks[0].device)
    for mask in masks:
        keys = torch.arange(Tk, device=mask.device)
        allowed[: mask.Tq] |= (keys >= mask.k_start[:, None]) & (keys < mask.k_end[:, None])
    return allowed


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Sequence[IntervalMask],
    scale: float,
    softcap: float | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out [Tq, H, Dv], lse [H, Tq]) of `kernels.api.attention`, in fp64 for fp64 inputs and in fp32 otherwise."""
    high = torch.float64 if q.dtype == torch.float64 else torch.float32
    allowed = dense_mask(masks, q.shape[0], k.shape[0])
    sees, seen = allowed.any(1), allowed.any(0)
    group = q.shape[1] // k.shape[1]
    # what the mask leaves out may hold NaN, and 0 * NaN is NaN
    q_live = torch.where(sees[:, None, None], q, 0).to(high)
    k_live = torch.where(seen[:, None, None], k, 0).to(high).repeat_interleave(group, 1)
    v_live = torch.where(seen[:, None, None], v, 0).to(high).repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q_live, k_live) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = torch.where(sees[:, None], scores.masked_fill(~allowed, -float("inf")), 0)  # no all -inf rows
    lse = scores.logsumexp(-1) if k.shape[0] else scores.new_zeros(scores.shape[:2])
    if sink is not None:
        lse = _add_sink(lse, sees, sink.to(high))
    prob = torch.where(sees[:, None], (scores - lse.masked_fill(~sees, 0)[..., None]).exp(), 0)
    out = torch.einsum("hqk,khd->qhd", prob, v_live)
    out = torch.where(sees[:, None, None], out, 0)
    covered = torch.arange(q.shape[0], device=q.device) < max(mask.Tq for mask in masks)
    shown = sees if sink is None else covered
    return out.to(q.dtype), torch.where(shown, lse, -float("inf"))


def _add_sink(lse: Tensor, sees: Tensor, sink: Tensor) -> Tensor:
    """lse [H, Tq] with one more logit sink[H]; rows without keys hold the sink alone. A sink of -inf adds nothing."""
    column = sink[:, None].expand_as(lse)
    present = (column > -float("inf")) & sees
    both = torch.logaddexp(lse, torch.where(present, column, 0))
    return torch.where(present, both, torch.where(sees, lse, column))
