"""The schedule's shape, what each optimiser updates and how, what is refused, and the norm."""

import copy
import itertools
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from models.config import ModelConfig
from models.decoder import Decoder
from training.config import AdjustLr, ConfigError, LrSchedule, OptimConfig, Precision
from training.optim.build import BUILDERS, Joined, Roles, build_optimizer, gradient_norm, learning_rate, set_rates
from training.optim.kinds import OPTIMIZERS
from training.optim.muon import Muon, orthogonalised

PRESETS = sorted(Path("conf/optim").glob("*.yaml"))
READ = [(name, key) for name, kind in OPTIMIZERS.items() for key in kind.keys]
OTHER: dict[str, Any] = {
    "betas": [0.5, 0.6], "eps": 1e-3, "momentum": 0.5, "adjust_lr": AdjustLr.original, "adamw_lr": 1e-2,
    "adamw_weight_decay": 3.0, "beta2_decay": -0.1, "clip_update": 50.0,
}  # fmt: skip


def decoder() -> Decoder:
    config = ModelConfig(
        vocab_size=32, layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, ffn=24, max_positions=32, norm_eps=1e-5,
        tied_embeddings=False, rope_theta=1e4, sink=True, bias=True,
    )  # fmt: skip
    return Decoder(config, seed=0)


def stepped(config: OptimConfig, steps: int = 3, precision: Precision = Precision.fp32) -> Decoder:
    """A decoder after updates by gradients that are drawn."""
    model, draw = decoder(), torch.Generator().manual_seed(1)
    optimizer = build_optimizer(model, config, precision)
    for step in range(1, steps + 1):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=draw)
        set_rates(optimizer, config, step, steps)
        optimizer.step()
    return model


def test_cosine_warms_up_peaks_and_ends_at_the_floor():
    config = OptimConfig(lr=1.0, warmup_steps=10, min_lr_ratio=0.1)
    rates = [learning_rate(config, s, 110, config.lr) for s in range(1, 111)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[59] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))


def test_wsd_stays_then_decays_linearly():
    config = OptimConfig(lr=2.0, warmup_steps=0, schedule=LrSchedule.wsd, decay_steps=4, min_lr_ratio=0.0)
    assert [learning_rate(config, s, 10, config.lr) for s in range(5, 11)] == [2.0, 2.0, 1.5, 1.0, 0.5, 0.0]


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
        ({"name": "sgd"}, "optim.name='sgd' is unknown; choose one of adamw, muon, adafactor"),
        ({"name": "muon", "momentum": 1.0}, "optim.momentum=1.0"),
        ({"name": "muon", "adamw_lr": -1.0}, "optim.adamw_lr=-1.0"),
        ({"name": "muon", "adamw_weight_decay": -1.0}, "optim.adamw_weight_decay=-1.0"),
        ({"name": "adafactor", "beta2_decay": 0.5}, "optim.beta2_decay=0.5"),
        ({"name": "adafactor", "clip_update": 0.5}, "optim.clip_update=0.5"),
        (
            {"name": "adafactor", "betas": [0.9, 0.99]},
            r"optim.betas=\[0.9, 0.99\] is set, but optim.name=adafactor reads no betas; use optim=adamw or muon, or",
        ),
        ({"adjust_lr": AdjustLr.original}, "optim.adjust_lr=original is set, but optim.name=adamw reads no adjust_lr"),
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


def test_the_table_is_whole():
    """Each optimiser has a builder and a preset, and every key is one of the configuration."""
    assert [*OPTIMIZERS] == [*BUILDERS] and {*OPTIMIZERS} <= {path.stem for path in PRESETS}
    assert {key for _, key in READ} == {*OTHER} <= {field.name for field in fields(OptimConfig)}


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_hold_what_their_optimiser_reads(path: Path):
    preset = OmegaConf.load(path)
    for base in preset.pop("defaults", []):
        if base != "_self_":
            preset = OmegaConf.merge(OmegaConf.load(path.with_name(f"{base}.yaml")), preset)
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(OptimConfig), preset))
    assert isinstance(config, OptimConfig) and path.stem.startswith(config.name)
    config.validate(200)


@pytest.mark.parametrize(("name", "key"), READ)
def test_every_key_that_is_read_changes_the_weights(name: str, key: str):
    usual, other = (stepped(OptimConfig(name=name, warmup_steps=0, **changes)) for changes in ({}, {key: OTHER[key]}))
    assert any(not torch.equal(a, b) for a, b in zip(usual.parameters(), other.parameters()))


def test_muon_takes_the_matrices_of_the_layers_alone():
    model = decoder()
    muon, adamw = build_optimizer(model, OptimConfig(name="muon", adamw_lr=1e-3, adamw_weight_decay=0.3)).parts
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [{names[id(p)] for p in group["params"]} for group in muon.param_groups + adamw.param_groups]
    assert groups[0] == {name for name in names.values() if "_proj.weight" in name} and len(groups[0]) == 7
    assert groups[1] == {"lm_head.weight"}
    assert {"embed_tokens.weight", "layers.0.self_attn.sinks", "layers.0.self_attn.q_proj.bias"} < groups[2]
    assert set.union(*groups) == {*names.values()}
    rates = [(group["lr"], group["weight_decay"]) for group in muon.param_groups + adamw.param_groups]
    assert rates == [(4e-3, 0.1), (1e-3, 0.3), (1e-3, 0.0)]


def test_a_tied_head_is_an_embedding():
    model = decoder()
    model.lm_head = None
    roles = Roles.of(model)
    assert not roles.head and any(p is model.embed_tokens.weight for p in roles.rest)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_schedule_scales_each_group_by_its_own_peak(name: str):
    config = OptimConfig(name=name, lr=1.0, warmup_steps=4, **({"adamw_lr": 0.5} if name == "muon" else {}))
    optimizer = build_optimizer(decoder(), config)
    assert set_rates(optimizer, config, 1, 100) == 0.25
    assert {group["lr"] for group in optimizer.param_groups} == ({0.25, 0.125} if name == "muon" else {0.25})
    if isinstance(optimizer, Joined):  # the parts see it
        assert [part.param_groups[0]["lr"] for part in optimizer.parts] == [0.25, 0.125]


def test_muon_in_bf16_is_torchs():
    """Bit for bit, for a wide and a tall matrix; in fp32 to what bf16 loses."""
    start = [torch.randn(9, 24), torch.randn(24, 9)]
    grads = [[torch.randn_like(p) for p in start] for _ in range(4)]

    def after(make: Any, **options: Any) -> list[nn.Parameter]:
        parameters = [nn.Parameter(p.clone()) for p in start]
        optimizer = make([{"params": parameters}], lr=0.02, adjust_lr_fn="match_rms_adamw", **options)
        for step in grads:
            for p, grad in zip(parameters, step):
                p.grad = grad.clone()
            optimizer.step()
        return parameters

    torchs = after(torch.optim.Muon)
    assert all(torch.equal(a, b) for a, b in zip(torchs, after(Muon, dtype=torch.bfloat16)))
    exact = after(Muon)
    for a, b, p in zip(torchs, exact, start):
        moved = (b - p).norm()
        assert 0 < (a - b).norm() < 0.05 * moved


@pytest.mark.parametrize("precision", Precision)
def test_muon_iterates_in_the_runs_precision(precision: Precision):
    optimizer = build_optimizer(decoder(), OptimConfig(name="muon"), precision)
    assert optimizer.parts[0].dtype == (torch.bfloat16 if precision is Precision.bf16 else None)


@pytest.mark.parametrize("shape", [(8, 30), (30, 8), (12, 12)])
def test_orthogonalised_brings_singular_values_near_one(shape: tuple[int, int]):
    values = torch.linalg.svdvals(orthogonalised(torch.randn(shape)))
    assert values.min() > 0.5 and values.max() < 1.3
    assert torch.equal(orthogonalised(torch.zeros(shape)), torch.zeros(shape))


def test_parameters_without_a_gradient_stay():
    for name in OPTIMIZERS:
        model = decoder()
        optimizer, before = build_optimizer(model, OptimConfig(name=name)), copy.deepcopy(model.state_dict())
        optimizer.step()
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_norm_counts_each_element_once_and_clips_in_place():
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 1, bias=False)])
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    count = sum(p.numel() for p in model.parameters())
    norm = gradient_norm(model, clip=1.0)
    assert float(norm) == pytest.approx(2 * count**0.5)
    assert float(gradient_norm(model, clip=None)) == pytest.approx(1.0, rel=1e-5)
