import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from kernels.mask_spec import MaskSpec
from models.decoder import Decoder
from models.flops import flops_per_step, flops_per_token, parameter_count


def counted(config):
    decoder = Decoder(config, device="meta")
    sizes = {name: p.numel() for name, p in decoder.named_parameters()}
    embedding = sum(size for name, size in sizes.items() if name.startswith(("embed_", "lm_head")))
    return embedding, sum(sizes.values()) - embedding


def test_presets_have_the_module_s_parameters(preset):
    count = parameter_count(preset)
    assert (count.embedding, count.non_embedding) == counted(preset)


def test_families_have_the_module_s_parameters(small):
    count = parameter_count(small)
    assert (count.embedding, count.non_embedding) == counted(small)
    assert count.total == count.embedding + count.non_embedding


# Counts of the published checkpoints, each value once; GPT-3 was never published, so its table's rounded sizes.
PUBLISHED = {
    "gpt2": 124_439_808, "gpt2_medium": 354_823_168, "gpt2_large": 774_030_080, "gpt2_xl": 1_557_611_200,
    "llama3_8b": 8_030_261_248, "llama31_8b": 8_030_261_248, "llama3_70b": 70_553_706_496,
    "llama31_70b": 70_553_706_496, "llama31_405b": 405_853_388_800,
    "llama32_1b": 1_235_814_400, "llama32_3b": 3_212_749_824,
    "qwen25_0_5b": 494_032_768, "qwen25_1_5b": 1_543_714_304, "qwen25_3b": 3_085_938_688, "qwen25_7b": 7_615_616_512,
    "qwen25_14b": 14_770_033_664, "qwen25_32b": 32_763_876_352, "qwen25_72b": 72_706_203_648,
    "qwen3_0_6b": 596_049_920, "qwen3_1_7b": 1_720_574_976, "qwen3_4b": 4_022_468_096, "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200, "qwen3_32b": 32_762_123_264,
}  # fmt: skip
ROUNDED = {
    "gpt3_125m": 125e6, "gpt3_350m": 350e6, "gpt3_760m": 760e6, "gpt3_1_3b": 1.3e9,
    "gpt3_2_7b": 2.7e9, "gpt3_6_7b": 6.7e9, "gpt3_13b": 13.0e9, "gpt3_175b": 175.0e9,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_count(load_preset, name):
    assert parameter_count(load_preset(name)).total == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_gpt3_preset_is_within_two_percent_of_its_table(load_preset, name):
    assert parameter_count(load_preset(name)).total == pytest.approx(ROUNDED[name], rel=0.02)


def test_every_preset_is_compared_with_what_was_published(preset_names):
    assert PUBLISHED.keys() | ROUNDED.keys() | {"tiny"} == set(preset_names)


def test_published_non_embedding_total(load_preset):
    assert round(parameter_count(load_preset("qwen3_0_6b")).non_embedding / 1e9, 2) == 0.44  # its model card


def test_flops_equal_what_torch_counts(small):
    """A step whose attention is dense over all T * T pairs, so that torch's own counter sees exactly those pairs."""

    def attend(q, k, v, ctx):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).transpose(0, 1) for x in (k, v))
        return (torch.softmax(q.transpose(0, 1) @ k.transpose(1, 2), 2) @ v).transpose(0, 1)

    T = 11
    decoder = Decoder(small)
    tokens = torch.arange(T)
    with FlopCounterMode(display=False) as counter:
        hidden = decoder(tokens, torch.arange(T), attend)
        F.cross_entropy(decoder.logits(hidden), tokens).backward()
    pairs = {mask: T * T for mask in small.layer_masks()}
    assert counter.get_total_flops() == flops_per_step(small, T, pairs)
    assert flops_per_token(small, T, pairs) * T == pytest.approx(counter.get_total_flops())


def test_flops_by_hand(load_preset):
    """GPT-2, 2 documents of 1024: 6 x 2048 x (12 x 12 x 768^2 + 50257 x 768) + 12 x 12 x 768 x 1,049,600."""
    pairs = 2 * MaskSpec().pairs(1024)
    assert pairs == 1_049_600
    assert flops_per_step(load_preset("gpt2"), 2048, {MaskSpec(): pairs}) == 1_634_038_972_416


def test_missing_pairs_and_no_tokens_are_refused(tiny):
    with pytest.raises(ValueError, match=r"causal, window 3.*counted for: causal;"):
        flops_per_step(tiny(window=[None, 3]), 10, {MaskSpec(): 5})
    with pytest.raises(ValueError, match="tokens=0"):
        flops_per_token(tiny(), 0, {MaskSpec(): 0})
