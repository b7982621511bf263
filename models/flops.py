"""Closed-form sizes and work of a decoder: parameters, and the matrix-product FLOPs of a training step."""

from collections.abc import Mapping
from dataclasses import dataclass

from kernels.mask_spec import MaskSpec
from models.config import Mlp, ModelConfig, Norm, Positions


@dataclass(frozen=True)
class ParameterCount:
    """`embedding` holds the token and position tables and an untied head; `non_embedding` the layers and final norm."""

    embedding: int
    non_embedding: int

    @property
    def total(self) -> int:
        return self.embedding + self.non_embedding


def layer_matmul_parameters(config: ModelConfig) -> int:
    """Weights of one layer's linear maps, without biases: 2 (H + Hkv) D hidden + (3 if gated, else 2) ffn hidden."""
    attention = 2 * (config.heads + config.kv_heads) * config.head_dim * config.hidden
    mlp = (3 if config.mlp is Mlp.gated else 2) * config.ffn * config.hidden
    return attention + mlp


def parameter_count(config: ModelConfig) -> ParameterCount:
    """The number of trainable values, as `Decoder` makes them. A tied head is counted once, as an embedding."""
    embedding = config.vocab_size * config.hidden * (1 if config.tied_embeddings else 2)
    if config.positions is Positions.learned:
        embedding += config.max_positions * config.hidden
    norm = config.hidden * (1 if config.norm is Norm.rms else 2)
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = layer_matmul_parameters(config) + 2 * norm
    if config.bias or config.qkv_bias:
        layer += query + 2 * key
    if config.bias:
        layer += config.hidden + config.ffn * (2 if config.mlp is Mlp.gated else 1) + config.hidden
    if config.qk_norm:
        layer += 2 * config.head_dim
    if config.sink:
        layer += config.heads
    return ParameterCount(embedding, config.layers * layer + norm)


def flops_per_step(config: ModelConfig, tokens: int, pairs: Mapping[MaskSpec, int]) -> int:
    """FLOPs of the matrix products of one forward and backward over `tokens` tokens, padding included.

        6 * tokens * (layers * layer_matmul_parameters + vocab_size * hidden)  +  sum over layers of 12 * pairs * H * D

    A product forward costs 2 FLOPs a weight and token, its two gradients 4; QK^T and PV cost 4 pairs H D forward and
    8 backward. `pairs[mask]` counts the allowed (query, key) pairs of the step in a layer of that mask (see
    `MaskSpec.pairs`), so document masks and windows are credited with what they need and no more. The head counts, tied
    or not; looking up embeddings is free; neither recomputation (activations, the chunked loss, flash attention's
    logits) nor padding inside a kernel's tiles counts. (PaLM, arXiv 2204.02311, appendix B, with masks.)

    Raises ValueError if the pairs of one of the config's masks are missing.
    """
    attention = 0
    for mask in config.layer_masks():
        if mask not in pairs:
            counted = "; ".join(str(one) for one in pairs) or "none"
            raise ValueError(
                f"a layer has the mask ({mask}), and pairs were counted for: {counted}; count those of each distinct "
                f"mask of config.layer_masks()"
            )
        attention += 12 * pairs[mask] * config.heads * config.head_dim
    weights = config.layers * layer_matmul_parameters(config) + config.vocab_size * config.hidden
    return 6 * tokens * weights + attention


def flops_per_token(config: ModelConfig, tokens: int, pairs: Mapping[MaskSpec, int]) -> float:
    """`flops_per_step` over its tokens. Raises ValueError if there are none."""
    if tokens < 1:
        raise ValueError(f"tokens={tokens}: FLOPs per token need at least 1 token")
    return flops_per_step(config, tokens, pairs) / tokens
