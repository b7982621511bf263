"""Tiny random transformers models on our attention, against transformers' own eager attention."""

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from models.hf.transformers_attention import register, visible_keys  # noqa: E402

SIZE = dict(
    vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MODELS = {
    "llama": ("Llama", {}),
    "mistral_window": ("Mistral", dict(sliding_window=5)),
    "qwen3_some_windows": (
        "Qwen3", dict(head_dim=8, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "gemma2_softcap": ("Gemma2", dict(head_dim=8, sliding_window=5, attn_logit_softcapping=3.0)),
    "gpt_oss_sinks": ("GptOss", dict(head_dim=8, sliding_window=5, num_local_experts=2, num_experts_per_tok=1)),
    "gpt2": ("GPT2", dict(n_embd=32, n_head=4, n_layer=2, attn_pdrop=0.0)),
}  # fmt: skip
LENGTHS = [5, 9, 3]


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()


def build(name: str, **changes) -> nn.Module:
    family, options = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SIZE | options | changes)
    torch.manual_seed(0)
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    return getattr(transformers, family + head)(config).eval()


def tokens(rows: int = 1) -> Tensor:
    return torch.randint(3, 99, (rows, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))


def on(model: nn.Module, implementation: str, ids: Tensor, **options) -> Tensor:
    model.set_attn_implementation(implementation)
    return model(ids, **options).logits


def padding(side: str) -> Tensor:
    mask = torch.ones(3, sum(LENGTHS), dtype=torch.long)
    for row, n in ((1, 4), (2, 9)):
        mask[row, slice(0, n) if side == "left" else slice(-n, None)] = 0
    if side == "holes":
        mask[0, [3, 4, 11]] = 0
    return mask


def packed_positions() -> Tensor:
    return torch.cat([torch.arange(n) for n in LENGTHS])[None]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_padded_batches_equal_eager_attention(name: str, side: str) -> None:
    model, ids, mask = build(name), tokens(3), padding(side)
    want, got = (on(model, which, ids, attention_mask=mask) for which in ("eager", "longfold"))
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_have_the_logits_they_have_alone(name: str) -> None:
    model, ids = build(name), tokens()
    alone = torch.cat([on(model, "longfold", part, use_cache=False) for part in ids.split(LENGTHS, 1)], 1)
    eager = torch.cat([on(model, "eager", part, use_cache=False) for part in ids.split(LENGTHS, 1)], 1)
    torch.testing.assert_close(alone, eager, rtol=1e-4, atol=1e-5)
    ones = torch.ones_like(ids)
    for options in (dict(use_cache=False), dict(use_cache=True), dict(attention_mask=ones, use_cache=False)):
        packed = on(model, "longfold", ids, position_ids=packed_positions(), **options)
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_a_document_leaks_into_the_next_under_eager_attention_and_not_under_ours() -> None:
    """A packed row beside a mask of ones, as a tokenizer returns it."""
    model, ids = build("llama"), tokens()
    changed = ids.clone()
    changed[0, : LENGTHS[0]] = 7
    options = dict(position_ids=packed_positions(), attention_mask=torch.ones_like(ids), use_cache=False)
    later = slice(LENGTHS[0], None)
    for implementation, leaks in (("eager", True), ("longfold", False)):
        first, second = (on(model, implementation, x, **options)[0, later] for x in (ids, changed))
        assert torch.equal(first, second) is not leaks


def test_a_flattening_collator_s_batch_trains() -> None:
    """cu_seq_lens without positions that restart; gradients equal those of the documents alone."""
    documents = [{"input_ids": part[0].tolist()} for part in tokens().split(LENGTHS, 1)]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=True)
    batch = collate(documents)
    model = build("llama")
    model.set_attn_implementation("longfold")
    loss = model(**batch).loss
    found = torch.autograd.grad(loss, list(model.parameters()))
    model.set_attn_implementation("eager")
    total = sum(model(x, labels=x, use_cache=False).loss * (x.shape[1] - 1) for x in tokens().split(LENGTHS, 1))
    wanted = torch.autograd.grad(total / (sum(LENGTHS) - len(LENGTHS)), list(model.parameters()))
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    for key in ("position_ids", "labels"):
        del batch[key]
    model.set_attn_implementation("longfold")
    positions = torch.arange(sum(LENGTHS))[None]
    whole = model(**batch, position_ids=positions, use_cache=False).logits
    alone = model(tokens()[:, : LENGTHS[0]], use_cache=False).logits
    torch.testing.assert_close(whole[:, : LENGTHS[0]], alone)


@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma2_softcap"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_with_a_cache_is_eager_attention_s(name: str, cache: str | None) -> None:
    model, mask = build(name), padding("left")
    found = []
    for implementation in ("eager", "longfold"):
        model.set_attn_implementation(implementation)
        options = dict(max_new_tokens=9, do_sample=False, cache_implementation=cache, disable_compile=True)
        found.append(model.generate(tokens(3), attention_mask=mask, **options))
    assert found[0].shape[1] > sum(LENGTHS) and torch.equal(*found)


def test_chunked_attention_is_found_by_looking_at_its_pairs() -> None:
    """Llama 4: no family that is known by name; right when padded, and refused where chunks would not restart."""
    config = transformers.Llama4TextConfig(
        **SIZE, head_dim=8, attention_chunk_size=5, num_local_experts=2, intermediate_size_mlp=32
    )
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config).eval()
    mask = padding("left")
    want, got = (on(model, which, tokens(3), attention_mask=mask) for which in ("eager", "longfold"))
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-5)
    packed = dict(position_ids=packed_positions(), use_cache=False)
    want, got = (on(model, which, tokens(), **packed) for which in ("eager", "longfold"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    chunks = transformers.masking_utils.chunked_causal_mask_function(5, torch.zeros(1, dtype=torch.int64))
    visible = visible_keys(1, 17, 17, mask_function=chunks)
    with pytest.raises(ValueError, match="depends on where in its row a token lies"):
        visible.interval_mask(packed_positions(), None)


def test_encoders_see_both_sides() -> None:
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZE)).eval()
    mask = padding("right")
    want, got = (on(model, which, tokens(3), attention_mask=mask) for which in ("eager", "longfold"))
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-5)


def test_masks_of_no_interval_are_refused() -> None:
    def odd(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((q - k) % 2 == 0) & (k <= q) & (batch == batch)

    with pytest.raises(ValueError, match="no single interval"):
        visible_keys(1, 6, 6, mask_function=odd)
    with pytest.raises(ValueError, match="earlier keys"):
        visible_keys(1, 6, 6, mask_function=lambda b, h, q, k: (k >= 5 - q) & (b == b))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"attention_dropout": 0.1}, {}, "no attention dropout, and this model asks for 0.1; set attention_dropout"),
        ({}, {"attention_mask": torch.zeros(1, 1, 17, 17)}, r"2D attention mask \[batch, keys\], not \(1, 1, 17, 17\)"),
        ({}, {"head_mask": torch.ones(4)}, "takes no head_mask"),
        ({}, {"indices": torch.ones(4)}, "takes no indices"),
        ({}, {"cu_seq_lens_q": torch.tensor([0, 8, 5, 17])}, "cu_seq_lens_q decreases somewhere"),
        ({}, {"cu_seq_lens_q": torch.tensor([0, 5])}, "from 0 to 5, but the batch has 1 rows of 17 queries"),
    ],
)
def test_refusals(changes: dict, options: dict, message: str) -> None:
    model = build("llama", **changes).train()
    with pytest.raises(ValueError, match=message):
        on(model, "longfold", tokens(), use_cache=False, **options)


def test_a_cache_of_packed_documents_is_refused() -> None:
    model, ids = build("llama"), tokens()
    model.set_attn_implementation("longfold")
    cache = model(ids, position_ids=packed_positions(), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="at position 3 would see 18 keys"):
        model(ids[:, :1], position_ids=torch.tensor([[3]]), past_key_values=cache)
