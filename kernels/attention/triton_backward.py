"""Backward of document-masked attention, without atomics: delta by rows, dq by query tiles, dk and dv by key tiles.

With p = exp(s - lse) and delta = rowsum(dout * out) - dlse: ds = p * (dout v^T - delta), dq = scale * ds k,
dk = scale * ds^T q, dv = p^T dout (FlashAttention-2, arXiv 2307.08691, section 3.1). out and lse may come from a larger
set of keys than this call's, whose gradients then simply add up.
"""

from __future__ import annotations

import triton.language as tl

from kernels.attention.triton_tiles import (
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


@jit(do_not_specialize=["T"])
def attention_delta(OUT, DOUT, LSE, DLSE, DELTA, LSE2, T, H, stride_ot, stride_oh, stride_dt, stride_dh, stride_lh,
                    stride_xh, stride_gh, stride_gt, WIDE: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
                    BLOCK_DV: tl.constexpr):  # fmt: skip
    """DELTA [H, T] = rowsum(DOUT * OUT) - DLSE and LSE2 [H, T] = LSE in base 2; 0 and +inf in rows without keys.

    DLSE may be None; stride_lh is LSE's, stride_xh DELTA's and LSE2's, stride_gh and stride_gt are DLSE's.
    exp2(s - inf) = 0, so rows without keys need no test afterwards.
    """
    program = tl.program_id(0)
    h = program % H
    first = program // H * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    live = rows < T
    at = h.to(tl.int64) * stride_xh + rows
    lse = tl.load(LSE + h.to(tl.int64) * stride_lh + rows, mask=live, other=-float("inf"))
    sees = lse != -float("inf")  # or is NaN, as its gradients then are
    out = load_rows(OUT + h.to(tl.int64) * stride_oh, first, stride_ot, live, True, DV, BLOCK_M, BLOCK_DV, WIDE)
    dout = load_rows(DOUT + h.to(tl.int64) * stride_dh, first, stride_dt, live, True, DV, BLOCK_M, BLOCK_DV, WIDE)
    out = out.to(tl.float32)
    # a row that only the sink fills has out 0 and perhaps a NaN in dout
    delta = tl.sum(tl.where(out == 0.0, 0.0, out * dout.to(tl.float32)), 1)
    if DLSE is not None:
        delta -= tl.load(DLSE + h.to(tl.int64) * stride_gh + rows.to(tl.int64) * stride_gt, mask=live, other=0.0)
    tl.store(DELTA + at, tl.where(sees, delta, 0.0), mask=live)
    tl.store(LSE2 + at, tl.where(sees, lse * LOG2E, float("inf")), mask=live)


@jit
def _dq_part(dq, q, dout, lse2, delta, K, V, K_TILES, V_TILES, Q_START, Q_END, hk, k_column, v_column, lo, hi, Tk,
             stride_kt, stride_vt, k_start, k_end, scale2, cap_in, cap2, LEFT: tl.constexpr, RIGHT: tl.constexpr,
             GAPS: tl.constexpr, CAPPED: tl.constexpr, WIDE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """One part of the loop over key tiles; dq [M, D] fp32, not yet scaled."""
    MASKED: tl.constexpr = LEFT or RIGHT
    cols = tl.arange(0, BLOCK_N)
    for first in tl.range(lo, hi, BLOCK_N):  # pyright: ignore[reportGeneralTypeIssues]
        alive = alive_rows(Q_START, Q_END, first, Tk, MASKED and GAPS, BLOCK_N)
        k = load_tile(K, K_TILES, hk, k_column, first, stride_kt, alive, MASKED, GAPS, D, BLOCK_N, BLOCK_D, WIDE)
        v = load_tile(V, V_TILES, hk, v_column, first, stride_vt, alive, MASKED, False, DV, BLOCK_N, BLOCK_DV, WIDE)
        stays = refetched(dout, first < Tk) if BLOCK_DV == 256 else dout  # narrower, it costs registers instead
        dp = tl.dot(stays, tl.trans(v), input_precision="ieee")  # before s, which leaves more registers
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED and not CAPPED:
            s = tl.where(seen_pairs(cols, k_start, k_end, first, LEFT, RIGHT), s, -float("inf"))
        if CAPPED:
            t = tanh(s * cap_in)
            p = tl.math.exp2(t * cap2 - lse2[:, None]) * (1.0 - t * t)
            if MASKED:
                p = tl.where(seen_pairs(cols, k_start, k_end, first, LEFT, RIGHT), p, 0.0)
            ds = p * (dp - delta[:, None])
        else:
            p = tl.math.exp2(s * scale2 - lse2[:, None])
            ds = p * (dp - delta[:, None])
        if MASKED and GAPS:  # p is 0 at keys that nobody sees, but their v may be NaN
            ds = tl.where(seen_pairs(cols, k_start, k_end, first, LEFT, RIGHT), ds, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@jit(do_not_specialize=["Tq", "Tk"])
def attention_dq(Q, K, V, K_TILES, V_TILES, DOUT, DQ, LSE2, DELTA, K_START, K_END, Q_START, Q_END, ORDER,
                 scale, scale2, cap_in, cap2, Tq, Tk, H, group,
                 stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dt, stride_dh, stride_gt,
                 stride_gh, stride_xh, SIGN: tl.constexpr, GAPS: tl.constexpr, CAPPED: tl.constexpr, ADD: tl.constexpr,
                 WIDE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """DQ [Tq, H, D] by query tiles; arguments as in `attention_forward` and `attention_delta`.

    scale: the signed softmax scale. cap2: the cap times log2(e). strides_g: of DQ. ADD: add to DQ.
    """
    program = tl.program_id(0)
    h = program % H
    hk = h // group
    first = tl.load(ORDER + program // H) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    live = rows < Tq
    alive = alive_rows(K_START, K_END, first, Tq, GAPS, BLOCK_M)
    K += hk.to(tl.int64) * stride_kh
    V += hk.to(tl.int64) * stride_vh
    k_column = hk * stride_kh
    v_column = hk * stride_vh
    q = load_rows(Q + h.to(tl.int64) * stride_qh, first, stride_qt, alive, True, D, BLOCK_M, BLOCK_D, WIDE)
    dout = load_rows(DOUT + h.to(tl.int64) * stride_dh, first, stride_dt, alive, True, DV, BLOCK_M, BLOCK_DV, WIDE)
    if SIGN != 1:
        q = (q * SIGN).to(q.dtype)
    lse2 = tl.load(LSE2 + h.to(tl.int64) * stride_xh + rows, mask=live, other=float("inf"))
    delta = tl.load(DELTA + h.to(tl.int64) * stride_xh + rows, mask=live, other=0.0)
    k_start = tl.load(K_START + rows, mask=live, other=0)
    k_end = tl.load(K_END + rows, mask=live, other=0)
    lo, full_lo, full_hi, hi = loop_parts(K_START, K_END, first, tl.minimum(first + BLOCK_M, Tq) - 1, BLOCK_N)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq = _dq_part(
        dq, q, dout, lse2, delta, K, V, K_TILES, V_TILES, Q_START, Q_END, hk, k_column, v_column, lo, full_lo, Tk,
        stride_kt, stride_vt, k_start, k_end, scale2, cap_in, cap2, True, True, GAPS, CAPPED, WIDE, D, DV, BLOCK_N,
        BLOCK_D, BLOCK_DV)  # fmt: skip
    dq = _dq_part(
        dq, q, dout, lse2, delta, K, V, K_TILES, V_TILES, Q_START, Q_END, hk, k_column, v_column, full_lo, full_hi, Tk,
        stride_kt, stride_vt, k_start, k_end, scale2, cap_in, cap2, False, False, GAPS, CAPPED, WIDE, D, DV, BLOCK_N,
        BLOCK_D, BLOCK_DV)  # fmt: skip
    dq = _dq_part(
        dq, q, dout, lse2, delta, K, V, K_TILES, V_TILES, Q_START, Q_END, hk, k_column, v_column, full_hi, hi, Tk,
        stride_kt, stride_vt, k_start, k_end, scale2, cap_in, cap2, False, True, GAPS, CAPPED, WIDE, D, DV, BLOCK_N,
        BLOCK_D, BLOCK_DV)  # fmt: skip
    # found again rather than kept: every register counts in the loops
    first = tl.load(ORDER + tl.program_id(0) // H, volatile=True) * BLOCK_M
    h = tl.program_id(0) % H
    store_rows(DQ + h.to(tl.int64) * stride_gh, first, Tq, stride_gt, dq * scale, None, ADD, D, BLOCK_M, BLOCK_D, WIDE)


@jit
def _dkdv_part(dk, dv, k, v, Q, DOUT, Q_TILES, DOUT_TILES, LSE2, DELTA, K_START, K_END, h, q_column, d_column, lo, hi,
               Tq, stride_qt, stride_dt, q_start, q_end, scale2, cap_in, cap2, LEFT: tl.constexpr, RIGHT: tl.constexpr,
               GAPS: tl.constexpr, CAPPED: tl.constexpr, WIDE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """One part of the loop over one head's query tiles; transposed, so that dk [N, D], dv [N, DV] grow in registers."""
    MASKED: tl.constexpr = LEFT or RIGHT
    cols = tl.arange(0, BLOCK_M)
    for first in tl.range(lo, hi, BLOCK_M):  # pyright: ignore[reportGeneralTypeIssues]
        alive = alive_rows(K_START, K_END, first, Tq, MASKED and GAPS, BLOCK_M)
        q = load_tile(Q, Q_TILES, h, q_column, first, stride_qt, alive, MASKED, GAPS, D, BLOCK_M, BLOCK_D, WIDE)
        dout = load_tile(
            DOUT, DOUT_TILES, h, d_column, first, stride_dt, alive, MASKED, GAPS, DV, BLOCK_M, BLOCK_DV, WIDE
        )
        if MASKED:
            lse2 = tl.load(LSE2 + first + cols, mask=first + cols < Tq, other=float("inf"))
            delta = tl.load(DELTA + first + cols, mask=first + cols < Tq, other=0.0)
        else:
            lse2 = tl.load(LSE2 + first + cols)
            delta = tl.load(DELTA + first + cols)
        s = tl.dot(k, tl.trans(q), input_precision="ieee")
        if MASKED and not CAPPED:
            s = tl.where(seen_pairs(cols, q_start, q_end, first, LEFT, RIGHT), s, -float("inf"))
        if CAPPED:
            t = tanh(s * cap_in)
            p = tl.math.exp2(t * cap2 - lse2[None, :])
            if MASKED:
                p = tl.where(seen_pairs(cols, q_start, q_end, first, LEFT, RIGHT), p, 0.0)
            slope = p * (1.0 - t * t)
        else:
            p = tl.math.exp2(s * scale2 - lse2[None, :])
            slope = p
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
        ds = slope * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@jit(do_not_specialize=["Tq", "Tk"])
def attention_dkdv(Q, K, V, Q_TILES, DOUT_TILES, DOUT, DK, DV_, LSE2, DELTA, K_START, K_END, Q_START, Q_END, ORDER,
                   scale, scale2, cap_in, cap2, Tq, Tk, Hkv, group,
                   stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dt, stride_dh, stride_gkt,
                   stride_gkh, stride_gvt, stride_gvh, stride_xh, SIGN: tl.constexpr, GAPS: tl.constexpr,
                   CAPPED: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                   BLOCK_DV: tl.constexpr):  # fmt: skip
    """DK [Tk, Hkv, D] and DV_ [Tk, Hkv, DV] by key tiles of BLOCK_N, over each query head of the key head's group.

    ORDER: which key tile the n-th program takes. SIGN multiplies k here, since q changes in the loop.
    """
    program = tl.program_id(0)
    hk = program % Hkv
    first = tl.load(ORDER + program // Hkv) * BLOCK_N
    rows = first + tl.arange(0, BLOCK_N)
    alive = alive_rows(Q_START, Q_END, first, Tk, GAPS, BLOCK_N)
    k = load_rows(K + hk.to(tl.int64) * stride_kh, first, stride_kt, alive, True, D, BLOCK_N, BLOCK_D, WIDE)
    v = load_rows(V + hk.to(tl.int64) * stride_vh, first, stride_vt, alive, True, DV, BLOCK_N, BLOCK_DV, WIDE)
    if SIGN != 1:
        k = (k * SIGN).to(k.dtype)
    q_start = tl.load(Q_START + rows, mask=rows < Tk, other=0)
    q_end = tl.load(Q_END + rows, mask=rows < Tk, other=0)
    lo, full_lo, full_hi, hi = loop_parts(Q_START, Q_END, first, tl.minimum(first + BLOCK_N, Tk) - 1, BLOCK_M)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(group):
        h = hk * group + member
        Q_h = Q + h.to(tl.int64) * stride_qh
        DOUT_h = DOUT + h.to(tl.int64) * stride_dh
        LSE2_h = LSE2 + h.to(tl.int64) * stride_xh
        DELTA_h = DELTA + h.to(tl.int64) * stride_xh
        q_column = h * stride_qh
        d_column = h * stride_dh
        dk, dv = _dkdv_part(
            dk, dv, k, v, Q_h, DOUT_h, Q_TILES, DOUT_TILES, LSE2_h, DELTA_h, K_START, K_END, h, q_column, d_column, lo,
            full_lo, Tq, stride_qt, stride_dt, q_start, q_end, scale2, cap_in, cap2, True, True, GAPS, CAPPED, WIDE, D,
            DV, BLOCK_M, BLOCK_D, BLOCK_DV)  # fmt: skip
        dk, dv = _dkdv_part(
            dk, dv, k, v, Q_h, DOUT_h, Q_TILES, DOUT_TILES, LSE2_h, DELTA_h, K_START, K_END, h, q_column, d_column,
            full_lo, full_hi, Tq, stride_qt, stride_dt, q_start, q_end, scale2, cap_in, cap2, False, False, GAPS,
            CAPPED, WIDE, D, DV, BLOCK_M, BLOCK_D, BLOCK_DV)  # fmt: skip
        dk, dv = _dkdv_part(
            dk, dv, k, v, Q_h, DOUT_h, Q_TILES, DOUT_TILES, LSE2_h, DELTA_h, K_START, K_END, h, q_column, d_column,
            full_hi, hi, Tq, stride_qt, stride_dt, q_start, q_end, scale2, cap_in, cap2, False, True, GAPS, CAPPED,
            WIDE, D, DV, BLOCK_M, BLOCK_D, BLOCK_DV)  # fmt: skip
    # found again rather than kept: every register counts in the loops
    first = tl.load(ORDER + tl.program_id(0) // Hkv, volatile=True) * BLOCK_N
    hk = tl.program_id(0) % Hkv
    store_rows(
        DK + hk.to(tl.int64) * stride_gkh, first, Tk, stride_gkt, dk * scale, None, ADD, D, BLOCK_N, BLOCK_D, WIDE
    )
    store_rows(DV_ + hk.to(tl.int64) * stride_gvh, first, Tk, stride_gvt, dv, None, ADD, DV, BLOCK_N, BLOCK_DV, WIDE)
