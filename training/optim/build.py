"""An optimiser for a decoder, the learning rates of its steps, and the gradient norm."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from parallel.weights.data_parallel import whole
from training.config import LrSchedule, OptimConfig, Precision
from training.optim.muon import Muon


def learning_rate(config: OptimConfig, step: int, steps: int, peak: float) -> float:
    """Learning rate of optimiser step `step` (from 1) of `steps`.

    Linear warmup to `peak` over `warmup_steps`; then half a cosine down to `min_lr_ratio * peak` at the last step, or
    (wsd) constant until the last `decay_steps`, which fall linearly to the same floor.
    """
    floor = config.min_lr_ratio
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    if config.schedule is LrSchedule.cosine:
        done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
        return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
    left = steps - step
    if left >= config.decay_steps:
        return peak
    return peak * (floor + (1 - floor) * left / config.decay_steps)


def set_rates(optimizer: Optimizer, config: OptimConfig, step: int, steps: int) -> float:
    """Give every group its rate of step `step`, each from its own peak; returns that of `optim.lr`."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step, steps, group["initial_lr"])
    return learning_rate(config, step, steps, config.lr)


@dataclass(frozen=True)
class Roles:
    """A model's parameters: the matrices of its layers, that of the head if it has its own, and the rest, which never
    decays: embeddings, norms, biases, sinks."""

    hidden: list[nn.Parameter]
    head: list[nn.Parameter]
    rest: list[nn.Parameter]

    @classmethod
    def of(cls, model: nn.Module) -> "Roles":
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        head = getattr(model, "lm_head", None)
        parameters = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in parameters if p.ndim >= 2 and id(p) not in embeddings]
        return cls(
            [p for p in matrices if head is None or p is not head.weight],
            [p for p in matrices if head is not None and p is head.weight],
            [p for p in parameters if p.ndim < 2 or id(p) in embeddings],
        )


class Adafactor(torch.optim.Adafactor):
    """torch's Adafactor, whose count of steps is made on the CPU, in fp32, whatever the process's defaults."""

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with torch.device("cpu"):
                super().step()
        finally:
            torch.set_default_dtype(default)


class Joined(Optimizer):
    """Several optimisers of disjoint parameters as one: their groups, their state, one step."""

    def __init__(self, *parts: Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Each part's step."""
        for part in self.parts:
            part.step()


def build_optimizer(model: nn.Module, config: OptimConfig, precision: Precision = Precision.fp32) -> Optimizer:
    """The optimiser `config.name` over `model`: weight decay on the matrices of linear layers only.

    Args:
        precision: bf16: what an optimiser multiplies is rounded to it; weights and what it remembers stay as they are.
    """
    return BUILDERS[config.name](Roles.of(model), config, precision)


def _groups(*groups: tuple[list[nn.Parameter], float, float]) -> list[dict[str, Any]]:
    """torch's groups of (parameters, peak rate, weight decay), without empty ones."""
    return [
        {"params": parameters, "lr": peak, "initial_lr": peak, "weight_decay": decay}
        for parameters, peak, decay in groups
        if parameters
    ]


def _adamw(roles: Roles, config: OptimConfig, _: Precision) -> Optimizer:
    matrices = (roles.hidden + roles.head, config.lr, config.weight_decay)
    return _adamw_of(config, matrices, (roles.rest, config.lr, 0.0))


def _adamw_of(config: OptimConfig, *groups: tuple[list[nn.Parameter], float, float]) -> Optimizer:
    return torch.optim.AdamW(_groups(*groups), betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True)


def _muon(roles: Roles, config: OptimConfig, precision: Precision) -> Optimizer:
    lr = config.lr if config.adamw_lr is None else config.adamw_lr
    decay = config.weight_decay if config.adamw_weight_decay is None else config.adamw_weight_decay
    matrices = _groups((roles.hidden, config.lr, config.weight_decay))
    dtype = torch.bfloat16 if precision is Precision.bf16 else None
    return Joined(
        Muon(matrices, dtype, momentum=config.momentum, adjust_lr_fn=config.adjust_lr.value),
        _adamw_of(config, (roles.head, lr, decay), (roles.rest, lr, 0.0)),
    )


def _adafactor(roles: Roles, config: OptimConfig, _: Precision) -> Optimizer:
    groups = _groups((roles.hidden + roles.head, config.lr, config.weight_decay), (roles.rest, config.lr, 0.0))
    return Adafactor(groups, beta2_decay=config.beta2_decay, d=config.clip_update)


BUILDERS: dict[str, Callable[[Roles, OptimConfig, Precision], Optimizer]] = {
    "adamw": _adamw,
    "muon": _muon,
    "adafactor": _adafactor,
}


def gradient_norm(model: nn.Module, clip: float | None) -> torch.Tensor:
    """Global L2 norm of the gradients before clipping, which happens in place when `clip` is given.

    Each element counts once, replicated or sharded; with sharded gradients this is a collective.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if clip is not None:
        nn.utils.clip_grads_with_norm_(parameters, clip, norm)
    return whole(norm)
