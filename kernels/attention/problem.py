"""One call of attention as one value, which every backend takes in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kernels.attention.checks import check_inputs
from kernels.mask import IntervalMask, require_disjoint


@dataclass(frozen=True)
class Problem:
    """Inputs that fit together, by the rules of `kernels.api.attention`. A round's problem has one mask and no sink."""

    q: Float[Tensor, "Tq H D"]
    k: Float[Tensor, "Tk Hkv D"]
    v: Float[Tensor, "Tk Hkv Dv"]
    masks: Sequence[IntervalMask]
    scale: float
    softcap: float | None = None
    sink: Float[Tensor, " H"] | None = None

    @classmethod
    def checked(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        masks: Sequence[IntervalMask],
        softmax_scale: float | None,
        softcap: float | None,
        sink: Tensor | None,
    ) -> Problem:
        """The problem of a caller's arguments.

        Raises:
            ValueError: inputs that do not fit together, or bands that overlap.
        """
        check_inputs(q, k, v, masks, softmax_scale, softcap, sink)
        require_disjoint(masks)
        cap = None if softcap is None else float(softcap)
        return cls(q, k, v, masks, scale_of(q, softmax_scale), cap, sink)

    @property
    def mask(self) -> IntervalMask:
        """The only mask."""
        (mask,) = self.masks
        return mask

    @property
    def covered(self) -> int:
        """How many queries some mask covers; the rest is padding."""
        return max(mask.Tq for mask in self.masks)

    @property
    def high(self) -> torch.dtype:
        """The precision of sums and of lse."""
        return sum_dtype(self.q.dtype)

    def bands(self) -> list[Problem]:
        """One problem a mask, without the sink, which counts once."""
        return [replace(self, masks=(mask,), sink=None) for mask in self.masks]


def scale_of(q: Tensor, softmax_scale: float | None) -> float:
    """The factor of the logits: 1 / sqrt(D) by default."""
    return q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)


def is_adjacent(x: Tensor) -> bool:
    """Whether the elements of x's last dim lie next to each other, as far as there are any."""
    return x.stride(-1) == 1 or x.shape[-1] == 1 or not x.numel()


def adjacent(x: Tensor) -> Tensor:
    """x, or a copy of it, with stride 1 in its last dim; `contiguous` leaves an empty or a narrow one as it is."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
