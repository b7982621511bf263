"""Masks built on a device, which torch's "meta" stands for here: any look at its values raises.

What the host knows of the documents decides whether a mask has gaps: a mask that seems to have some launches kernels
that look after each row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench.kernels.gpu_contenders import document_mask
from kernels import api
from kernels.api import IntervalMask
from models.hf.transformers_attention import visible_keys

META = torch.device("meta")
Make = Callable[[torch.device | str], IntervalMask]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def lengths(*arguments: object, **options: object) -> Make:
    return lambda device: IntervalMask.from_cu_seqlens(*arguments, device=device, **options)


def documents(*arguments: object, **options: object) -> Make:
    return lambda device: IntervalMask.from_documents(*arguments, device=device, **options)


def positions(*arguments: object, **options: object) -> Make:
    return lambda device: IntervalMask.from_positions(*arguments, device=device, **options)


def moved(device: torch.device | str) -> IntervalMask:
    return IntervalMask.from_cu_seqlens([0, 3, 8]).to(device)


def shim(device: torch.device | str) -> IntervalMask:
    """The mask that flash_attn_varlen_func makes."""
    seen: list[IntervalMask] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, mask: IntervalMask, **options: object) -> tuple[Tensor, Tensor]:
        seen.append(mask)
        return q, q[..., 0].T

    x = torch.empty(8, 1, 4, device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "attention", spy)
        cu = ints(0, 3, 8)
        inspect.unwrap(api.flash_attn_varlen_func)(x, x, x, cu, cu, 5, 5, causal=True)
    return seen[0]


WHOLE: dict[str, Make] = {
    "lists": lengths([0, 3, 8]),
    "tensors": lengths(ints(0, 3, 8)),
    "an empty document": lengths([0, 3, 3, 8]),
    "no tokens": lengths([0]),
    "a window": lengths([0, 3, 8], window=2),
    "both sides of a window": lengths([0, 3, 8], causal=False, window=(1, 0)),
    "full": lengths([0, 3, 8], causal=False),
    "totals": lengths([0, 3, 8], total_q=8, total_k=8),
    "equal keys": lengths([0, 3, 8], [0, 3, 8]),
    "more keys": lengths([0, 3, 8], [0, 5, 12]),
    "more queries, full": lengths([0, 3, 8], [0, 1, 3], causal=False),
    "more keys in a window that reaches them": lengths([0, 3, 8], [0, 5, 12], window=3),
    "more queries in a window that reaches back": lengths([0, 3], [0, 2], causal=False, window=(0, 1)),
    "documents": documents([0, 3], [3, 8], 8),
    "documents as tensors": documents(ints(0, 3), ints(3, 8), 8),
    "documents in a window": documents([0, 3], [3, 8], 8, window=2),
    "an empty document between": documents([0, 3, 3], [3, 3, 8], 8),
    "no documents in no tokens": documents([], [], 0),
    "positions": positions([0, 1, 4, 5], [0, 1, 4, 5], [0, 3], [3, 8]),
    "later queries": positions([4, 5, 6], list(range(7)), [0], [8]),
    "the varlen call": shim,
    "transformers": lambda device: visible_keys(2, 8, 8, device=device).interval_mask(None, None),
    "transformers, packed": lambda device: visible_keys(1, 8, 8, device=device).interval_mask(
        torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]], device=device), None
    ),
}  # fmt: skip
GAPS: dict[str, Make] = {
    "padding": lengths([0, 3, 8], total_q=10),
    "padding of keys": lengths([0, 3, 8], [0, 3, 8], total_q=8, total_k=9),
    "queries without keys": lengths([0, 3, 8], [0, 0, 4], causal=False),
    "keys without queries": lengths([0, 0, 8], [0, 2, 10], causal=False),
    "more queries": lengths([0, 3, 8], [0, 2, 7]),
    "more queries in a narrow window": lengths([0, 4], [0, 2], causal=False, window=(0, 1)),
    "more keys in a window": lengths([0, 3, 8], [0, 5, 12], window=2),
    "padding between documents": documents([0, 4], [3, 8], 8),
    "padding after documents": documents([0, 3], [3, 8], 9),
    "no documents": documents([], [], 4),
    "earlier keys in a window": positions([4, 5, 6], list(range(7)), [0], [8], window=3),
}


@pytest.mark.parametrize(("whole", "make"), [(True, m) for m in WHOLE.values()] + [(False, m) for m in GAPS.values()],
                         ids=[*WHOLE, *GAPS])  # fmt: skip
def test_the_table_is_right(whole: bool, make: Make) -> None:
    """On the CPU, where has_gaps looks."""
    assert make("cpu").has_gaps() is not whole


@pytest.mark.parametrize("make", WHOLE.values(), ids=list(WHOLE))
def test_documents_on_the_host_without_gaps(make: Make) -> None:
    assert make(META).has_gaps() is False


@pytest.mark.parametrize("make", GAPS.values(), ids=list(GAPS))
def test_gaps_are_not_forgotten(make: Make) -> None:
    assert make(META).has_gaps() is True


def test_a_copy_remembers() -> None:
    assert moved(META).has_gaps() is False


def test_documents_on_the_device_are_not_looked_at() -> None:
    """Nothing is known of them, so there may be gaps; without totals there is no mask, and it says what to give."""
    cu = torch.empty(3, dtype=torch.int32, device=META)
    mask = IntervalMask.from_cu_seqlens(cu, total_q=8)
    assert (mask.Tq, mask.Tk, mask.device.type, mask.has_gaps()) == (8, 8, "meta", True)
    assert IntervalMask.from_documents(cu[:-1], cu[1:], 8).has_gaps() is True
    with pytest.raises(ValueError, match=r"cu_seqlens_q is on meta.*pass total_q"):
        IntervalMask.from_cu_seqlens(cu)
    with pytest.raises(ValueError, match=r"cu_seqlens_k is on meta.*pass total_k"):
        IntervalMask.from_cu_seqlens(cu, cu, total_q=8)


def test_the_gpu_page_builds_its_masks() -> None:
    """As a training step does: from documents on the host."""
    mask = document_mask([5, 1, 30], META)
    assert (mask.Tq, mask.Tk, mask.device.type) == (36, 36, "meta")
