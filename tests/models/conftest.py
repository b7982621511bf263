"""Each family scaled down to odd sizes, with weights that no symmetry of the initial ones can hide a mistake behind."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from models.config import ModelConfig
from models.decoder import Decoder

# `hf` is none: a checkpoint gives its sizes
PRESETS = sorted(p.stem for p in (Path(__file__).parents[2] / "conf" / "model").glob("*.yaml") if p.stem != "hf")
SMALL = dict(vocab_size=37, layers=4, hidden=24, heads=4, kv_heads=2, head_dim=10, ffn=22, max_positions=64)
FAMILIES = {
    **{preset: (preset, {}) for preset in ("gpt2", "llama3_8b", "llama31_8b", "qwen25_0_5b", "qwen3_0_6b", "tiny")},
    "gemma_like": ("tiny", dict(window=[3, None], softcap=2.5, softmax_scale=0.7, activation="gelu_tanh")),
    "gpt_oss_like": ("llama32_1b", dict(window=[5, None], sink=True, bias=True, rope_original_positions=16)),
    "one_key_head": ("qwen3_0_6b", dict(kv_heads=1, window=[2, 7, None, 1], sink=True, tied_embeddings=False)),
    "gpt2_windows": ("gpt2", dict(kv_heads=4, head_dim=7, window=[4], sink=True, softcap=1.5, tied_embeddings=False)),
}


def load(preset: str, **overrides) -> ModelConfig:
    path = Path(__file__).parents[2] / "conf" / "model" / f"{preset}.yaml"
    merged = OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(path), overrides)
    return OmegaConf.to_object(merged)  # pyright: ignore[reportReturnType]


@pytest.fixture(params=PRESETS)
def preset(request) -> ModelConfig:
    """Each preset of conf/model at its full size; build it on the meta device only."""
    return load(request.param)


@pytest.fixture(params=FAMILIES)
def small(request) -> ModelConfig:
    """Each family at a size for tests."""
    name, overrides = FAMILIES[request.param]
    return load(name, **{**SMALL, **overrides})


@pytest.fixture
def preset_names() -> list[str]:
    return PRESETS


@pytest.fixture
def load_preset():
    """A function: a preset's name -> its config at full size."""
    return load


@pytest.fixture
def tiny():
    """A function: the tiny preset at a size for tests, with overrides."""
    return lambda **overrides: load("tiny", **{**SMALL, **overrides})


@pytest.fixture
def rough():
    """A function: a decoder whose every parameter, biases and norms included, is far from its initial value."""

    def build(config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 1) -> Decoder:
        decoder = Decoder(config, seed=seed, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
        return decoder

    return build


@pytest.fixture
def packed():
    """A function: lengths -> starts, stops, tokens[T], positions[T], labels[T]; the last label of each is ignored."""

    def build(lengths: list[int], vocab_size: int = 37, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        stops = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        starts = [stop - length for stop, length in zip(stops, lengths)]
        tokens = torch.randint(0, vocab_size, (sum(lengths),), generator=generator)
        positions = torch.cat([torch.arange(length) for length in [0, *lengths]])
        labels = tokens.roll(-1)
        labels[[stop - 1 for stop, length in zip(stops, lengths) if length]] = -100
        return starts, stops, tokens, positions, labels

    return build
