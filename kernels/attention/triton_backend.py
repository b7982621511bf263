"""Host side of the Triton attention: launches, both directions, and the accumulate form for rounds of a schedule.

`forward_into` and `backward_into` take one mask and write into given buffers; with `add` they merge into, or add to,
what is there, so that rounds of a schedule and bands of a mask need no separate pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.arguments import INT32_MAX
from kernels.attention.autograd import Gradients, Passes, Saved, differentiable
from kernels.attention.problem import Problem, adjacent, is_adjacent
from kernels.attention.rounds import Rounds, Stats
from kernels.attention.triton_backward import attention_delta, attention_dkdv, attention_dq
from kernels.attention.triton_forward import attention_forward
from kernels.compile.runtime import interpreted, on_device_of, target_name
from kernels.compile.tiling import Kernel, Tile, choose_tile, late_sum, padded_width, tile_order, use_descriptors
from kernels.merge.merge import sink_gradient

LOG2E = math.log2(math.e)
DELTA_ROWS = 32  # rows per program of the delta kernel


def attention_triton(problem: Problem) -> tuple[Tensor, Tensor]:
    """(out [Tq, H, Dv] in q's dtype, lse [H, Tq] fp32) of `kernels.api.attention`; fp32, fp16 and bf16 inputs."""
    return differentiable(PASSES, problem)


def _forward(problem: Problem) -> tuple[Tensor, Tensor]:
    problem = _readable(problem)
    q, sink, covered, one = problem.q, problem.sink, problem.covered, len(problem.masks) == 1
    H = q.shape[1]
    out = q.new_empty(q.shape[0], H, problem.v.shape[2], dtype=q.dtype if one else torch.float32)
    lse = q.new_empty(H, q.shape[0], dtype=torch.float32)
    if one:
        out[covered:] = 0
        lse[:, covered:] = -math.inf
        forward_into(problem, out, lse)
    else:
        out.zero_()
        lse.fill_(-math.inf)
        if sink is not None:
            lse[:, :covered] = sink[:, None]  # a partial result of the sink alone
        for band in problem.bands():
            forward_into(band, out, lse, add=True)
    return out.to(q.dtype), lse


def _backward(saved: Saved, dout: Tensor | None, dlse: Tensor | None, need_q: bool, need_kv: bool) -> Gradients:
    problem, out, lse = _readable(saved.problem), saved.out, saved.lse
    q, k, v, masks, covered = problem.q, problem.k, problem.v, problem.masks, problem.covered
    dout = torch.zeros_like(out) if dout is None else adjacent(dout)
    delta, lse2 = delta_of(out, dout, lse, dlse, covered)
    one = len(masks) == 1
    covered_q, covered_k = (masks[0].Tq, masks[0].Tk) if one else (0, 0)
    dq = _gradient_buffer(q, covered_q, one) if need_q else None
    dk, dv = (_gradient_buffer(x, covered_k, one) if need_kv else None for x in (k, v))
    for band in problem.bands():
        backward_into(band, dout, delta, lse2, dq, dk, dv, add=not one)
    dq, dk, dv = (None if grad is None else grad.to(q.dtype) for grad in (dq, dk, dv))
    dsink = None if problem.sink is None else sink_gradient(problem.sink, lse[:, :covered], delta[:, :covered])
    return dq, dk, dv, dsink


PASSES = Passes(_forward, _backward, wide=False)


def forward_into(
    problem: Problem, out: Float[Tensor, "Tq H Dv"], lse: Float[Tensor, "H Tq"], add: bool = False
) -> None:
    """Attention of the problem's one mask into rows [0, mask.Tq) of `out` and `lse` (natural, fp32), and no others.

    With `add`, out (fp32) and lse hold a result over other keys, and become the result over both; where lse is -inf,
    out may hold anything. The last dims of all tensors have stride 1.

    Raises:
        ValueError: `add` with a sink, which would count once for each call, or into an `out` that is not fp32; a last
            dim of another stride.
    """
    q, k, v, mask, softcap, sink = problem.q, problem.k, problem.v, problem.mask, problem.softcap, problem.sink
    _require_adjacent(q=q, k=k, v=v, out=out, lse=lse)
    if add and (sink is not None or out.dtype != torch.float32):
        raise ValueError(f"add needs an fp32 out and no sink, but out is {out.dtype}; begin with out 0 and lse = sink")
    if mask.Tq == 0:
        return
    sink = None if sink is None else sink.contiguous()
    call = _Call("fwd", problem)
    k_tiles, v_tiles = (call.descriptor(x, mask.Tk, call.tile.block_n) for x in (k, v))
    with on_device_of(q):
        attention_forward[call.grid("q")](
            q, k, v, k_tiles, v_tiles, out, lse, sink, *call.sides, call.order("q"),
            LOG2E if softcap is not None else call.scale2, call.cap_in, float(softcap or 0), mask.Tq, mask.Tk,
            q.shape[1], q.shape[1] // k.shape[1],
            *_strides(q), *_strides(k), *_strides(v), *_strides(out), lse.stride(0),
            ADD=add, EXACT=q.dtype == torch.float32, LATE=late_sum(call.target), **call.constants(),
        )  # fmt: skip


def delta_of(
    out: Float[Tensor, "Tq H Dv"],
    dout: Float[Tensor, "Tq H Dv"],
    lse: Float[Tensor, "H Tq"],
    dlse: Float[Tensor, "H Tq"] | None,
    covered: int,
) -> tuple[Float[Tensor, "H n"], Float[Tensor, "H n"]]:
    """(delta, lse2) of rows [0, covered), as `backward_into` takes them: rowsum(dout * out) - dlse, and lse in base 2.

    Both are 0 and +inf in rows without keys. n is `covered` rounded up, so that rows start aligned.

    Raises:
        ValueError: a last dim of out, dout or lse whose stride is not 1.
    """
    _require_adjacent(out=out, dout=dout, lse=lse)
    H, width = out.shape[1], -(-covered // 16) * 16
    delta, lse2 = (out.new_empty(H, width, dtype=torch.float32) for _ in range(2))
    if covered:
        grid = (-(-covered // DELTA_ROWS) * H,)
        gradient = (0, 0) if dlse is None else dlse.stride()
        with on_device_of(out):
            attention_delta[grid](
                out, dout, lse, dlse, delta, lse2, covered, H, *_strides(out), *_strides(dout), lse.stride(0), width,
                *gradient, WIDE=interpreted(), DV=out.shape[2], BLOCK_M=DELTA_ROWS, BLOCK_DV=padded_width(out.shape[2]),
            )  # fmt: skip
    return delta, lse2


def backward_into(
    problem: Problem,
    dout: Float[Tensor, "Tq H Dv"],
    delta: Float[Tensor, "H n"],
    lse2: Float[Tensor, "H n"],
    dq: Float[Tensor, "Tq H D"] | None,
    dk: Float[Tensor, "Tk Hkv D"] | None,
    dv: Float[Tensor, "Tk Hkv Dv"] | None,
    add: bool = False,
) -> None:
    """Gradients of the problem's one mask into rows [0, mask.Tq) of dq and [0, mask.Tk) of dk and dv (both or neither).

    delta and lse2 come from `delta_of` on the merged out and lse of all keys. With `add` the gradients are added to
    what is there (fp32 buffers). Last dims have stride 1.

    Raises:
        ValueError: `add` to buffers that are not fp32, or a last dim of another stride.
    """
    q, k, v, mask, scale = problem.q, problem.k, problem.v, problem.mask, problem.scale
    _require_adjacent(q=q, k=k, v=v, dout=dout, delta=delta, lse2=lse2, dq=dq, dk=dk, dv=dv)
    narrow = [x.dtype for x in (dq, dk, dv) if x is not None and x.dtype != torch.float32]
    if add and narrow:
        raise ValueError(f"add needs fp32 gradients, but there are some in {narrow[0]}; cast them once, at the end")
    if dq is not None and mask.Tq:
        call = _Call("dq", problem)
        k_tiles, v_tiles = (call.descriptor(x, mask.Tk, call.tile.block_n) for x in (k, v))
        with on_device_of(q):
            attention_dq[call.grid("q")](
                q, k, v, k_tiles, v_tiles, dout, dq, lse2, delta, *call.sides, call.order("q"),
                scale, call.scale2, call.cap_in, call.cap2, mask.Tq, mask.Tk, q.shape[1], q.shape[1] // k.shape[1],
                *_strides(q), *_strides(k), *_strides(v), *_strides(dout), *_strides(dq), lse2.stride(0),
                ADD=add, **call.constants(),
            )  # fmt: skip
    if dk is not None and dv is not None and mask.Tk:
        call = _Call("dkdv", problem)
        q_tiles, dout_tiles = (call.descriptor(x, mask.Tq, call.tile.block_m) for x in (q, dout))
        with on_device_of(q):
            attention_dkdv[call.grid("k")](
                q, k, v, q_tiles, dout_tiles, dout, dk, dv, lse2, delta, *call.sides, call.order("k"),
                scale, call.scale2, call.cap_in, call.cap2, mask.Tq, mask.Tk, k.shape[1], q.shape[1] // k.shape[1],
                *_strides(q), *_strides(k), *_strides(v), *_strides(dout), *_strides(dk), *_strides(dv), lse2.stride(0),
                ADD=add, **call.constants(),
            )  # fmt: skip


class TritonRounds(Rounds):
    """Rounds on the Triton kernels; stats hold lse2 of `delta_of`."""

    def _forward(self, problem: Problem, out: Tensor, lse: Tensor) -> None:
        forward_into(_readable(problem), out, lse, add=True)

    def _backward(self, problem: Problem, dout: Tensor, stats: Stats, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        backward_into(_readable(problem), adjacent(dout), stats.delta, stats.lse, dq, dk, dv, add=True)

    def _stats(self, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None) -> Stats:
        T = out.shape[0]
        delta, lse2 = delta_of(adjacent(out), adjacent(dout), adjacent(lse), dlse, T)
        return Stats(delta[:, :T], lse2[:, :T])

    def _stats_of(self, delta: Tensor, lse: Tensor) -> Stats:
        H, T = lse.shape
        padded = lse.new_empty(2, H, -(-T // 16) * 16)[..., :T]  # as `delta_of`: rows start aligned, strides are equal
        padded[0], padded[1] = delta, torch.where(lse == -math.inf, math.inf, lse * LOG2E)
        return Stats(padded[0], padded[1])


@dataclass(frozen=True)
class _Call:
    """What the launches share: the tile, the scales in the form that the kernels take, and the compile-time options."""

    kernel: Kernel
    problem: Problem

    @property
    def target(self) -> str:
        return target_name(self.problem.q.device)

    @property
    def tile(self) -> Tile:
        width = max(padded_width(self.problem.q.shape[2]), padded_width(self.problem.v.shape[2]))
        gaps, capped = self.problem.mask.has_gaps(), self.problem.softcap is not None
        return choose_tile(self.kernel, width, self.problem.q.element_size(), self.target, gaps, capped)

    @property
    def size(self) -> float:
        """The scale without its sign; any positive number for 0, since then q (or k) becomes 0."""
        return abs(self.problem.scale) or 1.0

    @property
    def scale2(self) -> float:
        return self.size * LOG2E

    @property
    def cap_in(self) -> float:
        return 0.0 if self.problem.softcap is None else self.size / self.problem.softcap

    @property
    def cap2(self) -> float:
        return 0.0 if self.problem.softcap is None else self.problem.softcap * LOG2E

    @property
    def sides(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.problem.mask.sides

    def order(self, side: str) -> Tensor:
        return tile_order(self.problem.mask, side, self.tile)

    def grid(self, side: str) -> tuple[int]:
        heads = (self.problem.q if side == "q" else self.problem.k).shape[1]
        return (self.order(side).shape[0] * heads,)

    def descriptor(self, x: Tensor, rows: int, block: int) -> Any:
        """A tensor descriptor of x [T, heads, width] in tiles of `block` rows as `load_tile` takes it, if possible."""
        _, heads, width = x.shape
        columns = max((heads - 1) * x.stride(1) + width, x.stride(1))
        steps = (x.stride(1) * x.element_size(), x.stride(0) * x.element_size())
        aligned = x.data_ptr() % 16 == 0 and all(step % 16 == 0 and step > 0 for step in steps)
        if not (use_descriptors(self.target) and rows and aligned and columns <= INT32_MAX):
            return None
        if width == padded_width(width):
            return TensorDescriptor(x, [rows, columns], [x.stride(0), 1], [block, width])
        shape, strides = [heads, rows, width], [x.stride(1), x.stride(0), 1]
        return TensorDescriptor(x, shape, strides, [1, block, padded_width(width)])

    def constants(self) -> dict[str, Any]:
        """The compile-time arguments of every attention kernel, and the launch options."""
        D, DV, tile = self.problem.q.shape[2], self.problem.v.shape[2], self.tile
        return {
            "SIGN": (self.problem.scale > 0) - (self.problem.scale < 0), "GAPS": self.problem.mask.has_gaps(),
            "CAPPED": self.problem.softcap is not None, "WIDE": interpreted(),
            "D": D, "DV": DV, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
            "BLOCK_D": padded_width(D), "BLOCK_DV": padded_width(DV),
            "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip


def _gradient_buffer(x: Tensor, covered: int, written: bool) -> Tensor:
    """Room for x's gradient, 0 from row `covered` on; in x's dtype if it is written once, else fp32 to add up in."""
    buffer = x.new_empty(x.shape, dtype=x.dtype if written else torch.float32)
    buffer[covered:] = 0
    return buffer


def _readable(problem: Problem) -> Problem:
    """The problem, with copies of what the kernels cannot read where it lies."""
    q, k, v = (adjacent(x) for x in (problem.q, problem.k, problem.v))
    same = q is problem.q and k is problem.k and v is problem.v
    return problem if same else replace(problem, q=q, k=k, v=v)


def _require_adjacent(**tensors: Tensor | None) -> None:
    """Raise ValueError, naming the first, if the elements of a tensor's last dim do not lie next to each other."""
    for name, x in tensors.items():
        if x is not None and not is_adjacent(x):
            raise ValueError(f"{name} has stride {x.stride(-1)} in its last dim and the kernels need 1; copy it")


def _strides(x: Tensor) -> tuple[int, int]:
    """Elements from one token to the next, and from one head to the next."""
    return x.stride(0), x.stride(1)
