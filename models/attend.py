"""Attention as the decoder sees it: a function that is handed in, so that a distributed one can replace the local."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kernels.api import IntervalMask, attention


@dataclass(frozen=True)
class AttentionContext:
    """What one layer's attention needs beside q, k and v. `sink` is `[H]`, a logit for each head, or None."""

    layer: int
    window: int | None
    softmax_scale: float
    softcap: float | None
    sink: Tensor | None


# `attend(q[T, H, D], k[T, Hkv, D], v[T, Hkv, D], ctx) -> out[T, H, D]`, causal inside each document.
Attend = Callable[[Tensor, Tensor, Tensor, AttentionContext], Tensor]


class LocalAttention:
    """Attention of one device over its whole packed row: one mask for each distinct window, made once a batch."""

    def __init__(self, masks: Mapping[int | None, IntervalMask], backend: str = "auto") -> None:
        self.masks = dict(masks)
        self.backend = backend

    def __call__(
        self,
        q: Float[Tensor, "T H D"],
        k: Float[Tensor, "T Hkv D"],
        v: Float[Tensor, "T Hkv D"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "T H D"]:
        """Raises ValueError if no mask was made for the layer's window."""
        if ctx.window not in self.masks:
            raise ValueError(
                f"layer {ctx.layer} has window {ctx.window}, but masks were made for {list(self.masks)}; "
                f"pass config.layer_windows() to local_attend"
            )
        out, _ = attention(
            q,
            k,
            v,
            self.masks[ctx.window],
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
    windows: Sequence[int | None],
    device: torch.device | str = "cpu",
    backend: str = "auto",
) -> LocalAttention:
    """Causal attention inside the documents `[starts[i], stops[i])` of a row of `total` tokens.

    `windows` is `config.layer_windows()`; equal windows share one mask. Tokens in no document are padding.
    """
    masks = {}
    for window in dict.fromkeys(windows):
        masks[window] = IntervalMask.from_documents(starts, stops, total, window=window, device=device)
    return LocalAttention(masks, backend)
