import dataclasses

import torch

from models.decoder import Decoder
from models.initialise import initial_values


def test_weights_depend_on_seed_and_name_alone(small):
    torch.manual_seed(5)
    first = Decoder(small, seed=7)
    torch.manual_seed(6)
    deeper = Decoder(dataclasses.replace(small, layers=8), seed=7)
    other = Decoder(small, seed=8)
    weights, more, different = (dict(model.named_parameters()) for model in (first, deeper, other))
    for name, value in weights.items():
        assert torch.equal(value, initial_values(small, name, value.shape, 7))
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.testing.assert_close(more[name], value / 2**0.5)
        else:
            assert torch.equal(more[name], value)
        assert value.unique().numel() == 1 or not torch.equal(value, different[name])


def test_no_two_weights_are_drawn_alike(small):
    drawn = [p.flatten()[:20] for p in Decoder(small).parameters() if p.unique().numel() > 1]
    scaled = torch.stack([values / values.abs().max() for values in drawn])
    assert scaled.unique(dim=0).shape[0] == len(drawn) > 2 * small.layers


def test_building_leaves_the_random_state_alone(small):
    before = torch.get_rng_state()
    Decoder(small)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_meta_build_materialises_to_the_same_weights(small):
    direct = Decoder(small, seed=4)
    decoder = Decoder(small, device="meta")
    assert all(p.is_meta for p in decoder.parameters()) and not list(decoder.buffers())
    decoder.materialise(4, "cpu")
    for (name, got), (_, want) in zip(decoder.named_parameters(), direct.named_parameters()):
        assert torch.equal(got, want), name


def test_scales(tiny):
    config = tiny(hidden=96, ffn=200, init_std=0.05, norm="layer", bias=True, sink=True, qk_norm=True, layers=8)
    for name, value in Decoder(config).named_parameters():
        if "norm" in name and name.endswith("weight"):
            assert (value == 1).all(), name
        elif name.endswith(("bias", "sinks")):
            assert (value == 0).all(), name
        else:
            std = 0.0125 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.05
            assert abs(value.std().item() / std - 1) < 0.08, name
            assert abs(value.mean().item()) < 0.1 * std, name
