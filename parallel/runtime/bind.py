"""A plan bound to one rank: token ranges turned into rows of buffers and into masks, once a batch, for all layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.mask import IntervalMask, position_masks
from parallel.plan.ir import Buffer, Message, Program, fields_of, token_bytes, width_of
from parallel.plan.plan import Plan
from parallel.plan.tokens import TokenSet

Rows = slice | Tensor
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class WireField:
    """Where a field lies in a wire, its dtype, and its shape: [tokens, heads, width], or [heads, tokens] for lse."""

    name: str
    traffic: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    stop: int  # bytes


class BoundPlan:
    """One rank's programs on a device. Rows, wires and masks are made at their first use and kept.

    Raises:
        ValueError: a plan that holds no steps for the rank.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device | str = "cpu") -> None:
        forward, backward = plan.forward[rank], plan.backward[rank]
        if forward is None or backward is None:
            raise ValueError(f"the plan holds steps for ranks {plan.ranks}, not for rank {rank}")
        self.plan, self.rank, self.device = plan, rank, torch.device(device)
        self.programs: dict[str, Program] = {"forward": forward, "backward": backward}
        self.shape = plan.shape
        self._rows: dict[tuple[bytes, bytes], Rows] = {}
        self._parts: dict[Buffer | Message, list[WireField]] = {}
        self._masks: dict[tuple[bytes, bytes], Sequence[IntervalMask]] = {}
        self._starts = torch.from_numpy(plan.placement.layout.starts.copy())
        self._stops = torch.from_numpy(plan.placement.layout.stops.copy())

    def dtype(self, exact: bool) -> torch.dtype:
        """The model's dtype, or that of partial results."""
        model = DTYPES[self.shape.dtype]
        return (torch.float64 if model == torch.float64 else torch.float32) if exact else model

    def rows(self, held: TokenSet, wanted: TokenSet) -> Rows:
        """Where `wanted` lies in a buffer of `held`: a slice where that is possible, else an index tensor."""
        key = (held.key, wanted.key)
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = self._find_rows(held, wanted)
        return found

    def _find_rows(self, held: TokenSet, wanted: TokenSet) -> Rows:
        if held == wanted:
            return slice(0, held.count)
        at = held.expand()
        order = np.argsort(at, kind="stable")
        rows = order[np.searchsorted(at[order], wanted.expand())]
        if len(rows) and (np.diff(rows) == 1).all():
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return torch.from_numpy(rows).to(self.device)

    def run(self, held: TokenSet, wanted: TokenSet) -> slice:
        """As `rows`, for attention, which reads tokens where they lie. ValueError where they do not lie together."""
        rows = self.rows(held, wanted)
        if not isinstance(rows, slice):
            raise ValueError(f"{wanted} does not lie in one piece in a buffer of {held}; attend it block by block")
        return rows

    def masks(self, q_tokens: TokenSet, k_tokens: TokenSet) -> Sequence[IntervalMask]:
        """The bands of a block's mask, on the device; those that show it nothing are left out, but for the first."""
        key = (q_tokens.key, k_tokens.key)
        found = self._masks.get(key)
        if found is None:
            q_at, k_at = token_index(q_tokens), token_index(k_tokens)
            bands = position_masks(self.plan.mask, q_at, k_at, self._starts, self._stops)
            bands = [band for band in bands if band.pairs()] or bands[:1]
            found = self._masks[key] = tuple(band.to(self.device) for band in bands)
        return found

    def parts(self, item: Buffer | Message) -> list[WireField]:
        """The fields of a buffer or a message, one after the other in a flat wire."""
        if item in self._parts:
            return self._parts[item]
        heads, parts, first = item.heads[1] - item.heads[0], [], 0
        each = token_bytes(item.kind, item.heads, item.exact, self.shape)
        for field, (traffic, size) in zip(fields_of(item.kind), each):
            stop = first + item.tokens.count * size
            per_head = field.name in ("lse", "delta")
            shape = (
                (heads, item.tokens.count) if per_head else (item.tokens.count, heads, width_of(field.name, self.shape))
            )
            parts.append(WireField(field.name, traffic, self.dtype(item.exact and field.exact), shape, first, stop))
            first = stop
        self._parts[item] = parts
        return parts


def token_index(tokens: TokenSet, device: torch.device | str = "cpu") -> Tensor:
    """int64 [count]: the tokens of a set."""
    return torch.from_numpy(tokens.expand().copy()).to(device)
