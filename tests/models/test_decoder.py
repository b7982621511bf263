import cmath
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.attend import local_attend
from models.config import Activation, Mlp, ModelConfig, Norm, Positions
from models.decoder import Decoder

LENGTHS = [7, 1, 13, 2, 5]


def twin_norm(x, config, name, weights, width_norm=None):
    weight = weights[f"{name}.weight"]
    if width_norm == "rms" or config.norm is Norm.rms:
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    return (
        centred / (centred.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight + weights[f"{name}.bias"]
    )


def twin_linear(x, name, weights):
    y = torch.einsum("ti,oi->to", x, weights[f"{name}.weight"])
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def twin_turn(x, config):
    """Rotary as complex numbers: channel i and i + D/2 are the two parts, turned by position * theta ** (-2i/D)."""
    half = config.head_dim // 2
    turned = torch.complex(x[..., :half], x[..., half:]).clone()
    for i in range(half):
        radians = config.rope_theta ** (-2 * i / config.head_dim)
        if config.rope_factor is not None:
            turns = config.rope_original_positions * radians / (2 * math.pi)
            smooth = min(max((turns - 1) / 3, 0), 1)
            radians *= smooth + (1 - smooth) / config.rope_factor
        for t in range(x.shape[0]):
            turned[t, :, i] *= cmath.exp(1j * t * radians)
    return torch.cat((turned.real, turned.imag), -1)


def twin_attention(x, config, window, name, weights):
    T, D = x.shape[0], config.head_dim
    counts = {"q": config.heads, "k": config.kv_heads, "v": config.kv_heads}
    q, k, v = (twin_linear(x, f"{name}.{side}_proj", weights).reshape(T, n, D) for side, n in counts.items())
    if config.qk_norm:
        q = twin_norm(q, config, f"{name}.q_norm", weights, "rms")
        k = twin_norm(k, config, f"{name}.k_norm", weights, "rms")
    if config.positions is Positions.rotary:
        q, k = twin_turn(q, config), twin_turn(k, config)
    heads = []
    for head in range(config.heads):
        key = head * config.kv_heads // config.heads
        logits = q[:, head] @ k[:, key].T * (config.softmax_scale or 1 / math.sqrt(D))
        if config.softcap:
            logits = config.softcap * torch.tanh(logits / config.softcap)
        for i in range(T):
            for j in range(T):
                if j > i or (window is not None and i - j >= window):
                    logits[i, j] = -math.inf
        if config.sink:
            logits = torch.cat((logits, weights[f"{name}.sinks"][head].expand(T, 1)), 1)
        heads.append(logits.softmax(1)[:, :T] @ v[:, key])
    return twin_linear(torch.cat(heads, 1), f"{name}.o_proj", weights)


def twin_mlp(x, config, name, weights):
    up = twin_linear(x, f"{name}.up_proj", weights)
    inner = twin_linear(x, f"{name}.gate_proj", weights) if config.mlp is Mlp.gated else up
    if config.activation is Activation.silu:
        inner = inner / (1 + torch.exp(-inner))
    else:
        inner = inner / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
    return twin_linear(inner * up if config.mlp is Mlp.gated else inner, f"{name}.down_proj", weights)


def twin(tokens, config, weights):
    """Hidden states of one document, written out from the papers with no code of the model."""
    x = weights["embed_tokens.weight"][tokens]
    if config.positions is Positions.learned:
        x = x + weights["embed_positions.weight"][: len(tokens)]
    windows = config.window or [None]
    for index in range(config.layers):
        layer, window = f"layers.{index}", windows[index % len(windows)]
        normed = twin_norm(x, config, f"{layer}.input_layernorm", weights)
        x = x + twin_attention(normed, config, window, f"{layer}.self_attn", weights)
        normed = twin_norm(x, config, f"{layer}.post_attention_layernorm", weights)
        x = x + twin_mlp(normed, config, f"{layer}.mlp", weights)
    return twin_norm(x, config, "norm", weights)


def attend_to(starts, stops, total, config: ModelConfig):
    return local_attend(starts, stops, total, config.layer_masks(), backend="reference")


def gradients(decoder, loss):
    names, parameters = zip(*decoder.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, parameters)))


def assert_close(got, want, tolerance):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(
            got[name], want[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_forward_equals_the_twin(small, rough, packed):
    decoder = rough(small)
    starts, stops, tokens, positions, _ = packed(LENGTHS)
    weights = dict(decoder.named_parameters())
    with torch.no_grad():
        hidden = decoder(tokens, positions, attend_to(starts, stops, len(tokens), small))
        for start, stop in zip(starts, stops):
            want = twin(tokens[start:stop], small, weights)
            torch.testing.assert_close(hidden[start:stop], want, rtol=1e-10, atol=1e-10)


@pytest.mark.deep
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 17), max_size=6),
    heads=st.sampled_from([(1, 1), (4, 1), (6, 3), (5, 5)]),
    half=st.integers(1, 5),
    windows=st.sampled_from([None, [1], [4, None], [None, 16], [3, 7]]),
    softcap=st.none() | st.floats(0.5, 5),
    scale=st.none() | st.floats(0.1, 2),
    switches=st.fixed_dictionaries(
        {name: st.booleans() for name in ("bias", "qkv_bias", "qk_norm", "sink", "tied_embeddings", "recompute")}
    ),
    kinds=st.fixed_dictionaries(
        {
            "norm": st.sampled_from(["rms", "layer"]),
            "mlp": st.sampled_from(["gated", "plain"]),
            "activation": st.sampled_from(["silu", "gelu_tanh"]),
        }
    ),
    learned=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_config_equals_the_twin(
    tiny, rough, packed, lengths, heads, half, windows, softcap, scale, switches, kinds, learned, seed
):
    place = {"positions": "learned", "rope_theta": None} if learned else {}
    shape = dict(layers=2, heads=heads[0], kv_heads=heads[1], head_dim=2 * half - learned, window=windows)
    config = tiny(softcap=softcap, softmax_scale=scale, **shape, **switches, **kinds, **place)
    decoder = rough(config, seed=seed)
    starts, stops, tokens, positions, _ = packed(lengths, seed=seed)
    weights = dict(decoder.named_parameters())
    with torch.no_grad():
        hidden = decoder(tokens, positions, attend_to(starts, stops, len(tokens), config))
        for start, stop in zip(starts, stops):
            want = twin(tokens[start:stop], config, weights)
            torch.testing.assert_close(hidden[start:stop], want, rtol=1e-9, atol=1e-9)


def test_logits_use_the_tied_or_own_head(small, rough):
    decoder = rough(small)
    weights = dict(decoder.named_parameters())
    head = weights["embed_tokens.weight"] if small.tied_embeddings else weights["lm_head.weight"]
    hidden = torch.randn(3, small.hidden, dtype=torch.float64)
    torch.testing.assert_close(decoder.logits(hidden), hidden @ head.T, rtol=0, atol=1e-12)
    nll = decoder.token_nll(hidden, torch.tensor([4, -100, 36]))
    want = F.cross_entropy(hidden @ head.T, torch.tensor([4, -100, 36]), reduction="none")
    torch.testing.assert_close(nll, want, rtol=0, atol=1e-12)


def test_a_packed_row_equals_its_documents(small, rough, packed):
    decoder = rough(small)
    starts, stops, tokens, positions, labels = packed(LENGTHS)
    valid = int((labels != -100).sum())
    loss = decoder.loss(tokens, positions, labels, attend_to(starts, stops, len(tokens), small), valid)
    alone = torch.zeros((), dtype=torch.float64)
    for start, stop in zip(starts, stops):
        attend = attend_to([0], [stop - start], stop - start, small)
        piece = slice(start, stop)
        alone = alone + decoder.loss(tokens[piece], torch.arange(stop - start), labels[piece], attend, valid)
    torch.testing.assert_close(loss, alone, rtol=1e-12, atol=1e-12)
    assert_close(gradients(decoder, loss), gradients(decoder, alone), 1e-12)


def test_documents_are_isolated_bitwise(small, rough, packed):
    """Other tokens in document 1 leave document 2's outputs, loss and gradients as they were, to the bit."""
    decoder = rough(small, torch.float32)
    starts, stops, tokens, positions, labels = packed([9, 12])
    labels[:9] = -100
    other = tokens.clone()
    other[:9] = (other[:9] + 5) % 37
    attend = attend_to(starts, stops, 21, small)
    hidden, changed = (decoder(row, positions, attend) for row in (tokens, other))
    assert not torch.equal(hidden[:9], changed[:9])
    assert torch.equal(hidden[9:], changed[9:])
    first, second = (gradients(decoder, decoder.token_nll(h, labels).sum()) for h in (hidden, changed))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(bool(grad.any()) for grad in first.values())


def test_micro_batches_of_unequal_size_add_up(tiny, rough, packed):
    """Gradients of two halves, each over the global count, sum to the whole row's; a half without labels adds 0."""
    config = tiny()
    decoder = rough(config)
    starts, stops, tokens, positions, labels = packed([6, 11, 3])
    labels[17:] = -100
    valid = int((labels != -100).sum())
    whole = gradients(decoder, decoder.loss(tokens, positions, labels, attend_to(starts, stops, 20, config), valid))
    parts = []
    for a, b, begin, end in ((0, 6, [0], [6]), (6, 17, [0], [11]), (17, 20, [0], [3])):
        attend = attend_to(begin, end, b - a, config)
        parts.append(gradients(decoder, decoder.loss(tokens[a:b], positions[a:b], labels[a:b], attend, valid)))
    assert not any(bool(grad.any()) for grad in parts[2].values())
    assert_close({name: sum(part[name] for part in parts) for name in whole}, whole, 1e-12)


def test_padding_changes_nothing(small, rough, packed):
    decoder = rough(small)
    starts, stops, tokens, positions, labels = packed([4, 6])
    want = decoder.loss(tokens, positions, labels, attend_to(starts, stops, 10, small), 8)
    padded = [F.pad(x, (0, 3), value=fill) for x, fill in ((tokens, 0), (positions, 0), (labels, -100))]
    got = decoder.loss(*padded, attend_to(starts, stops, 13, small), 8)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert_close(gradients(decoder, got), gradients(decoder, want), 1e-12)


def test_an_empty_row_gives_zero_loss_and_gradients(small, rough, packed):
    decoder = rough(small)
    starts, stops, tokens, positions, labels = packed([])
    loss = decoder.loss(tokens, positions, labels, attend_to(starts, stops, 0, small), 5)
    loss.backward()
    assert loss.item() == 0
    assert not any(bool(p.grad.any()) for p in decoder.parameters() if p.grad is not None)


@pytest.mark.parametrize("autocast", [False, True])
def test_recompute_is_bitwise_and_never_repeats_attention(small, rough, packed, autocast):
    starts, stops, tokens, positions, labels = packed(LENGTHS)
    plain = attend_to(starts, stops, len(tokens), small)
    calls, held, results = [], [], []

    def attend(q, k, v, ctx):
        calls.append(ctx.layer)
        before = held[-1]
        out = plain(q, k, v, ctx)
        held[-1] = before  # what attention itself keeps is the backend's affair
        return out

    def pack(x):
        held[-1] += x.numel() * x.element_size()
        return x

    for recompute in (False, True):
        small.recompute = recompute
        decoder = rough(small, torch.float32)
        held.append(0)
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        ):
            loss = decoder.loss(tokens, positions, labels, attend, 23)
        results.append((loss, gradients(decoder, loss)))
    (loss, want), (again, got) = results
    assert torch.equal(loss, again)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert calls == 2 * list(range(small.layers))
    assert held[1] < 0.8 * held[0]


def test_autocast_keeps_norms_rotation_and_loss_wide(small, rough, packed):
    starts, stops, tokens, positions, labels = packed(LENGTHS)
    plain = attend_to(starts, stops, len(tokens), small)
    decoder = rough(small, torch.float32)
    seen = set()

    def attend(q, k, v, ctx):
        seen.update((q.dtype, k.dtype, v.dtype))
        return plain(q, k, v, ctx)

    want = decoder(tokens, positions, plain)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = decoder(tokens, positions, attend)
        nll = decoder.token_nll(hidden, labels)
    assert seen == {torch.bfloat16}
    assert hidden.dtype == nll.dtype == torch.float32
    error = (hidden - want).norm() / want.norm()
    assert 0 < error < 0.05
    assert all(grad.dtype == torch.float32 for grad in gradients(decoder, nll.sum()).values())


def test_a_bf16_model_runs(small, rough, packed):
    starts, stops, tokens, positions, labels = packed(LENGTHS)
    decoder = rough(small, torch.bfloat16)
    hidden = decoder(tokens, positions, attend_to(starts, stops, len(tokens), small))
    nll = decoder.token_nll(hidden, labels)
    assert hidden.dtype == torch.bfloat16 and nll.dtype == torch.float32
    assert all(bool(grad.isfinite().all()) for grad in gradients(decoder, nll.sum()).values())


@pytest.mark.parametrize("position, words", [(64, "65 tokens"), (-1, "position -1")])
def test_a_learned_position_outside_the_table_is_refused(rough, tiny, position, words):
    config = tiny(positions="learned", rope_theta=None)
    attend = attend_to([0], [3], 3, config)
    with pytest.raises(ValueError, match=words):
        rough(config)(torch.tensor([1, 2, 3]), torch.tensor([0, 1, position]), attend)


def test_a_loss_over_no_tokens_is_refused(rough, tiny, packed):
    starts, stops, tokens, positions, labels = packed([3])
    with pytest.raises(ValueError, match="valid_tokens=0"):
        rough(tiny()).loss(tokens, positions, labels, attend_to(starts, stops, 3, tiny()), 0)


def test_auto_backend_trains_a_little(tiny, packed):
    """Sixty steps on one packed row start at the loss of knowing nothing and learn most of the row."""
    config = tiny()
    decoder = Decoder(config, seed=3)
    starts, stops, tokens, positions, labels = packed([17, 1, 30])
    attend = local_attend(starts, stops, 48, config.layer_masks())
    optimiser = torch.optim.AdamW(decoder.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        loss = decoder.loss(tokens, positions, labels, attend, 45)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(37)) < 0.2
    assert losses[-1] < 1.0
