"""A decoder's parameters by name and shape, in closed form: what a file of weights must hold, known without torch."""

from models.config import Mlp, ModelConfig, Norm, Positions


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter that `Decoder(config)` makes. A tied head is the embedding, under its name."""
    hidden = config.hidden
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, hidden)}
    if config.positions is Positions.learned:
        shapes["embed_positions.weight"] = (config.max_positions, hidden)
    for index in range(config.layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer(config).items()}
    shapes |= _norm("norm", config)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _layer(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, ffn = config.hidden, config.ffn
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    qkv_bias = config.bias or config.qkv_bias
    shapes = _norm("input_layernorm", config)
    shapes |= _linear("self_attn.q_proj", query, hidden, qkv_bias)
    shapes |= _linear("self_attn.k_proj", key, hidden, qkv_bias)
    shapes |= _linear("self_attn.v_proj", key, hidden, qkv_bias)
    shapes |= _linear("self_attn.o_proj", hidden, query, config.bias)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    if config.sink:
        shapes["self_attn.sinks"] = (config.heads,)
    shapes |= _norm("post_attention_layernorm", config)
    if config.mlp is Mlp.gated:
        shapes |= _linear("mlp.gate_proj", ffn, hidden, config.bias)
    return (
        shapes | _linear("mlp.up_proj", ffn, hidden, config.bias) | _linear("mlp.down_proj", hidden, ffn, config.bias)
    )


def _linear(name: str, out: int, into: int, bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), **({f"{name}.bias": (out,)} if bias else {})}


def _norm(name: str, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    kinds = ("weight",) if config.norm is Norm.rms else ("weight", "bias")
    return {f"{name}.{kind}": (config.hidden,) for kind in kinds}
