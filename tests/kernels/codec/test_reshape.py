"""The statistics pass: what it chooses, and that the choice holds on tensors that it has not seen."""

import pytest
import torch
from torch import Tensor

from kernels.codec import api as fp8
from kernels.codec.reshape import channel_errors, rank_codecs
from parallel.plan.codec import CodecSpec, alternatives


def outliers(seed: int, channels: bool) -> Tensor:
    """[tokens, channels] with one channel in 64, or one token in 64, fifty times as large."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(seed))
    (x[:, 7::64] if channels else x[7::64]).mul_(50)
    return x


def error(x: Tensor, codec: CodecSpec) -> float:
    return channel_errors(fp8.decode(fp8.encode(x, codec), codec, x.shape), x).mean().item()


def test_outlying_channels_get_groups_of_their_own():
    """At least a fifth less error on a held-out tensor, at no more bytes."""
    default = CodecSpec()
    sample, held_out = outliers(0, True), outliers(1, True)
    chosen, _ = rank_codecs([sample], alternatives(default, sample.shape, keep_tokens=False))[0]
    assert chosen.view == "tokens"
    assert chosen.wire_bytes(sample.shape) <= default.wire_bytes(sample.shape)
    assert error(held_out, chosen) < 0.8 * error(held_out, default)


def test_outlying_tokens_stay_in_theirs():
    """From a view over tokens the pass goes back to groups within a token, in the tokens' own error."""
    over = CodecSpec(view="tokens")
    sample, held_out = outliers(0, False), outliers(1, False)
    ranking = rank_codecs([sample.T.contiguous()], [over, CodecSpec()])  # of x^T, so that a token counts as a channel
    assert ranking[0][0].view == "tokens"
    assert error(held_out.T.contiguous(), over) < 0.8 * error(held_out.T.contiguous(), CodecSpec())


def test_kept_tokens_never_share_a_group():
    codecs = alternatives(CodecSpec(), (256, 256), keep_tokens=True)
    assert len(codecs) > 1 and not any(codec.view == "tokens" for codec in codecs)
    sizes = {codec.wire_bytes((256, 256)) for codec in codecs}
    assert max(sizes) == CodecSpec().wire_bytes((256, 256))


def test_channels_of_zeros_do_not_count():
    x = outliers(0, True)
    x[:, 3] = 0
    assert channel_errors(x, x).shape == (255,)


def test_nothing_to_rank_is_refused():
    with pytest.raises(ValueError, match="got 0 samples and 1 codecs"):
        rank_codecs([], [CodecSpec()])
