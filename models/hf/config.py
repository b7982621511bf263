"""What a config.json of a Hugging Face checkpoint says, as a ModelConfig. No torch, and no transformers.

A key that config.json leaves out has the value that the architecture's class in transformers 5 gives it, listed in
DEFAULTS: a tied head or a missing rope base is a property of the class, not of the file. What changes the function that
the weights compute and has no counterpart here is refused by name. Dropout, which only training knows, is not carried
over: there is none here.
"""

import math
from collections.abc import Mapping
from typing import Any

from models.config import LARGEST, Activation, Mlp, ModelConfig, Norm, Positions
from models.hf.files import CheckpointError
from models.hf.names import ARCHITECTURES

# Llama 3.1's stretching with its published turns; others would need other constants in models/rotary.py.
LLAMA3_TURNS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
DEFAULT_THETA = 10000.0

_LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 2048, "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_QWEN2 = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 32768, "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
_GPT2 = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
    "tie_word_embeddings": True, "scale_attn_weights": True,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128, "attention_bias": False},
    "gpt2": _GPT2,
}
# GPT-2's own names beside those that transformers also takes for them
GPT2_ALIASES = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
ACTIVATIONS = {
    "silu": Activation.silu,
    "swish": Activation.silu,
    "gelu_new": Activation.gelu_tanh,
    "gelu_pytorch_tanh": Activation.gelu_tanh,
}
# Keys of other models, and of variants, that would change the function: what each may be, beside absent and null.
NEUTRAL: dict[str, Any] = {
    "quantization_config": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "num_experts": 0,
    "num_local_experts": 0,
    "add_cross_attention": False,
    "scale_attn_by_inverse_layer_idx": False,
    "is_causal": True,
}


def read_config(raw: Mapping[str, Any]) -> tuple[str, ModelConfig]:
    """The architecture's name in ARCHITECTURES, and the model that `raw`, the content of a config.json, describes.

    Raises:
        CheckpointError: another architecture, a value of the wrong type, or a feature that the decoder lacks.
        ValueError: sizes that make no model.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise CheckpointError(
            f"config.json: model_type={kind!r} is an architecture that longfold cannot load; it loads "
            f"{', '.join(ARCHITECTURES)}."
        )
    for key, neutral in NEUTRAL.items():
        if raw.get(key) not in (None, neutral):
            raise CheckpointError(f"config.json: {key}={_short(raw[key])} is a feature that the decoder lacks.")
    config = _read_gpt2(_Values(raw, kind)) if kind == "gpt2" else _read_rotary(_Values(raw, kind), kind)
    config.validate()
    return kind, config


class _Values:
    """Values of a config.json by key, defaults of the architecture put in, types checked."""

    def __init__(self, raw: Mapping[str, Any], kind: str) -> None:
        self.raw, self.defaults = raw, DEFAULTS[kind]

    def get(self, key: str) -> Any:
        alias = GPT2_ALIASES.get(key, key)
        found = self.raw.get(key, self.raw.get(alias, self.defaults[key]))
        default = self.defaults[key]
        wanted = type(default)
        if default is None or key == "sliding_window":  # keys that may be null
            return found
        if wanted is float and type(found) is int:
            return float(found)
        if type(found) is not wanted:
            raise CheckpointError(f"config.json: {key}={_short(found)} must be a {wanted.__name__}.")
        return found

    def count(self, key: str, otherwise: int | None = None) -> int:
        """A whole number; `otherwise` where it is null."""
        found = self.get(key)
        found = otherwise if found is None else found
        if type(found) is not int or found < 1:
            raise CheckpointError(f"config.json: {key}={_short(found)} must be a whole number of 1 or more.")
        most = LARGEST["layers"] if key in ("num_hidden_layers", "n_layer") else LARGEST["max_positions"]
        if found > most:
            raise CheckpointError(f"config.json: {key}={found} is beyond {most}, the most that is read; mend the file.")
        return found

    def activation(self, key: str) -> Activation:
        name = self.get(key)
        if name not in ACTIVATIONS:
            raise CheckpointError(
                f"config.json: {key}={name!r} is an activation that the decoder lacks; it has {', '.join(ACTIVATIONS)}."
            )
        return ACTIVATIONS[name]


def _read_rotary(values: _Values, kind: str) -> ModelConfig:
    hidden, heads = values.count("hidden_size"), values.count("num_attention_heads")
    layers, longest = values.count("num_hidden_layers"), values.count("max_position_embeddings")
    theta, factor, original = _read_rope(values.raw, longest)
    bias = _read_bias(values, kind)
    return ModelConfig(
        vocab_size=values.count("vocab_size"),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=values.count("num_key_value_heads", heads),
        head_dim=values.count("head_dim", hidden // heads),
        ffn=values.count("intermediate_size"),
        max_positions=longest,
        norm_eps=values.get("rms_norm_eps"),
        tied_embeddings=values.get("tie_word_embeddings"),
        positions=Positions.rotary,
        rope_theta=theta,
        rope_factor=factor,
        rope_original_positions=original,
        norm=Norm.rms,
        mlp=Mlp.gated,
        activation=values.activation("hidden_act"),
        bias=bias,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        window=None if kind == "llama" else _read_windows(values, layers),
        init_std=values.get("initializer_range"),
    )


def _read_bias(values: _Values, kind: str) -> bool:
    if kind == "qwen2":
        return False
    attention = values.get("attention_bias")
    mlp = values.get("mlp_bias") if kind == "llama" else False
    if attention != mlp:
        raise CheckpointError(
            f"config.json: biases in attention ({attention}) and not in the MLP ({mlp}), or the other way round, is a "
            f"feature that the decoder lacks; it has both (a llama with attention_bias and mlp_bias), or neither."
        )
    return attention


def _read_gpt2(values: _Values) -> ModelConfig:
    hidden, heads = values.count("n_embd"), values.count("n_head")
    if hidden % heads:
        raise CheckpointError(f"config.json: n_head={heads} does not divide n_embd={hidden}.")
    return ModelConfig(
        vocab_size=values.count("vocab_size"),
        layers=values.count("n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=values.count("n_inner", 4 * hidden),
        max_positions=values.count("n_positions"),
        norm_eps=values.get("layer_norm_epsilon"),
        tied_embeddings=values.get("tie_word_embeddings"),
        positions=Positions.learned,
        norm=Norm.layer,
        mlp=Mlp.plain,
        activation=values.activation("activation_function"),
        bias=True,
        softmax_scale=None if values.get("scale_attn_weights") else 1.0,
        init_std=values.get("initializer_range"),
    )


def _read_rope(raw: Mapping[str, Any], longest: int) -> tuple[float, float | None, int | None]:
    """Base, factor and original positions, from `rope_theta` with `rope_scaling`, or from transformers 5's
    `rope_parameters`; where both are given transformers takes `rope_scaling`, and so does this."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise CheckpointError(
            "config.json: a rope of its own for each type of layer is a feature that the decoder lacks."
        )
    top = raw.get("rope_theta")
    theta = rope.get("rope_theta", DEFAULT_THETA if top is None else top)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise CheckpointError(
            f"config.json: rope type {kind!r} is a feature that the decoder lacks; it has default and llama3."
        )
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise CheckpointError(f"config.json: partial_rotary_factor={partial}: the decoder rotates whole heads only.")
    known = ROPE_KEYS | ({"factor", "original_max_position_embeddings", *LLAMA3_TURNS} if kind == "llama3" else set())
    unknown = sorted(rope.keys() - known)
    if unknown:
        raise CheckpointError(
            f"config.json: rope type {kind!r} with {', '.join(unknown)} is a feature that is unknown."
        )
    theta = _number("rope_theta", theta)
    if kind == "default":
        return theta, None, None
    original = raw.get("original_max_position_embeddings", rope.get("original_max_position_embeddings", longest))
    factor = _number("factor of rope type llama3", rope.get("factor"))
    original = _number("original_max_position_embeddings", original)
    for key, published in LLAMA3_TURNS.items():
        if rope.get(key) != published:
            raise CheckpointError(
                f"config.json: rope type llama3 with {key}={_short(rope.get(key))} is a feature that the decoder "
                f"lacks; it has {published}."
            )
    return theta, factor, int(original)


def _read_windows(values: _Values, layers: int) -> list[int | None] | None:
    """Each layer's window. Theirs, like ours, counts the query's own position."""
    window = values.get("sliding_window") if values.get("use_sliding_window") else None
    kinds = values.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise CheckpointError(f"config.json: layer_types={_short(kinds)} must be a list, of a name for each layer.")
    if kinds is None:
        first = values.get("max_window_layers") if window is not None else layers
        kinds = ["sliding_attention" if index >= first else "full_attention" for index in range(layers)]
    unknown = sorted({str(kind) for kind in kinds} - {"sliding_attention", "full_attention"})
    if unknown or len(kinds) != layers:
        raise CheckpointError(
            f"config.json: layer_types names {len(kinds)} layers of {layers}"
            + (f", with {', '.join(unknown)}, which the decoder lacks." if unknown else ".")
        )
    if "sliding_attention" not in kinds:
        return None
    if type(window) is not int:
        raise CheckpointError(
            f"config.json: layer_types has sliding_attention, with use_sliding_window="
            f"{values.get('use_sliding_window')} and sliding_window={_short(values.get('sliding_window'))}."
        )
    if "full_attention" not in kinds:
        return [window]
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise CheckpointError(f"config.json: {key}={_short(value)} must be a finite number.")
    return float(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
