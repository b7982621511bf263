import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from models.config import LARGEST, ModelConfig, Positions


def test_presets_validate_and_give_every_size(preset):
    preset.validate()
    assert all(
        getattr(preset, field.name) is not None
        for field in dataclasses.fields(ModelConfig)
        if field.default is dataclasses.MISSING
    )


def test_presets_survive_yaml(preset):
    again = OmegaConf.create(OmegaConf.to_yaml(OmegaConf.structured(preset)))
    assert OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), again)) == preset


def test_a_missing_size_and_a_wrong_name_are_refused():
    with pytest.raises(OmegaConfBaseException, match="hidden"):
        OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), {"vocab_size": 3, "layers": 1}))
    with pytest.raises(OmegaConfBaseException, match="hiden"):
        OmegaConf.merge(OmegaConf.structured(ModelConfig), {"hiden": 3})
    with pytest.raises(OmegaConfBaseException, match="sinusoidal"):
        OmegaConf.merge(OmegaConf.structured(ModelConfig), {"positions": "sinusoidal"})


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(kv_heads=3), ["heads=4", "kv_heads=3"]),
        (dict(head_dim=5), ["head_dim=5", "odd", "6"]),
        (dict(layers=0), ["layers=0", "1 to 10000"]),
        (dict(ffn=-2), ["ffn=-2"]),
        (dict(norm_eps=0.0), ["norm_eps=0.0"]),
        (dict(norm_eps=float("nan")), ["norm_eps=nan"]),
        (dict(softcap=-1.0), ["softcap=-1.0"]),
        (dict(softmax_scale=0.0), ["softmax_scale=0.0"]),
        (dict(init_std=float("inf")), ["init_std=inf"]),
        (dict(window=[4, None, 4]), ["3 layers", "layers=4"]),
        (dict(window=[]), ["0 layers", "layers=4"]),
        (dict(window=[0, None]), ["at least 1", "0"]),
        (dict(rope_theta=None), ["rope_theta=None"]),
        (dict(rope_theta=float("nan")), ["rope_theta=nan"]),
        (dict(rope_factor=2.0), ["rope_factor=2.0", "rope_original_positions=None"]),
        (dict(rope_factor=0.5, rope_original_positions=8), ["rope_factor=0.5"]),
        (dict(positions=Positions.learned), ["rope_theta=10000.0", "learned"]),
        (
            dict(positions=Positions.learned, rope_theta=None, rope_factor=2.0, rope_original_positions=4),
            ["rope_factor=2.0", "learned"],
        ),
    ],
)
def test_refusals_hold_the_numbers(tiny, change, words):
    config = dataclasses.replace(tiny(), **change)
    with pytest.raises(ValueError) as refused:
        config.validate()
    assert all(word in str(refused.value) for word in words)


@settings(deadline=None)
@given(st.lists(st.none() | st.integers(1, 99), min_size=1, max_size=6), st.integers(1, 4))
def test_a_window_list_repeats_over_the_layers(windows, times):
    config = ModelConfig(7, len(windows) * times, 8, 2, 1, 4, 8, 16, 1e-5, True, rope_theta=10.0, window=windows)
    config.validate()
    assert config.layer_windows() == [windows[i % len(windows)] for i in range(config.layers)]


def test_scale_defaults_to_the_root_of_the_head_dim(tiny):
    assert tiny(head_dim=16).scale() == 0.25
    assert tiny(softmax_scale=3.0).scale() == 3.0


def test_a_document_longer_than_the_positions_is_refused(small):
    small.check_lengths(64)
    with pytest.raises(ValueError, match=r"65 tokens.*max_positions=64.*max_positions=65"):
        small.check_lengths(65)


PUBLISHED = {  # rotary base, epsilon of the norms, tied embeddings
    "gpt2": (None, 1e-5, True),
    "llama3_8b": (500000.0, 1e-5, False),
    "llama32_1b": (500000.0, 1e-5, True),
    "qwen3_0_6b": (1000000.0, 1e-6, True),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_keeps_the_published_constants(name, load_preset):
    """A wrong rotary base or epsilon trains well and goes unnoticed."""
    config = load_preset(name)
    assert (config.rope_theta, config.norm_eps, config.tied_embeddings) == PUBLISHED[name]


@pytest.mark.parametrize("name", LARGEST)
def test_a_size_beyond_any_model_is_refused_at_once(preset, name: str):
    from kernels.attention.checks import MAX_HEAD_DIM

    assert LARGEST["head_dim"] == MAX_HEAD_DIM
    values = {"head_dim": 8, "heads": 4, "kv_heads": 4} | {name: LARGEST[name] + 1}
    with pytest.raises(ValueError, match=rf"model\.{name}={LARGEST[name] + 1} must lie in 1 to {LARGEST[name]}"):
        dataclasses.replace(preset, **values).validate()
