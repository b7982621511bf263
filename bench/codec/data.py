"""What the codec is tried on: drawn tensors [tokens, channels] of several kinds, and those of a small trained model."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor

from bench.cpu.step import PRESET, masked
from models.config import ModelConfig
from models.decoder import Decoder

TOKENS, CHANNELS = 512, 512


def drawn(name: str, seed: int) -> Tensor:
    """One of DRAWN."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, CHANNELS, generator=g)
    if name == "student":  # two degrees of freedom: normal / sqrt(chi2 / 2)
        chi = torch.randn(2, TOKENS, CHANNELS, generator=g).square().sum(0)
        return x / (chi / 2).sqrt()
    if name == "near zero":
        rare = torch.rand(TOKENS, CHANNELS, generator=g) < 1e-3
        return torch.where(rare, x, x * 1e-3)
    kind, _, times = name.partition(" x")
    if kind == "channel":
        x[:, 7] *= float(times)
    if kind == "token":
        x[7::64] *= float(times)
    return x


DRAWN = ("gauss", "student", "channel x50", "channel x1000", "token x50", "near zero")


def trained(steps: int, seed: int) -> dict[str, list[Tensor]]:
    """What tensor parallelism would send of the tiny preset after some steps on a Python file: outputs of attention and
    MLP, and the gradients that come back there, [tokens, hidden], from two batches."""
    merged = OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(PRESET))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, ModelConfig)
    model = Decoder(config, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    g = torch.Generator().manual_seed(seed)
    layer = model.layers[-1]
    kept: dict[str, list[Tensor]] = {}

    def keep(kind: str):
        def hook(module: torch.nn.Module, inputs: object, out: Tensor) -> None:
            kept.setdefault(f"{kind} out", []).append(out.detach())
            out.register_hook(lambda grad: kept.setdefault(f"{kind} grad", []).append(grad.detach()))

        return hook

    for step in range(steps + 2):
        if step == steps:
            layer.self_attn.o_proj.register_forward_hook(keep("attention"))  # pyright: ignore
            layer.mlp.down_proj.register_forward_hook(keep("mlp"))  # pyright: ignore
        at = int(torch.randint(0, len(text) - TOKENS - 1, (1,), generator=g))
        tokens, labels = text[at : at + TOKENS], text[at + 1 : at + TOKENS + 1]
        attend = masked([TOKENS], config)
        loss = model.loss(tokens, torch.arange(TOKENS), labels, attend, valid_tokens=TOKENS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return kept
