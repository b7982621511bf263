"""Rotary positions (RoFormer, Su et al. 2021, section 3.2.2), with the halves layout of the Llama checkpoints."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Llama 3.1's stretching keeps wavelengths below original/4 and stretches those above original/1 by the whole factor.
LOW_TURNS, HIGH_TURNS = 1.0, 4.0


def frequencies(
    head_dim: int, theta: float, factor: float | None = None, original_positions: int | None = None
) -> Float[Tensor, " half"]:
    """Radians a token for each pair of channels, fp64 on the CPU: theta ** (-2 i / head_dim).

    With `factor` and `original_positions`, the rule of Llama 3.1: channels that turn at most once within the original
    context are slowed by `factor`, those that turn at least four times are kept, those between are interpolated.
    """
    base = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    if factor is None or original_positions is None:
        return base
    turns = original_positions * base / (2 * math.pi)
    kept = ((turns - LOW_TURNS) / (HIGH_TURNS - LOW_TURNS)).clamp(0, 1)
    return base * (kept + (1 - kept) / factor)


def angles(
    positions: Int[Tensor, " T"], radians: Float[Tensor, " half"], dtype: torch.dtype
) -> tuple[Float[Tensor, "T half"], Float[Tensor, "T half"]]:
    """Cosine and sine of position * frequency, in `dtype` (fp32 or fp64).

    The product is taken in fp64: at position 1,000,000 an fp32 angle is off by 0.03 radians.
    """
    turned = positions.to(torch.float64).unsqueeze(1) * radians.to(positions.device, non_blocking=True)
    return turned.cos().to(dtype), turned.sin().to(dtype)


def rotate(
    x: Float[Tensor, "T H D"], cos: Float[Tensor, "T half"], sin: Float[Tensor, "T half"]
) -> Float[Tensor, "T H D"]:
    """Turns channel pairs (i, i + D/2) of each head, in the angles' precision; returns x's dtype."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
