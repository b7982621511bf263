"""A ModelConfig as the config.json of the architecture that computes the same. No torch, and no transformers."""

from collections.abc import Mapping
from typing import Any

from models.config import Activation, Mlp, ModelConfig, Norm, Positions
from models.hf.config import LLAMA3_TURNS
from models.hf.files import CheckpointError
from models.hf.names import ARCHITECTURES, pieces


def fitting_architecture(config: ModelConfig) -> str:
    """The architecture that computes what `config` does.

    Raises:
        CheckpointError: none of ARCHITECTURES does; says what is unfit.
    """
    kind = "gpt2" if config.positions is Positions.learned else "llama"
    if kind == "llama" and config.qk_norm:
        kind = "qwen3"
    elif kind == "llama" and config.qkv_bias and not config.bias:
        kind = "qwen2"
    unfit = [text for bad, text in _misfits(config, kind) if bad]
    if unfit:
        raise CheckpointError(
            f"no architecture of {', '.join(ARCHITECTURES)} computes this model; the nearest, {kind}, has no "
            f"{', no '.join(unfit)}."
        )
    pieces(kind, config)
    return kind


def _misfits(config: ModelConfig, kind: str) -> list[tuple[bool, str]]:
    gpt2 = kind == "gpt2"
    windows = {window for window in config.layer_windows() if window is not None}
    scales = (config.head_dim**-0.5, *([1.0] if gpt2 else []))
    found = [
        (config.softcap is not None, f"model.softcap={config.softcap}"),
        (config.sink, "model.sink=true"),
        (config.scale() not in scales, f"model.softmax_scale={config.softmax_scale}"),
        (config.norm is not (Norm.layer if gpt2 else Norm.rms), f"model.norm={config.norm.value}"),
        (config.mlp is not (Mlp.plain if gpt2 else Mlp.gated), f"model.mlp={config.mlp.value}"),
        (bool(windows) and kind in ("gpt2", "llama"), f"model.window={config.window}"),
        *(
            (getattr(config, key) is not None, f"model.{key}={getattr(config, key)}")
            for key in ("chunk", "prefix", "first")
        ),
        (len(windows) > 1, f"windows of {len(windows)} sizes"),
    ]
    if gpt2:
        return [
            *found,
            (config.activation is not Activation.gelu_tanh, f"model.activation={config.activation.value}"),
            (not config.bias, "model.bias=false"),
            (config.qk_norm, "model.qk_norm=true"),
            (config.kv_heads != config.heads, f"model.kv_heads={config.kv_heads} beside {config.heads} heads"),
            (
                config.heads * config.head_dim != config.hidden,
                f"{config.heads} heads of {config.head_dim} in {config.hidden}",
            ),
        ]
    return [
        *found,
        (config.bias and kind != "llama", "model.bias=true"),
        (config.qkv_bias and kind == "qwen3", "model.qkv_bias=true"),
        (
            kind == "llama" and config.hidden % config.heads != 0,
            f"{config.heads} heads that do not divide {config.hidden}",
        ),
    ]


def write_config(config: ModelConfig, dtype: str, special: Mapping[str, int | list[int] | None]) -> dict[str, Any]:
    """The content of a config.json that describes `config`, in the spelling that transformers 4 and 5 both read.

    Args:
        dtype: of the weights beside it, as torch names it ("bfloat16").
        special: bos_token_id, eos_token_id and pad_token_id, null where unknown: the classes' own defaults are ids of
            other vocabularies.

    Raises:
        CheckpointError: no architecture fits; see `fitting_architecture`.
    """
    kind = fitting_architecture(config)
    found = _gpt2_keys(config) if kind == "gpt2" else _rotary_keys(config, kind)
    return {
        "architectures": [ARCHITECTURES[kind].model_class],
        "model_type": kind,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tied_embeddings,
        **{key: special.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        **found,
    }


def _gpt2_keys(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_positions": config.max_positions,
        "n_embd": config.hidden,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.ffn,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_eps,
        "scale_attn_weights": config.scale() != 1.0 or config.head_dim == 1,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _rotary_keys(config: ModelConfig, kind: str) -> dict[str, Any]:
    scaling = None
    if config.rope_factor is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "original_max_position_embeddings": config.rope_original_positions,
            **LLAMA3_TURNS,
        }
    found: dict[str, Any] = {
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu" if config.activation is Activation.silu else "gelu_pytorch_tanh",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "attention_dropout": 0.0,
    }
    if kind == "llama":
        return {**found, "attention_bias": config.bias, "mlp_bias": config.bias}
    return {**found, **({"attention_bias": False} if kind == "qwen3" else {}), **_window_keys(config)}


def _window_keys(config: ModelConfig) -> dict[str, Any]:
    windows = config.layer_windows()
    if not any(windows):
        return {"use_sliding_window": False, "sliding_window": None}
    # transformers before layer_types knows full layers first and windows after them, by the number of the full ones
    full = next(index for index, window in enumerate(windows) if window)
    suffix = all(windows[full:])
    return {
        "use_sliding_window": True,
        "sliding_window": next(window for window in windows if window),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        **({"max_window_layers": full} if suffix else {}),
    }
