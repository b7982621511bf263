"""Forward of document-masked attention: one program per query tile and head, online softmax over key tiles.

(FlashAttention-2, arXiv 2307.08691, on staircase masks; tiles launch in a given order, heaviest first.)
"""

from __future__ import annotations

import triton.language as tl

from kernels.attention.triton_tiles import (
    LN2,
    LOG2E,
    alive_rows,
    load_rows,
    load_tile,
    loop_parts,
    refetched,
    seen_pairs,
    store_rows,
    tanh,
)
from kernels.compile.runtime import jit


@jit
def _forward_part(acc, l_i, m_i, q, K, V, K_TILES, V_TILES, Q_START, Q_END, hk, k_column, v_column, lo, hi, Tk,
                  stride_kt, stride_vt, k_start, k_end, scale2, cap_in, cap, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                  GAPS: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr, WIDE: tl.constexpr, LATE: tl.constexpr,
                  D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                  BLOCK_DV: tl.constexpr):  # fmt: skip
    """One part of the loop over key tiles, in fp32: acc [M, DV], l_i [M, 8], m_i [M] in base 2 (raw logits if EXACT).

    Summing p to 8 columns, not to 1, stays within a thread of the matrix layout.
    """
    MASKED: tl.constexpr = LEFT or RIGHT
    cols = tl.arange(0, BLOCK_N)
    for first in tl.range(lo, hi, BLOCK_N):  # pyright: ignore[reportGeneralTypeIssues]
        alive = alive_rows(Q_START, Q_END, first, Tk, MASKED and GAPS, BLOCK_N)
        k = load_tile(K, K_TILES, hk, k_column, first, stride_kt, alive, MASKED, False, D, BLOCK_N, BLOCK_D, WIDE)
        v = load_tile(V, V_TILES, hk, v_column, first, stride_vt, alive, MASKED, GAPS, DV, BLOCK_N, BLOCK_DV, WIDE)
        s = tl.dot(refetched(q, first < Tk), tl.trans(k), input_precision="ieee")
        if CAPPED:
            s = cap * tanh(s * cap_in)
        if MASKED:
            s = tl.where(seen_pairs(cols, k_start, k_end, first, LEFT, RIGHT), s, -float("inf"))
        top = tl.max(s, 1)
        m_new = tl.maximum(m_i, top if EXACT else top * scale2)
        m_safe = tl.where(m_new == -float("inf"), 0.0, m_new) if MASKED else m_new
        if EXACT:  # a fused multiply-add misses 0 at the maximum by the rounding of m, which is large for huge logits
            p = tl.math.exp2((s - m_safe[:, None]) * scale2)
            keep = tl.math.exp2((m_i - m_safe) * scale2)
        else:
            p = tl.math.exp2(s * scale2 - m_safe[:, None])
            keep = tl.math.exp2(m_i - m_safe)
        acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        if not LATE or first < Tk:  # always true: a branch keeps the sum behind the product, which runs meanwhile
            l_i = l_i * keep[:, None] + tl.sum(p.reshape(p.shape[0], BLOCK_N // 8, 8), 1)
        m_i = m_new
    return acc, l_i, m_i


@jit(do_not_specialize=["Tq", "Tk"])
def attention_forward(Q, K, V, K_TILES, V_TILES, OUT, LSE, SINK, K_START, K_END, Q_START, Q_END, ORDER,
                      scale2, cap_in, cap, Tq, Tk, H, group,
                      stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh, stride_lh,
                      SIGN: tl.constexpr, GAPS: tl.constexpr, CAPPED: tl.constexpr, ADD: tl.constexpr,
                      EXACT: tl.constexpr, WIDE: tl.constexpr, LATE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                      BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                      BLOCK_DV: tl.constexpr):  # fmt: skip
    """OUT [Tq, H, DV] and LSE [H, Tq] (natural, fp32) of Q [Tq, H, D] over K, V [Tk, Hkv, D or DV].

    Args:
        K_TILES, V_TILES: tensor descriptors of the same keys as `load_tile` takes them, or None.
        SINK: one logit per head, or None. Not together with ADD.
        K_START, K_END [Tq], Q_START, Q_END [Tk]: the mask, int32. ORDER int32: which query tile the n-th program takes.
        scale2: factor from q.k, or from the capped logit, to base-2 logits, positive.
        cap_in, cap: with CAPPED a logit is cap * tanh(cap_in * q.k).
        group: H // Hkv. Strides are in elements, of tokens and heads.
        SIGN: -1, 0 or 1, multiplies q, so that the scale is positive.
        GAPS: keys that no query sees may stand inside the mask; they may be NaN.
        ADD: merge with the OUT (fp32) and LSE that are there, which cover other keys.
        EXACT: logits of any size; otherwise up to 1e9 (saves an instruction per pair). WIDE: compute in fp32.
        LATE: sum the probabilities of a tile while its second product runs, which holds registers for longer.
    """
    program = tl.program_id(0)
    h = program % H
    hk = h // group
    first = tl.load(ORDER + program // H) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    live = rows < Tq
    K += hk.to(tl.int64) * stride_kh
    V += hk.to(tl.int64) * stride_vh
    k_column = hk * stride_kh
    v_column = hk * stride_vh
    q = load_rows(Q + h.to(tl.int64) * stride_qh, first, stride_qt, live, True, D, BLOCK_M, BLOCK_D, WIDE)
    if SIGN != 1:
        q = (q * SIGN).to(q.dtype)
    k_start = tl.load(K_START + rows, mask=live, other=0)
    k_end = tl.load(K_END + rows, mask=live, other=0)
    lo, full_lo, full_hi, hi = loop_parts(K_START, K_END, first, tl.minimum(first + BLOCK_M, Tq) - 1, BLOCK_N)
    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M, 8], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    acc, l_i, m_i = _forward_part(
        acc, l_i, m_i, q, K, V, K_TILES, V_TILES, Q_START, Q_END, hk, k_column, v_column, lo, full_lo, Tk,
        stride_kt, stride_vt, k_start, k_end, scale2, cap_in, cap, True, True, GAPS, CAPPED, EXACT, WIDE, LATE, D,
        DV, BLOCK_N, BLOCK_D, BLOCK_DV)  # fmt: skip
    acc, l_i, m_i = _forward_part(
        acc, l_i, m_i, q, K, V, K_TILES, V_TILES, Q_START, Q_END, hk, k_column, v_column, full_lo, full_hi, Tk,
        stride_kt, stride_vt, k_start, k_end, scale2, cap_in, cap, False, False, GAPS, CAPPED, EXACT, WIDE, LATE, D,
        DV, BLOCK_N, BLOCK_D, BLOCK_DV)  # fmt: skip
    acc, l_i, m_i = _forward_part(
        acc, l_i, m_i, q, K, V, K_TILES, V_TILES, Q_START, Q_END, hk, k_column, v_column, full_hi, hi, Tk,
        stride_kt, stride_vt, k_start, k_end, scale2, cap_in, cap, False, True, GAPS, CAPPED, EXACT, WIDE, LATE, D,
        DV, BLOCK_N, BLOCK_D, BLOCK_DV)  # fmt: skip
    l_i = tl.sum(l_i, 1)
    if EXACT:
        m_i *= scale2
    LSE += h.to(tl.int64) * stride_lh + rows
    OUT += h.to(tl.int64) * stride_oh
    weight = None  # of what is in OUT
    if ADD or SINK is not None:
        if ADD:
            before = tl.load(LSE, mask=live, other=-float("inf"))
        else:
            before = tl.zeros([BLOCK_M], tl.float32) + tl.load(SINK + h).to(tl.float32)
        other = before * LOG2E
        top = tl.maximum(m_i, other)
        base = tl.where(top == -float("inf"), 0.0, top)
        mine = tl.math.exp2(m_i - base)
        theirs = tl.math.exp2(other - base)
        total = l_i * mine + theirs
        some = tl.where(total == 0, 1.0, total)  # a NaN stays one
        inverse = 1.0 / some
        out = acc * (mine * inverse)[:, None]
        lse = (base + tl.math.log2(some)) * LN2
        lse = tl.where(l_i == 0.0, before, lse)  # to the bit, in rows without keys here
        if ADD:
            weight = theirs * inverse
    else:
        some = tl.where(l_i == 0, 1.0, l_i)  # without keys acc is 0 and m_i -inf
        out = acc * (1.0 / some)[:, None]
        lse = (m_i + tl.math.log2(some)) * LN2
    tl.store(LSE, lse, mask=live)
    store_rows(OUT, first, Tq, stride_ot, out, weight, ADD, DV, BLOCK_M, BLOCK_DV, WIDE)
