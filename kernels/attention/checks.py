"""Refusals of attention inputs that do not fit together, each in one sentence with the numbers and a way out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.arguments import is_number, spelled
from kernels.mask import IntervalMask

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Sequence[IntervalMask],
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> None:
    """Raise ValueError unless q [Tq, H, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], the masks and the options fit together."""
    check_tensors(q, k, v)
    if not masks:
        raise ValueError("an empty list of masks allows nothing; give one IntervalMask, or at least one band")
    for mask in masks:
        if not isinstance(mask, IntervalMask):
            raise ValueError(f"a mask must be an IntervalMask or a list of them, not {type(mask).__name__}")
        if mask.Tq > q.shape[0] or mask.Tk > k.shape[0]:
            raise ValueError(
                f"the mask covers {mask.Tq} queries and {mask.Tk} keys, but q has {q.shape[0]} tokens and k "
                f"{k.shape[0]}; a mask may be shorter than its buffers, not longer"
            )
        if mask.device != q.device:
            raise ValueError(f"the mask is on {mask.device} and q on {q.device}; use mask.to({str(q.device)!r}) once")
    if softmax_scale is not None and not (is_number(softmax_scale) and math.isfinite(softmax_scale)):
        raise ValueError(f"softmax_scale must be a finite number, not {spelled(softmax_scale)}; None is 1 / sqrt(D)")
    if softcap is not None and not (is_number(softcap) and math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap must be a positive number, not {spelled(softcap)}; use None for no cap")
    if sink is not None:
        check_sink("sink", sink, q)


def check_sink(name: str, sink: Any, q: Tensor) -> None:
    """Raise ValueError unless `sink` is a logit for each head of q."""
    if (
        not isinstance(sink, Tensor)
        or tuple(sink.shape) != (q.shape[1],)
        or not sink.is_floating_point()
        or sink.device != q.device
    ):
        raise ValueError(
            f"{name} must hold one floating logit for each of {q.shape[1]} heads on {q.device}, not {spelled(sink)}"
        )
    if sink.device.type == "cpu" and not bool((sink.detach() < float("inf")).all()):
        raise ValueError(
            f"{name} holds a NaN or +inf, which would take all probability; use finite logits, or -inf for none"
        )


def bands_of(mask: Any) -> tuple[IntervalMask, ...]:
    """A mask or a list of masks as a tuple; what stands in the list is not looked at."""
    if isinstance(mask, IntervalMask):
        return (mask,)
    if not isinstance(mask, Sequence):
        raise ValueError(f"mask must be an IntervalMask or a list of them, not {type(mask).__name__}")
    return tuple(mask)


def check_tensors(q: Any, k: Any, v: Any) -> None:
    """Raise ValueError unless q [Tq, H, D], k [Tk, Hkv, D] and v [Tk, Hkv, Dv] fit together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor [tokens, heads, width], not {spelled(x)}")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise ValueError(f"q, k, v must be packed as [tokens, heads, width], not {shapes}; flatten batch and length")
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"q, k, v must share one of float64, float32, bfloat16, float16, but are {q.dtype}, {k.dtype}, {v.dtype}; "
            "cast them"
        )
    if k.device != q.device or v.device != q.device:
        raise ValueError(f"q, k, v must share a device, but are on {q.device}, {k.device}, {v.device}")
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k and v must have the same tokens and heads, but have {shapes}")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q and k must have the same head width, but have {q.shape[2]} and {k.shape[2]}")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{k.shape[1]} key heads do not divide {q.shape[1]} query heads; "
            "the number of query heads must be a multiple of the number of key heads"
        )
    if not (1 <= q.shape[2] <= MAX_HEAD_DIM and 1 <= v.shape[2] <= MAX_HEAD_DIM):
        raise ValueError(
            f"head widths must lie in 1..{MAX_HEAD_DIM}, but q and k have {q.shape[2]} and v has {v.shape[2]}; "
            "use more, narrower heads"
        )


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses `create_graph=True` in an autograd.Function's backward: its gradient would silently lack terms."""

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise ValueError(
                "this backward is differentiable once: create_graph=True (double backward, jvp, hvp) is not supported; "
                'use backend="reference" on small inputs'
            )
        return backward(ctx, *grads)

    return checked
