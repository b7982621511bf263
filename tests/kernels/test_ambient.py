"""What kernels make is the same under any default dtype and device: masks, also of lists, attention, merge, codec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.api import IntervalMask, attention, flash_attn_varlen_func, merge
from kernels.attention.backends import able_backends
from kernels.codec import api as codec
from kernels.mask import document_masks, position_masks
from kernels.mask_spec import MaskSpec
from parallel.plan.codec import CodecSpec
from tests.ambient import AMBIENTS, ambient
from tests.kernels.values import normal

SPECS = (MaskSpec(), MaskSpec(causal=False), MaskSpec(window=4), MaskSpec(chunk=3), MaskSpec(prefix=2),
         MaskSpec(window=3, first=2))  # fmt: skip

MASKS: dict[str, Callable[[], Any]] = {
    "cu_seqlens": lambda: IntervalMask.from_cu_seqlens([0, 3, 3, 9]),
    "cu_seqlens, window": lambda: IntervalMask.from_cu_seqlens([0, 3, 9], causal=False, window=2),
    "cu_seqlens, rectangular": lambda: IntervalMask.from_cu_seqlens([0, 2, 5], [0, 3, 9]),
    "documents": lambda: IntervalMask.from_documents([0, 4], [3, 9], 12),
    "positions": lambda: IntervalMask.from_positions([0, 2, 5, 8], [0, 1, 2, 3, 4, 8], [0, 4], [4, 9]),
    **{f"documents, {spec}": lambda spec=spec: document_masks(spec, [0, 4], [3, 9], 12) for spec in SPECS},
    **{
        f"positions, {spec}": lambda spec=spec: position_masks(spec, [0, 2, 5, 8], [0, 1, 2, 4, 8], [0, 4], [4, 9])
        for spec in SPECS
    },
}


def sides_of(made: Any) -> list[Tensor]:
    masks = made if isinstance(made, (tuple, list)) else [made]
    return [side for mask in masks for side in (mask.k_start, mask.k_end, mask.q_start, mask.q_end)]


@pytest.mark.parametrize("name", AMBIENTS)
@pytest.mark.parametrize("case", MASKS)
def test_masks_of_lists(case: str, name: str) -> None:
    usual = sides_of(MASKS[case]())
    with ambient(name):
        found = sides_of(MASKS[case]())
    for a, b in zip(usual, found, strict=True):
        assert a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


def attended(backend: str, softcap: float | None, sink: bool) -> list[Tensor]:
    q, k, v, dout = (normal(23, heads, 16, seed=n) for n, heads in enumerate((4, 2, 2, 4)))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    extra = normal(4, seed=9).requires_grad_() if sink else None
    results = []
    for spec in SPECS:
        mask = document_masks(spec, [0, 7], [7, 20], 23)
        out, lse = attention(q, k, v, mask, softcap=softcap, sink=extra, backend=backend)
        grads = torch.autograd.grad(out, leaves + ([extra] if extra is not None else []), dout)
        results += [out.detach(), lse.detach(), *grads]
    return results


@pytest.mark.parametrize("name", AMBIENTS)
@pytest.mark.parametrize(("softcap", "sink"), [(None, False), (5.0, True)])
@pytest.mark.parametrize("backend", [b for b in able_backends(torch.zeros(1)) if b != "triton"])
def test_attention(backend: str, softcap: float | None, sink: bool, name: str) -> None:
    usual = attended(backend, softcap, sink)
    with ambient(name):
        found = attended(backend, softcap, sink)
    for a, b in zip(usual, found, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("name", AMBIENTS)
def test_the_rest_of_the_face(name: str) -> None:
    x, spec = normal(8, 4, 64), CodecSpec()
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)

    def everything() -> list[Tensor]:
        outs, lses = [normal(5, 2, 8, seed=n) for n in range(3)], [normal(2, 5, seed=9 + n) for n in range(3)]
        wire = codec.encode(x, spec)
        flash = flash_attn_varlen_func(x, x, x, cu, cu, 5, 5, causal=True)
        return [*merge(outs, lses), wire, codec.decode(wire, spec, x.shape, x.dtype), flash]

    usual = everything()
    with ambient(name):
        found = everything()
    for a, b in zip(usual, found, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
