"""Attention over packed causal documents as torch offers it, and ours, in one form: q, k, v [T, H, D] -> out [T, H, D].

Building one does the work that a training step does once for all layers (masks); calling it is what is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.api import IntervalMask, attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(lengths: list[int], device: torch.device, backend: str) -> Attend:
    """`kernels.api.attention` on a document mask."""
    mask = document_mask(lengths, device)
    return lambda q, k, v: attention(q, k, v, mask, backend=backend)[0]


def document_mask(lengths: list[int], device: torch.device) -> IntervalMask:
    """The causal mask of packed documents, whose lengths the host knows, as training does."""
    return IntervalMask.from_cu_seqlens([*accumulate(lengths, initial=0)], device=device, total_q=sum(lengths))


def sdpa(lengths: list[int], device: torch.device) -> Attend:
    """torch's scaled_dot_product_attention, a causal call for each document: no cross-document work, as ours."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        for a, b in pairwise(accumulate(lengths, initial=0)):
            one, two, three = (x[a:b].transpose(0, 1)[None] for x in (q, k, v))
            out = F.scaled_dot_product_attention(one, two, three, is_causal=True, enable_gqa=True)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    return attend


def flex(lengths: list[int], device: torch.device) -> Attend:
    """torch's flex_attention, compiled, with a block mask of causal documents."""
    from torch.nn.attention.flex_attention import create_block_mask

    tokens = sum(lengths)
    counts = torch.tensor(lengths, device=device)
    document = torch.repeat_interleave(torch.arange(len(lengths), device=device), counts)

    def causal_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (document[i] == document[j])

    # compiled, or it would hold all T x T pairs
    block_mask = create_block_mask(causal_document, None, None, tokens, tokens, device=str(device), _compile=True)
    compiled = _compiled_flex()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        one, two, three = (x.transpose(0, 1)[None] for x in (q, k, v))
        return compiled(one, two, three, block_mask=block_mask, enable_gqa=True)[0].transpose(0, 1)

    return attend


@lru_cache
def _compiled_flex() -> Callable[..., Any]:
    """Compiled once for all masks of a shape. With fullgraph it fails rather than fall back to T x T scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
