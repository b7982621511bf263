"""Masks said a second time, pair by pair, for every test that asks who sees whom; and dense attention under them."""

import itertools
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from kernels.mask_spec import MaskSpec
from parallel.plan.layout import PackedLayout


@lru_cache(4096)
def seen_inside(mask: MaskSpec, length: int) -> NDArray[np.bool_]:
    """[length, length]: which query (row) of a document of `length` tokens sees which of its keys."""
    p, k = np.ogrid[:length, :length]
    ahead, reach = k - p, length if mask.window is None else mask.window - 1
    near = (-ahead <= reach) & (ahead <= (0 if mask.causal else reach))
    if mask.chunk is not None:
        near &= p // mask.chunk == k // mask.chunk
    if mask.first is not None:
        # beside the window: only keys before all that the window or the chunk holds
        begin = p - reach if mask.chunk is None else p // mask.chunk * mask.chunk
        near |= (k < mask.first) & (k < begin)
    prefix = min(mask.prefix or 0, length)
    return np.where(p < prefix, k < prefix, near)


def allowed(mask: MaskSpec, layout: PackedLayout) -> NDArray[np.bool_]:
    """[T, T]: which query sees which key of a packed buffer."""
    found = np.zeros((layout.total_tokens, layout.total_tokens), bool)
    for start, stop in zip(layout.starts.tolist(), layout.stops.tolist()):
        found[start:stop, start:stop] = seen_inside(mask, stop - start)
    return found


def every_mask(sizes: dict[str, list[int]] | None = None, causal: tuple[bool, ...] = (True, False)) -> list[MaskSpec]:
    """All combinations of a few sizes that MaskSpec does not refuse."""
    sizes = {"window": [1, 5], "chunk": [1, 4], "prefix": [1, 6], "first": [1, 3], **(sizes or {})}
    found = []
    for values in itertools.product(causal, *([None, *sizes[name]] for name in ("window", "chunk", "prefix", "first"))):
        try:
            found.append(MaskSpec(*values))
        except ValueError:
            continue
    return found


@st.composite
def masks(draw: Any, causal: bool | None = None) -> MaskSpec:
    """Any mask: half of them plain, the others with any options that go together."""
    if draw(st.booleans()):
        return MaskSpec(causal if causal is not None else draw(st.sampled_from([True, True, False])))
    kinds = every_mask(causal=(True, False) if causal is None else (causal,))
    kind = draw(st.sampled_from(kinds))
    sizes = {name: draw(st.integers(1, 12)) for name, _ in kind.options()}
    if "chunk" in sizes and "first" in sizes:
        sizes["first"] = min(sizes["first"], sizes["chunk"])
    return MaskSpec(kind.causal, **sizes)


def dense_attention(
    inputs: list[torch.Tensor],
    seen: NDArray[np.bool_],
    sink: torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> dict[str, torch.Tensor]:
    """out, lse and gradients from all logits in float64; `inputs` are q, k, v and dout."""
    q, k, v = (x.detach().double().requires_grad_() for x in inputs[:3])
    sink = None if sink is None else sink.detach().clone().double().requires_grad_()
    group = q.shape[1] // k.shape[1]
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1))
    logits = logits * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~torch.from_numpy(seen), -float("inf"))
    if sink is not None:
        logits = torch.cat([logits, sink[:, None, None].expand(-1, len(seen), 1)], -1)
    blind = torch.isinf(logits).all(-1, keepdim=True)
    weights = torch.softmax(logits.masked_fill(blind, 0), -1).masked_fill(blind, 0)
    lse = torch.logsumexp(logits.detach(), -1)
    out = torch.einsum("hqk,khd->qhd", weights[..., : k.shape[0]], v.repeat_interleave(group, 1))
    (out * inputs[3].double()).sum().backward()
    found = {"out": out.detach(), "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    if sink is not None:
        found["dsink"] = sink.grad
    return {name: x for name, x in found.items() if x is not None}
