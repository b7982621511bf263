"""The public face of the kernels: `attention`, `merge`, `IntervalMask`, the table of backends, and a varlen shim."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from kernels.arguments import check_count, check_cumulative, check_flag, is_number, spelled
from kernels.attention.backends import BACKENDS, choose_backend
from kernels.attention.checks import bands_of, check_sink, check_tensors
from kernels.attention.operator import attention_op
from kernels.attention.problem import Problem
from kernels.mask import IntervalMask
from kernels.merge.merge import merge

__all__ = ["BACKENDS", "IntervalMask", "attention", "flash_attn_varlen_func", "merge"]


def attention(
    q: Float[Tensor, "Tq H D"],
    k: Float[Tensor, "Tk Hkv D"],
    v: Float[Tensor, "Tk Hkv Dv"],
    mask: IntervalMask | Sequence[IntervalMask],
    *,
    softmax_scale: float | int | None = None,
    softcap: float | int | None = None,
    sink: Float[Tensor, " H"] | None = None,
    backend: str = "auto",
) -> tuple[Float[Tensor, "Tq H Dv"], Float[Tensor, "H Tq"]]:
    """Softmax attention of packed queries over the keys that `mask` shows them.

    out[i, h] = sum_j p[i, j] v[j, g] with p[i, j] = exp(s[i, j] - lse[h, i]), g = h // (H // Hkv) and
    s[i, j] = softmax_scale * q[i, h] . k[j, g]. (Tiled form and its backward: FlashAttention-2, arXiv 2307.08691.)

    Args:
        q, k, v: packed tokens of one floating dtype; any strides; D and Dv from 1 to 256; Hkv divides H.
        mask: an IntervalMask, or a list of disjoint ones (bands). Tokens of q and k after the mask's last are padding:
            never read as numbers, out 0, lse -inf, gradients 0. A NaN in a live token may reach other documents.
        softmax_scale: factor of the logits, 1 / sqrt(D) by default.
        softcap: c > 0 replaces each scaled logit s by c * tanh(s / c).
        sink: one more logit per head, unscaled and uncapped, that takes probability and has no value. lse includes it;
            with several bands it counts once.
        backend: a key of BACKENDS, or "auto".

    Returns:
        out [Tq, H, Dv] in q's dtype and lse [H, Tq], natural log, fp32 (fp64 for fp64 inputs). A query that sees no key
        has out 0 and lse -inf (the sink's logit if there is a sink) and zero gradients.
        Both results are differentiable in q, k, v and sink, once.

    Raises:
        ValueError: inputs that do not fit together, overlapping bands, or a backend that is unknown or not able.
    """
    masks = bands_of(mask)
    if torch.compiler.is_compiling():  # the operator checks its inputs when it runs
        sides = [side for mask in masks for side in mask.sides]
        out, lse = attention_op(q, k, v, sink, sides, softmax_scale, softcap, backend)
        return out.to(q.dtype), lse
    problem = Problem.checked(q, k, v, masks, softmax_scale, softcap, sink)
    with torch.autocast(q.device.type, enabled=False):  # the arithmetic's precision is the contract's, not the caller's
        return choose_backend(backend, q).attention(problem)


def flash_attn_varlen_func(
    q: Float[Tensor, "Tq H D"],
    k: Float[Tensor, "Tk Hkv D"],
    v: Float[Tensor, "Tk Hkv Dv"],
    cu_seqlens_q: Shaped[Tensor, " n"] | Sequence[int],
    cu_seqlens_k: Shaped[Tensor, " n"] | Sequence[int],
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | int = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
    s_aux: Float[Tensor, " H"] | None = None,
    learnable_sink: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "Tq H Dv"] | tuple[Float[Tensor, "Tq H Dv"], Float[Tensor, "H Tq"], None]:
    """The varlen call of flash-attn 2, with its meaning: bottom-right causal, `window_size` (left, right), -1 for all.

    Keyword-only arguments are those of its later versions: the sinks work (either name), the others are refused.

    Returns out, or (out, lse [H, Tq], None) with `return_attn_probs`; lse is differentiable here. Every backend is
    deterministic, so `deterministic` changes nothing. Tokens after cu_seqlens[-1] are padding: out 0. A training loop
    that calls this in several layers should build one IntervalMask and call `attention`.

    Raises:
        ValueError: dropout, or another argument that is not supported and set; a max_seqlen below the longest document
            (checked on lists and CPU tensors); and what `attention` refuses.
    """
    check_tensors(q, k, v)
    if not is_number(dropout_p) or dropout_p != 0.0:
        raise ValueError(f"dropout_p={spelled(dropout_p)} is not supported; pass 0 and drop on the output instead")
    for name, flag in (("causal", causal), ("deterministic", deterministic), ("return_attn_probs", return_attn_probs)):
        check_flag(name, flag)
    refused = {
        "alibi_slopes": alibi_slopes, "block_table": block_table, "seqused_q": seqused_q, "seqused_k": seqused_k,
        "leftpad_k": leftpad_k, "qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale,
        "out": out,
    }  # fmt: skip
    for name, value in refused.items():
        if value is not None:
            raise ValueError(f"{name} is not supported; pass None")
    if s_aux is not None and learnable_sink is not None:
        raise ValueError("s_aux and learnable_sink are two names of the sink; pass one")
    for name, sink in (("s_aux", s_aux), ("learnable_sink", learnable_sink)):
        if sink is not None:
            check_sink(name, sink, q)
    for name, cu, longest in (("q", cu_seqlens_q, max_seqlen_q), ("k", cu_seqlens_k, max_seqlen_k)):
        check_cumulative(f"cu_seqlens_{name}", cu)
        check_count(f"max_seqlen_{name}", longest)
        if not isinstance(cu, Tensor) or cu.device.type == "cpu":
            lengths = [int(b) - int(a) for a, b in pairwise(cu)]
            if lengths and max(lengths) > longest:
                raise ValueError(f"max_seqlen_{name} is {longest}, but a document has {max(lengths)} tokens; pass that")
    sides = window_size if isinstance(window_size, (tuple, list)) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) for side in sides):
        raise ValueError(f"window_size must be (left, right) in whole tokens, -1 for all, not {spelled(window_size)}")
    if softcap is not None and not (is_number(softcap) and softcap >= 0):
        raise ValueError(f"softcap must be a positive number, or 0 for no cap, not {spelled(softcap)}")
    left, right = sides
    mask = IntervalMask.from_cu_seqlens(
        cu_seqlens_q,
        cu_seqlens_k,
        causal=causal,
        window=(left, right),
        device=q.device,
        total_q=q.shape[0],
        total_k=k.shape[0],
    )
    sink = learnable_sink if s_aux is None else s_aux
    result, lse = attention(q, k, v, mask, softmax_scale=softmax_scale, softcap=softcap or None, sink=sink)
    return (result, lse, None) if return_attn_probs else result
