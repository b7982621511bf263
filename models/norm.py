"""Normalisation over the last dim, taken in fp32 (fp64 for fp64) whatever the input's dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig, Norm


class RMSNorm(nn.Module):
    """x / sqrt(mean(x**2) + eps) * weight; returns x's dtype (Zhang and Sennrich 2019, equation 4)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias; returns x's dtype (Ba, Kiros and Hinton 2016)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(width, dtype=torch.float32))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = self.weight.to(wide), self.bias.to(wide)
        return F.layer_norm(x.to(wide), self.weight.shape, weight, bias, self.eps).to(x.dtype)


def make_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """The norm of the residual stream, `hidden` wide."""
    kind = RMSNorm if config.norm is Norm.rms else LayerNorm
    return kind(config.hidden, config.norm_eps)
