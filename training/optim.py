"""AdamW with warmup and cosine or warmup-stable-decay, and the gradient norm."""

import math

import torch
from torch import nn

from parallel.weights.data_parallel import whole
from training.config import LrSchedule, OptimConfig


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of optimiser step `step` (from 1) of `steps`.

    Linear warmup to `lr` over `warmup_steps`; then half a cosine down to `min_lr_ratio * lr` at the last step, or (wsd)
    constant until the last `decay_steps`, which fall linearly to the same floor.
    """
    floor = config.min_lr_ratio
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule is LrSchedule.cosine:
        done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
        return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
    left = steps - step
    if left >= config.decay_steps:
        return config.lr
    return config.lr * (floor + (1 - floor) * left / config.decay_steps)


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over `model`: weight decay on the matrices of linear layers only."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.ndim >= 2 and id(p) not in embeddings]
    rest = [p for p in parameters if p.ndim < 2 or id(p) in embeddings]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=True,
    )


def gradient_norm(model: nn.Module, clip: float | None) -> torch.Tensor:
    """Global L2 norm of the gradients before clipping, which happens in place when `clip` is given.

    Each element counts once, replicated or sharded; with sharded gradients this is a collective.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if clip is not None:
        nn.utils.clip_grads_with_norm_(parameters, clip, norm)
    return whole(norm)
