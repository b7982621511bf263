import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from kernels.api import IntervalMask
from models.decoder import Decoder
from models.flops import causal_pairs, flops_per_step, flops_per_token, parameter_count


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


@pytest.mark.parametrize(
    "name, published, digits",
    [("llama3_8b", 8.030, 3), ("llama32_1b", 1.236, 3), ("qwen3_0_6b", 0.596, 3), ("gpt2", 0.1244, 4)],
)
def test_published_totals(load_preset, name, published, digits):
    assert round(parameter_count(load_preset(name)).total / 1e9, digits) == published


def test_published_non_embedding_total(load_preset):
    assert round(parameter_count(load_preset("qwen3_0_6b")).non_embedding / 1e9, 2) == 0.44  # its model card


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), max_size=5), st.none() | st.integers(1, 14))
def test_pairs(lengths, window):
    brute = sum(j <= i and (window is None or i - j < window) for n in lengths for i in range(n) for j in range(n))
    assert causal_pairs(lengths, window) == brute
    cumulative = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert IntervalMask.from_cu_seqlens(cumulative, window=window).pairs() == brute


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
    pairs = {window: T * T for window in small.layer_windows()}
    assert counter.get_total_flops() == flops_per_step(small, T, pairs)
    assert flops_per_token(small, T, pairs) * T == pytest.approx(counter.get_total_flops())


def test_flops_by_hand(load_preset):
    """GPT-2, 2 documents of 1024: 6 x 2048 x (12 x 12 x 768^2 + 50257 x 768) + 12 x 12 x 768 x 1,049,600."""
    pairs = causal_pairs([1024, 1024])
    assert pairs == 1_049_600
    assert flops_per_step(load_preset("gpt2"), 2048, {None: pairs}) == 1_634_038_972_416


def test_missing_pairs_and_no_tokens_are_refused(tiny):
    with pytest.raises(ValueError, match=r"windows \[None\].*window 3"):
        flops_per_step(tiny(window=[None, 3]), 10, {None: 5})
    with pytest.raises(ValueError, match="tokens=0"):
        flops_per_token(tiny(), 0, {None: 0})
