"""Attention of a Hugging Face transformers model whose packed row is split over ranks.

    register_sharded(cp.attention)                   # once; cp is a parallel.api.ContextParallel
    model = AutoModelForCausalLM.from_config(config, attn_implementation="longfold_sharded")
    cp.bind(layout, shape)                           # each batch; then every tensor is this rank's part of it
    model(input_ids=cp.shard(ids)[None], position_ids=cp.shard(positions)[None], use_cache=False)

Documents come from the bound layout, positions from `position_ids`: a rank's tokens need not lie next to each other.
docs/own_loop.md is a whole loop.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from kernels.mask_spec import UNBOUNDED, MaskSpec
from models.hf.transformers_attention import IDLE, known_reach

# `attention(q[t, H, D], k[t, Hkv, D], v[t, Hkv, Dv], mask=, softmax_scale=, softcap=, sink=) -> out[t, H, Dv]`
Attention = Callable[..., Tensor]
NAME = "longfold_sharded"


def register_sharded(attention: Attention, name: str = NAME) -> None:
    """Make `attn_implementation=name` mean `attention`, which computes one rank's tokens of a packed row.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, partial(attend_sharded, attention=attention))
    AttentionMaskInterface.register(name, mask_spec)


def attend_sharded(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    attention: Attention,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention call for one row: query [1, H, t, D], key, value [1, Hkv, t, ...] -> [1, t, H, Dv].

    Raises:
        ValueError: what a plan cannot honour: dropout, several rows, a cache, padding, another kind of mask, a tensor
            that attention does not know.
    """
    if dropout:
        raise ValueError(f"longfold has no attention dropout, and this model asks for {dropout}; set it to 0")
    if others.get("output_attentions"):
        raise ValueError("longfold never holds attention weights; leave output_attentions out")
    for name, other in others.items():
        if isinstance(other, Tensor) and name not in IDLE:
            raise ValueError(f"longfold's attention takes no {name}; documents come from the layout that cp.bind took")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"attention got {query.shape[0]} rows of {query.shape[2]} queries and {key.shape[2]} keys; give one packed "
            "row and use_cache=False"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask = MaskSpec(causal, sliding_window)
    if attention_mask is not None and attention_mask != mask:
        raise ValueError(
            f"the model's mask is ({attention_mask}), and its layer says ({mask}); use a model whose layers are causal "
            "or have a sliding window, and give no attention_mask"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attention(q, k, v, mask=mask, softmax_scale=scaling, softcap=softcap, sink=s_aux)
    return out[None], None


def mask_spec(
    mask_function: Callable[..., Any] | None = None, attention_mask: Tensor | None = None, **_: Any
) -> MaskSpec:
    """transformers' mask call: the mask inside a document. Documents themselves are the bound layout's.

    Raises:
        ValueError: padding, or a mask that is neither causal nor a sliding window.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("attention_mask hides tokens, and a packed row has its padding in the layout; leave it out")
    reach = (UNBOUNDED, 0) if mask_function is None else known_reach(mask_function)
    if reach is None or reach[1] not in (0, UNBOUNDED):
        raise ValueError("this model's mask is neither causal nor a sliding window; a sharded row needs one of them")
    before, after = reach
    return MaskSpec(after == 0, None if before == UNBOUNDED else before + 1)
