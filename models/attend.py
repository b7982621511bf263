"""Attention as the decoder sees it: a function that is handed in, so that a distributed one can replace the local."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kernels.api import IntervalMask, attention
from kernels.mask import document_masks
from kernels.mask_spec import MaskSpec


@dataclass(frozen=True)
class AttentionContext:
    """What one layer's attention needs beside q, k and v. `sink` is `[H]`, a logit for each head, or None."""

    layer: int
    mask: MaskSpec
    softmax_scale: float
    softcap: float | None
    sink: Tensor | None


# `attend(q[T, H, D], k[T, Hkv, D], v[T, Hkv, D], ctx) -> out[T, H, D]`, by `ctx.mask` inside each document.
Attend = Callable[[Tensor, Tensor, Tensor, AttentionContext], Tensor]


class LocalAttention:
    """Attention of one device over its whole packed row: each distinct mask is made once a batch."""

    def __init__(self, masks: Mapping[MaskSpec, Sequence[IntervalMask]], backend: str = "auto") -> None:
        self.masks = dict(masks)
        self.backend = backend

    def __call__(
        self,
        q: Float[Tensor, "T H D"],
        k: Float[Tensor, "T Hkv D"],
        v: Float[Tensor, "T Hkv D"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "T H D"]:
        """Raises ValueError if the layer's mask was not made."""
        if ctx.mask not in self.masks:
            made = "; ".join(str(mask) for mask in self.masks) or "none"
            raise ValueError(
                f"layer {ctx.layer} has the mask ({ctx.mask}), and these were made: {made}; "
                f"pass config.layer_masks() to local_attend"
            )
        out, _ = attention(
            q,
            k,
            v,
            self.masks[ctx.mask],
            softmax_scale=ctx.softmax_scale,
            softcap=ctx.softcap,
            sink=ctx.sink,
            backend=self.backend,
        )
        return out


def local_attend(
    starts: Sequence[int],
    stops: Sequence[int],
    total: int,
    masks: Sequence[MaskSpec],
    device: torch.device | str = "cpu",
    backend: str = "auto",
) -> LocalAttention:
    """Attention inside the documents `[starts[i], stops[i])` of a row of `total` tokens.

    `masks` is `config.layer_masks()`; equal ones are made once. Tokens in no document are padding.
    """
    made = {mask: document_masks(mask, starts, stops, total, device) for mask in dict.fromkeys(masks)}
    return LocalAttention(made, backend)
