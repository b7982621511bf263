"""Initial weights that depend on (seed, parameter name) alone: the same on every device, rank and order of creation."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from models.config import ModelConfig

# (a parameter's value in full, the parameter) -> the part of it that lies there: all of it, or one rank's shard.
Distribute = Callable[[Tensor, Tensor], Tensor]


def in_full(value: Tensor, parameter: Tensor) -> Tensor:
    """The `Distribute` of parameters that are whole."""
    return value


# The two projections of a layer that write to the residual stream (GPT-2, section 2.3, scales them by depth).
RESIDUAL = ("o_proj.weight", "down_proj.weight")


def initial_values(config: ModelConfig, name: str, shape: Sequence[int], seed: int) -> Tensor:
    """The initial value of the parameter `name` in full, fp32 on the CPU; a sharded module slices it.

    Norm weights are one; biases and sinks zero; every other weight is normal with `init_std`, divided by
    sqrt(2 * layers) where it writes to the residual stream.
    """
    if "norm" in name.split(".")[-2] and name.endswith("weight"):
        return torch.ones(*shape, dtype=torch.float32, device="cpu")
    if name.endswith(("bias", "sinks")):
        return torch.zeros(*shape, dtype=torch.float32, device="cpu")
    std = config.init_std
    if name.endswith(RESIDUAL):
        std /= (2 * config.layers) ** 0.5
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu") * std


@torch.no_grad()
def initialise(module: nn.Module, config: ModelConfig, seed: int, place: Distribute = in_full) -> None:
    """Fills every parameter of a decoder in place, whatever its device and dtype; one is held in full at a time."""
    for name, parameter in module.named_parameters():
        parameter.copy_(place(initial_values(config, name, parameter.shape, seed), parameter))
