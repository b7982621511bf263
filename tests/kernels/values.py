"""Tensors of known kinds for the codec's tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def rough(*shape: int) -> Tensor:
    """Values of many sizes, with groups of zeros, subnormals, huge values, a NaN and infinities."""
    x = (normal(*shape) * torch.exp2(normal(*shape, seed=1) * 12)).flatten()
    for i, value in enumerate((0.0, 1e-41, 3e38, math.nan, math.inf, -math.inf)):
        x[i * 300 : i * 300 + (1 if i > 2 else 280)] = value
    return x.view(shape)
