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
    extra = q.new_full(q.shape[1:2], -float("inf"), dtype=high) if sink is None else sink.to(high)
    column = extra[:, None, None].expand(-1, q.shape[0], 1)
    scores = torch.cat([scores.masked_fill(~allowed, -float("inf")), column], -1)
    normal = sees | (extra > -float("inf"))[:, None]  # rows with anything to normalise over
    scores = torch.where(normal[..., None], scores, 0)
    # softmax rather than exp(scores - lse): the lse of huge logits is rounded coarsely
    prob = torch.where(sees[:, None], scores.softmax(-1)[..., :-1], 0)
    out = torch.einsum("hqk,khd->qhd", prob, v_live)
    out = torch.where(sees[:, None, None], out, 0)
    covered = torch.arange(q.shape[0], device=q.device) < max(mask.Tq for mask in masks)
    return out.to(q.dtype), torch.where(normal & covered, scores.logsumexp(-1), -float("inf"))
