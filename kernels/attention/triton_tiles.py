"""What the attention kernels share on the device: loading tiles, the three parts of a tile's loop, rounding.

A tile's loop over the other side runs in three parts: up to where every row has begun (left-masked), the middle, which
every row sees whole (no mask arithmetic), and from where the first row ends (right-masked).
"""

from __future__ import annotations

import triton.language as tl

from kernels.compile.runtime import jit

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@jit
def loop_parts(START, END, first, last, BLOCK: tl.constexpr):
    """(lo, full_lo, full_hi, hi) of rows first..last; the parts are [lo, full_lo), [full_lo, full_hi), [full_hi, hi).

    START, END int32: each row's interval on the other side. lo, full_lo, full_hi are multiples of BLOCK unless equal to
    hi. In the right part every row has begun, so only END can mask.
    """
    begin = tl.load(START + first)
    hi = tl.load(END + last)
    lo = tl.where(hi > begin, begin // BLOCK * BLOCK, hi)
    full_lo = tl.minimum((tl.load(START + last) + BLOCK - 1) // BLOCK * BLOCK, hi)
    full_lo = tl.maximum(full_lo, lo)
    full_hi = tl.maximum(tl.load(END + first) // BLOCK * BLOCK, full_lo)
    return lo, full_lo, full_hi, hi


@jit
def load_rows(X, first, stride, alive, MASKED: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
              BLOCK_D: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Rows first..first+BLOCK of X [n, D] as [BLOCK, BLOCK_D]; 0 beyond D and, if MASKED, in rows not alive.

    WIDE casts to fp32 at once: the interpreter computes bf16 on raw bits.
    """
    rows = tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK_D)
    at = X + tl.cast(first, tl.int64) * stride + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    if MASKED and D != BLOCK_D:
        x = tl.load(at, mask=alive[:, None] & (cols < D)[None, :], other=0.0)
    elif MASKED:
        x = tl.load(at, mask=alive[:, None], other=0.0)
    elif D != BLOCK_D:
        x = tl.load(at, mask=(cols < D)[None, :], other=0.0)
    else:
        x = tl.load(at)
    if WIDE:
        x = x.to(tl.float32)
    return x


@jit
def load_tile(X, TILES, head, column, first, stride, alive, MASKED: tl.constexpr, GAPS: tl.constexpr, D: tl.constexpr,
              BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """`load_rows` of one head, through the tensor descriptor TILES where there is one and no row must be left out.

    A descriptor fills what lies outside with 0. Where D fills the tile it is of [n, columns], the head beginning at
    `column`, which takes fewer instructions; elsewhere of [heads, n, D]. With GAPS a masked tile may hold rows that
    nobody sees, which may be NaN, so it goes by pointers, row by row.
    """
    if TILES is not None and not (MASKED and GAPS):
        if D == BLOCK_D:
            x = TILES.load([first, column])
        else:
            x = TILES.load([head, first, 0]).reshape(BLOCK, BLOCK_D)
        if WIDE:
            x = x.to(tl.float32)
    else:
        x = load_rows(X, first, stride, alive, MASKED, D, BLOCK, BLOCK_D, WIDE)
    return x


@jit
def alive_rows(START, END, first, n, GAPS: tl.constexpr, BLOCK: tl.constexpr):
    """Which rows first..first+BLOCK may be read as numbers: those below n and, with GAPS, with a non-empty interval."""
    at = first + tl.arange(0, BLOCK)
    alive = at < n
    if GAPS:
        alive &= tl.load(START + at, mask=alive, other=0) < tl.load(END + at, mask=alive, other=0)
    return alive


@jit
def store_rows(X, first, n, stride, value, weight, ADD: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
               BLOCK_D: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Write value [BLOCK, BLOCK_D] to rows first..n and columns below D of X.

    ADD: plus what is there, times weight [BLOCK] unless that is None; where it is 0, X may hold anything. What is there
    takes registers, so it is read in parts of 64 columns.
    """
    if ADD and BLOCK_D > 64:
        half: tl.constexpr = BLOCK_D // 2
        left, right = value.reshape(BLOCK, 2, half).permute(0, 2, 1).split()
        store_rows(X, first, n, stride, left, weight, ADD, D, BLOCK, half, WIDE)
        store_rows(X + half, first, n, stride, right, weight, ADD, D - half, BLOCK, half, WIDE)
    else:
        rows = tl.arange(0, BLOCK)
        cols = tl.arange(0, BLOCK_D)
        at = X + tl.cast(first, tl.int64) * stride + rows.to(tl.int64)[:, None] * stride + cols[None, :]
        inside = (first + rows < n)[:, None]
        if D < BLOCK_D:
            inside &= (cols < D)[None, :]
        if ADD:
            there = tl.load(at, mask=inside, other=0.0)
            if weight is not None:
                there = tl.where((weight == 0)[:, None], 0.0, there * weight[:, None])
            value += there
        if WIDE and X.dtype.element_ty == tl.bfloat16:
            value = round_to_bf16(value)
        tl.store(at, value.to(X.dtype.element_ty), mask=inside)


@jit
def round_to_bf16(x):
    """fp32 rounded to nearest even at bf16's precision by integer arithmetic; the interpreter's cast truncates."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x == x, rounded.to(tl.uint32).to(tl.float32, bitcast=True), x)


@jit
def tanh(x):
    """tanh to fp32's absolute precision; exp2 overflows to inf and underflows to 0 in the right places."""
    return 1.0 - 2.0 / (1.0 + tl.math.exp2(x * (2.0 * LOG2E)))


@jit
def seen_pairs(cols, start, end, first, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Which of the columns first + cols lie in each row's [start, end); LEFT and RIGHT say which ends can mask."""
    if LEFT and RIGHT:
        seen = (cols[None, :] >= (start - first)[:, None]) & (cols[None, :] < (end - first)[:, None])
    elif LEFT:
        seen = cols[None, :] >= (start - first)[:, None]
    else:
        seen = cols[None, :] < (end - first)[:, None]
    return seen


@jit
def refetched(x, true):
    """x, an operand of a product that stays the same through a loop; `true` is a condition that the loop always meets.

    fp32 products run on plain units, and the compiler would hold the whole operand in registers through the loop, which
    at wide heads are not there; a select in the loop makes it read the operand from shared memory each time.
    """
    if x.dtype == tl.float32:
        x = tl.where(true, x, 0.0)
    return x
