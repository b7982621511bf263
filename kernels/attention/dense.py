"""Dense attention on [B, H, S, D]: torch's flash operator, and a tiled form with a soft cap that the operator lacks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS, COLS = 256, 512  # the capped form's tile


class Dense(ABC):
    """Attention of q [B, H, S, D] on k, v [B, Hkv, C, D]; causal means that row i sees columns 0..i.

    bias [B, 1, S, C] is added to the logits. S and C are never 0. lse [B, H, S] is natural; a row whose bias is all
    -inf may get any lse.
    """

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out [B, H, S, D], lse [B, H, S])."""

    @abstractmethod
    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv), where out and lse may come from a larger set of keys."""


@dataclass(frozen=True)
class FlashDense(Dense):
    """torch's CPU flash operator. Its backward takes an out and an lse that may come from a larger set of keys."""

    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        factor, scale = self._split_scale()
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q if factor == 1 else q * factor, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        factor, scale = self._split_scale()
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q if factor == 1 else q * factor, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
        return dq if factor == 1 else dq * factor, dk, dv

    def _split_scale(self) -> tuple[float, float]:
        """(factor for q, scale for the operator), which multiplies its causal -inf by a scale that must be positive."""
        return (1.0, self.scale) if self.scale > 0 else (self.scale, 1.0)


@dataclass(frozen=True)
class CappedDense(Dense):
    """Logits softcap * tanh(scale * q.k / softcap), tile by tile: memory O(ROWS * COLS) per head, online softmax."""

    scale: float
    softcap: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        B, H, S, D = q.shape
        out, lse = q.new_zeros(q.shape), q.new_empty(B, H, S)
        for r0, r1, chunks in _tiles(S, k.shape[2], causal):
            group = _grouped(q[:, :, r0:r1], k.shape[1])
            top = group.new_full((*group.shape[:-1], 1), -float("inf"))
            total, acc = torch.zeros_like(top), torch.zeros_like(group)
            for c0, c1 in chunks:
                s, _ = self._logits(group, k, (r0, r1), (c0, c1), causal, bias)
                new_top = torch.maximum(top, s.amax(-1, keepdim=True))
                base = new_top.masked_fill(new_top == -float("inf"), 0)
                p, keep = (s - base).exp_(), (top - base).exp_()
                total = total * keep + p.sum(-1, keepdim=True)
                acc = acc.mul_(keep).add_(p @ v[:, :, c0:c1])
                top = new_top
            acc = acc.div_(total.masked_fill(total == 0, 1))
            out[:, :, r0:r1] = acc.reshape(B, H, r1 - r0, D)
            lse[:, :, r0:r1] = (top + total.log()).reshape(B, H, r1 - r0)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kv_heads = k.shape[1]
        dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        delta = (dout * out).sum(-1, keepdim=True)
        for r0, r1, chunks in _tiles(q.shape[2], k.shape[2], causal):
            qs, do, log, dlt = (_grouped(x[:, :, r0:r1], kv_heads) for x in (q, dout, lse[..., None], delta))
            gq = torch.zeros_like(qs)
            for c0, c1 in chunks:
                s, slope = self._logits(qs, k, (r0, r1), (c0, c1), causal, bias)
                p = s.sub_(log).exp_()
                dv[:, :, c0:c1] += p.transpose(-1, -2) @ do
                ds = (do @ v[:, :, c0:c1].transpose(-1, -2)).sub_(dlt).mul_(p).mul_(slope)
                gq += ds @ k[:, :, c0:c1]
                dk[:, :, c0:c1] += ds.transpose(-1, -2) @ qs
            dq[:, :, r0:r1] = gq.reshape(dq[:, :, r0:r1].shape)
        return dq, dk, dv

    def _logits(
        self,
        group: Tensor,
        k: Tensor,
        rows: tuple[int, int],
        cols: tuple[int, int],
        causal: bool,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Capped, masked logits [B, Hkv, G * rows, cols] and their derivative by q.k."""
        t = (group @ k[:, :, cols[0] : cols[1]].transpose(-1, -2)).mul_(self.scale / self.softcap).tanh_()
        slope = (1 - t * t).mul_(self.scale)
        s = t.mul_(self.softcap)
        n = rows[1] - rows[0]
        by_row = s.unflatten(2, (-1, n))  # a view: group, row
        if causal and cols[1] > rows[0] + 1:
            column = torch.arange(cols[0], cols[1], device=s.device)
            late = column > torch.arange(rows[0], rows[1], device=s.device)[:, None]
            by_row.masked_fill_(late, -float("inf"))
        if bias is not None:
            by_row += bias[:, :, None, rows[0] : rows[1], cols[0] : cols[1]]
        return s, slope


def _tiles(S: int, C: int, causal: bool) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Row ranges, each with the column ranges that it sees something of."""
    tiles = []
    for r0 in range(0, S, ROWS):
        r1 = min(r0 + ROWS, S)
        stop = min(r1, C) if causal else C
        tiles.append((r0, r1, [(c0, min(c0 + COLS, stop)) for c0 in range(0, stop, COLS)]))
    return tiles


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[B, H, n, D] as [B, Hkv, G * n, D], a key head's queries together."""
    return x.unflatten(1, (kv_heads, -1)).flatten(2, 3)
