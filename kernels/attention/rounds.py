"""One round of a schedule: a block of queries against one block of keys, accumulated, the same on every backend.

    rounds = choose_rounds("auto", q)
    for k, v, mask in blocks:                                # in any order; lse begins as -inf
        rounds.forward(q, k, v, mask, out, lse, scale)
    stats = rounds.stats(out, dout, lse)                     # of the merged result, once
    for k, v, mask, dk, dv in blocks:
        rounds.backward(q, k, v, dout, stats, mask, dq, dk, dv, scale)

Partial results and gradients stay in fp32 (fp64 for fp64) between rounds, so rounds lose no digits, however many.

Rules. Rows of q and k beyond the mask, queries of it that see no key here and keys that no query sees are never read as
numbers: a NaN there does not spread. `forward` leaves out and lse of the rows beyond mask.Tq alone; among the others,
where lse was -inf, out may have held anything, and where it still is -inf, out is exactly 0 afterwards. `backward`
leaves gradients of the rows beyond the mask alone. Nothing here is differentiable: autograd is the caller's.
(Backward by parts: FlashAttention-2, arXiv 2307.08691, section 3.1; accumulated over devices: Ring Attention,
arXiv 2310.01889.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kernels.attention.heads import key_heads
from kernels.attention.problem import Problem, adjacent, is_adjacent, sum_dtype
from kernels.mask import IntervalMask


@dataclass(frozen=True)
class Stats:
    """What `Rounds.backward` needs of the merged result of all keys; made by the backend that will read it.

    delta [H, Tq] = rowsum(dout * out) - dlse, 0 in rows without keys. lse [H, Tq] in the backend's own form. out
    [Tq, H, Dv] where the backend is faster with it.
    """

    delta: Tensor
    lse: Tensor
    out: Tensor | None = None


class Rounds(ABC):
    """The accumulate form of attention: a backend implements `_forward` and `_backward`, perhaps its own stats."""

    @torch.no_grad()
    def forward(
        self,
        q: Float[Tensor, "Tq H D"],
        k: Float[Tensor, "Tk Hkv D"],
        v: Float[Tensor, "Tk Hkv Dv"],
        mask: IntervalMask,
        out: Float[Tensor, "Tq H Dv"],
        lse: Float[Tensor, "H Tq"],
        scale: float,
        softcap: float | None = None,
        head_map: Sequence[int] | Tensor | None = None,
    ) -> None:
        """Merge attention of q over these keys into `out` and `lse` (natural log), which cover other keys, in place.

        Args:
            q, k, v: one floating dtype; any strides (head slices of a wire are read where they lie).
            mask: may be shorter than q and k; on their device.
            out, lse: fp32 (fp64 for fp64), adjacent in the last dim.
            scale: any sign. softcap: c > 0 replaces each scaled logit s by c * tanh(s / c).
            head_map: the key head of each query head, never decreasing; by default equal groups.

        Raises:
            ValueError: inputs that do not fit together, or buffers of another shape or dtype.
        """
        groups = key_heads(q.shape[1], k.shape[1], head_map)
        k, v = groups.take(k), groups.take(v)
        problem = Problem.checked(q, k, v, (mask,), scale, softcap, None)
        _check_buffers(q.dtype, out=(out, (*q.shape[:2], v.shape[2])), lse=(lse, (q.shape[1], q.shape[0])))
        if not mask.Tk:
            out[: mask.Tq].masked_fill_((lse[:, : mask.Tq] == -float("inf")).T[..., None], 0)
        elif mask.Tq:
            with torch.autocast(q.device.type, enabled=False):
                self._forward(problem, out, lse)

    @torch.no_grad()
    def backward(
        self,
        q: Float[Tensor, "Tq H D"],
        k: Float[Tensor, "Tk Hkv D"],
        v: Float[Tensor, "Tk Hkv Dv"],
        dout: Float[Tensor, "Tq H Dv"],
        stats: Stats,
        mask: IntervalMask,
        dq: Float[Tensor, "Tq H D"],
        dk: Float[Tensor, "Tk Hkv D"],
        dv: Float[Tensor, "Tk Hkv Dv"],
        scale: float,
        softcap: float | None = None,
        head_map: Sequence[int] | Tensor | None = None,
    ) -> None:
        """Add this round's gradients to dq, dk and dv (fp32, fp64 for fp64; adjacent in the last dim).

        `stats` are of the rows of q; the other arguments are as in `forward`.

        Raises:
            ValueError: as `forward`.
        """
        _check_buffers(q.dtype, dq=(dq, q.shape), dk=(dk, k.shape), dv=(dv, v.shape))
        if stats.delta.shape != (q.shape[1], q.shape[0]) or dout.shape != (*q.shape[:2], v.shape[2]):
            raise ValueError(
                f"q is {tuple(q.shape)} and v {tuple(v.shape)}, but dout is {tuple(dout.shape)} and the stats are of "
                f"[H, Tq] = {tuple(stats.delta.shape)}; cut both to the rows of q"
            )
        groups = key_heads(q.shape[1], k.shape[1], head_map)
        k, v = groups.take(k), groups.take(v)
        problem = Problem.checked(q, k, v, (mask,), scale, softcap, None)
        if mask.Tq and mask.Tk:
            part_k, part_v = groups.gradient(dk), groups.gradient(dv)
            with torch.autocast(q.device.type, enabled=False):
                self._backward(problem, dout, stats, dq, part_k, part_v)
            groups.add_back(dk, part_k)
            groups.add_back(dv, part_v)

    @torch.no_grad()
    def stats(
        self,
        out: Float[Tensor, "Tq H Dv"],
        dout: Float[Tensor, "Tq H Dv"],
        lse: Float[Tensor, "H Tq"],
        dlse: Float[Tensor, "H Tq"] | None = None,
    ) -> Stats:
        """What `backward` needs of the final merged out and lse and their gradients, for all rounds of a layer.

        out and lse may be kept, not copied: write to neither before the last `backward`.
        """
        return self._stats(out, dout, lse, dlse)

    @torch.no_grad()
    def stats_of(
        self, delta: Float[Tensor, "H Tq"], lse: Float[Tensor, "H Tq"], dout: Float[Tensor, "Tq H Dv"]
    ) -> Stats:
        """The same from the `delta` of another rank, its lse (natural log) and its dout.

        Raises:
            ValueError: delta or lse that are not [H, Tq] of dout.
        """
        if not delta.shape == lse.shape == (dout.shape[1], dout.shape[0]):
            raise ValueError(
                f"delta is {tuple(delta.shape)} and lse {tuple(lse.shape)}, but dout {tuple(dout.shape)} needs "
                f"[H, Tq] = {(dout.shape[1], dout.shape[0])}; transpose or cut them"
            )
        return self._stats_of(torch.where(lse == -float("inf"), 0, delta.to(lse.dtype)), lse)

    def delta(
        self,
        out: Float[Tensor, "Tq H Dv"],
        dout: Float[Tensor, "Tq H Dv"],
        lse: Float[Tensor, "H Tq"],
        dlse: Float[Tensor, "H Tq"] | None = None,
    ) -> Float[Tensor, "H Tq"]:
        """rowsum(dout * out) - dlse in fp32 (fp64 for fp64), 0 where lse is -inf; contiguous, to be sent."""
        return self.stats(out, dout, lse, dlse).delta.contiguous()

    def part(self, stats: Stats, rows: slice | Tensor, heads: slice = slice(None)) -> Stats:
        """The stats of a choice of queries, in the order of an index tensor, and of consecutive query heads."""
        delta, lse = (adjacent(x[heads][:, rows]) for x in (stats.delta, stats.lse))
        return Stats(delta, lse, None if stats.out is None else stats.out[rows, heads])

    @abstractmethod
    def _forward(self, problem: Problem, out: Tensor, lse: Tensor) -> None:
        """`forward` with equal groups of heads, at least one query and one key."""

    @abstractmethod
    def _backward(self, problem: Problem, dout: Tensor, stats: Stats, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """`backward` with equal groups of heads, at least one query and one key."""

    def _stats(self, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None) -> Stats:
        return self._stats_of(row_delta(out, dout, lse, dlse), lse)

    def _stats_of(self, delta: Tensor, lse: Tensor) -> Stats:
        return Stats(delta, lse)


def row_delta(
    out: Float[Tensor, "Tq H Dv"],
    dout: Float[Tensor, "Tq H Dv"],
    lse: Float[Tensor, "H Tq"],
    dlse: Float[Tensor, "H Tq"] | None,
) -> Float[Tensor, "H Tq"]:
    """rowsum(dout * out) - dlse in lse's dtype, 0 where lse is -inf, whatever the others hold there."""
    # a row that only a sink fills has out 0 and perhaps a NaN in dout
    delta = torch.where(out == 0, 0, out.to(lse.dtype) * dout).sum(-1).T
    return torch.where(lse == -float("inf"), 0, delta if dlse is None else delta - dlse)


def _check_buffers(dtype: torch.dtype, **buffers: tuple[Tensor, Sequence[int]]) -> None:
    """Raise ValueError unless each buffer has its shape, the precision of sums, and neighbours in its last dim."""
    high = sum_dtype(dtype)
    for name, (x, shape) in buffers.items():
        if tuple(x.shape) != tuple(shape) or x.dtype != high or not is_adjacent(x):
            raise ValueError(
                f"{name} must be {tuple(shape)} in {high}, adjacent in its last dim, not {tuple(x.shape)} {x.dtype} "
                f"with strides {x.stride()}; sum up in such a buffer and cast once, after the last round"
            )
