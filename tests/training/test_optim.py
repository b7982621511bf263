"""The schedule's shape, what decays, and the norm."""

import itertools
import math

import pytest
import torch
from torch import nn

from training.config import ConfigError, LrSchedule, OptimConfig
from training.optim import build_optimizer, gradient_norm, learning_rate


def test_cosine_warms_up_peaks_and_ends_at_the_floor():
    config = OptimConfig(lr=1.0, warmup_steps=10, min_lr_ratio=0.1)
    rates = [learning_rate(config, s, 110) for s in range(1, 111)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[59] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))


def test_wsd_stays_then_decays_linearly():
    config = OptimConfig(lr=2.0, warmup_steps=0, schedule=LrSchedule.wsd, decay_steps=4, min_lr_ratio=0.0)
    assert [learning_rate(config, s, 10) for s in range(5, 11)] == [2.0, 2.0, 1.5, 1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lr": 0.0}, "optim.lr"),
        ({"lr": float("nan")}, "optim.lr"),
        ({"betas": [0.9]}, "optim.betas"),
        ({"clip_norm": -1.0}, "optim.clip_norm"),
        ({"decay_steps": 5}, "optim.decay_steps"),
        ({"schedule": LrSchedule.wsd, "warmup_steps": 60, "decay_steps": 60}, "run.steps=100"),
        ({"min_lr_ratio": 2.0}, "optim.min_lr_ratio"),
    ],
)
def test_useless_values_are_refused_by_name(changes, named):
    with pytest.raises(ConfigError, match=named):
        OptimConfig(**changes).validate(100)


def test_weight_decay_is_for_matrices_of_linear_layers():
    model = nn.ModuleDict({"emb": nn.Embedding(5, 3), "lin": nn.Linear(3, 2), "norm": nn.LayerNorm(3)})
    decay = {id(p): g["weight_decay"] for g in build_optimizer(model, OptimConfig()).param_groups for p in g["params"]}
    assert {n: decay[id(p)] for n, p in model.named_parameters()} == {
        "emb.weight": 0.0, "lin.weight": 0.1, "lin.bias": 0.0, "norm.weight": 0.0, "norm.bias": 0.0,
    }  # fmt: skip


def test_norm_counts_each_element_once_and_clips_in_place():
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 1, bias=False)])
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    count = sum(p.numel() for p in model.parameters())
    norm = gradient_norm(model, clip=1.0)
    assert float(norm) == pytest.approx(2 * count**0.5)
    assert float(gradient_norm(model, clip=None)) == pytest.approx(1.0, rel=1e-5)
