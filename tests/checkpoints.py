"""Tiny checkpoints as transformers itself writes them, every weight far from its initial value."""

import os
from pathlib import Path
from typing import Any

import torch

from models.config import ModelConfig
from models.decoder import Decoder
from models.hf.weights import read_weights

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here asks a server

SHAPE = dict(
    vocab_size=300, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip
LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
GPT2 = dict(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=256)
# family -> (model_type, what differs from its class's defaults)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SHAPE),
    "llama31": ("llama", {**SHAPE, "rope_parameters": LLAMA31, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {**SHAPE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("qwen3", {**SHAPE, "head_dim": 12, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", GPT2),
    "llama_biased": ("llama", {**SHAPE, "attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    "qwen2_window": ("qwen2", {**SHAPE, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3_gelu": ("qwen3", {**SHAPE, "hidden_act": "gelu_pytorch_tanh", "head_dim": 8}),
    "gpt2_untied": ("gpt2", {**GPT2, "tie_word_embeddings": False, "scale_attn_weights": False, "n_inner": 40}),
}


def load_decoder(config: ModelConfig, path: Path, device: torch.device | str = "cpu") -> Decoder:
    """A decoder with the weights of the checkpoint in `path`, in fp32; see `read_weights`."""
    decoder = Decoder(config, device="meta")
    decoder.to_empty(device=device)
    read_weights(decoder, path)
    return decoder


def make_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """The transformers model of a family, with changes to its config: fp32, eval mode, eager attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, given = FAMILIES[family]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**given, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def save(family: str, folder: Path, seed: int = 0, **how: Any) -> Any:
    """`make_model`, saved to `folder` by transformers; returns the model."""
    model = make_model(family, seed)
    model.save_pretrained(folder, **how)
    return model


def load_back(folder: Path) -> Any:
    """What transformers makes of a folder, in fp32 and eager attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def theirs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] of one document."""
    with torch.no_grad():
        return model(tokens[None]).logits[0]
