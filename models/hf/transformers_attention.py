"""longfold's attention inside Hugging Face transformers, which must be installed; nothing here imports it before use.

    register()                                        # once
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="longfold")

Padded batches (any 2D attention mask), sliding and chunked windows, soft caps, sinks, grouped heads and KV caches give
what transformers' eager attention gives, with no mask of [T, T] in memory, except that a query without keys gets 0.
Rows that pack documents are kept apart wherever `position_ids` restart or `cu_seq_lens_q` says so, also where
transformers itself does not look: beside an attention mask, or with a cache. (Some models do not tell attention the
positions, Llama 4 and GPT-BigCode among them: there, packed rows need attention_mask=None and use_cache=False, as in
transformers.)
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kernels.api import IntervalMask, attention
from kernels.mask_spec import UNBOUNDED, BandPiece

BLOCK = 2**24  # pairs of an unknown mask that are looked at together
# Tensors that models hand down and attention need not know; any other would change what it computes.
IDLE = {
    "cache_position", "num_items_in_batch", "logits_to_keep", "max_length_q", "max_length_k", "seq_idx", "labels",
    "token_type_ids", "mm_token_type_ids",
}  # fmt: skip
Reach = tuple[int, int]


def register(name: str = "longfold", backend: str = "auto") -> None:
    """Make `attn_implementation=name` mean this attention, on a backend of `kernels.api.BACKENDS`.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, partial(attend, backend=backend))
    AttentionMaskInterface.register(name, visible_keys)


@dataclass
class Visible:
    """What transformers' layers are handed as their mask: for each query, an interval of the keys.

    Attributes:
        lo, hi: int64 [B, Tq], half-open intervals of the row's own keys, each never decreasing along a row.
        live: bool [B, Tk], the keys that are no padding; None: all.
        shiftable: whether the mask asks how far apart tokens are, not where they lie: then it holds inside a document.
    """

    lo: Tensor
    hi: Tensor
    keys: int
    live: Tensor | None
    shiftable: bool = True
    ndim: int = 4  # what transformers asks of a mask that generation made ahead
    _made: list[tuple[Tensor | None, IntervalMask]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"this model asks longfold's mask for .{name}, as if it were a tensor, so it computes with masks itself; "
            f"use eager attention for it"
        )

    def interval_mask(self, positions: Tensor | None, cu_seqlens: Tensor | None) -> IntervalMask:
        """The mask over all rows' queries and live keys, laid end to end; made once for all the layers that ask.

        Raises:
            ValueError: positions or cu_seqlens of another size, or documents among cached keys.
        """
        source = cu_seqlens if cu_seqlens is not None else positions
        if not self._made or self._made[0][0] is not source:
            self._made[:] = [(source, self._make(positions, cu_seqlens))]
        return self._made[0][1]

    def _make(self, positions: Tensor | None, cu_seqlens: Tensor | None) -> IntervalMask:
        rows, queries = self.lo.shape
        lo, hi = self.lo, self.hi
        whole = queries == self.keys
        if cu_seqlens is not None:
            lo, hi = self._within(*_documents_of(cu_seqlens, rows, queries, self.keys))
        elif positions is not None and positions.dim() == 2 and whole:
            lo, hi = self._within(*_documents_at(positions.expand(rows, -1), self.live))
        before = torch.arange(rows, device=lo.device)[:, None] * self.keys
        lo, hi, total = lo + before, hi + before, rows * self.keys
        if self.live is not None:
            count = torch.cat((self.live.new_zeros(1, dtype=torch.int64), self.live.flatten().cumsum(0)))
            lo, hi, total = count[lo], count[hi], int(count[-1])
        if positions is not None and positions.dim() == 2 and cu_seqlens is None and not whole:
            _check_cache(hi - lo, positions.expand(rows, -1))
        mask = IntervalMask.from_rows(lo.flatten().int(), hi.flatten().int(), total)
        return mask.knowing(False) if whole and self.shiftable and self.live is None else mask  # each sees itself

    def _within(self, first: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        lo, hi = torch.maximum(self.lo, first), torch.minimum(self.hi, stop)
        hi = torch.maximum(lo, hi)
        if not self.shiftable and bool((hi - lo != self.hi - self.lo).any()):
            raise ValueError(
                "this model's mask depends on where in its row a token lies (chunked attention does), so packed "
                "documents need it made for each; leave attention_mask out and pass use_cache=False"
            )
        return lo, hi


def attend(
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
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    *,
    backend: str = "auto",
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention call: query [B, H, Tq, D], key [B, Hkv, Tk, D], value [B, Hkv, Tk, Dv] -> [B, Tq, H, Dv].

    Raises:
        ValueError: dropout, attention weights as a result, a ready-made 4D mask, a tensor that is none of these
            arguments nor in IDLE (a bias, indices of chosen keys), and documents that do not fit the batch.
    """
    if dropout:
        raise ValueError(
            f"longfold has no attention dropout, and this model asks for {dropout}; set attention_dropout (attn_pdrop "
            f"in GPT-2) to 0 in its config, or call model.eval()"
        )
    if others.get("output_attentions"):
        raise ValueError("longfold never holds attention weights; leave output_attentions out, or use eager attention")
    for name, other in others.items():
        if isinstance(other, Tensor) and name not in IDLE:
            raise ValueError(f"longfold's attention takes no {name}; use eager attention for it")
    rows, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    if not isinstance(attention_mask, Visible):
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = _visible_of(attention_mask, causal, sliding_window, rows, queries, keys, query.device)
    if attention_mask.lo.shape != (rows, queries) or attention_mask.keys != keys:
        raise ValueError(
            f"the mask is of {tuple(attention_mask.lo.shape)} queries and {attention_mask.keys} keys a row, but "
            f"attention has {(rows, queries)} and {keys}; use a cache whose lengths transformers' masks know"
        )
    other = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
    if other is not None and cu_seq_lens_q is not None and not torch.equal(cu_seq_lens_q, other):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ; packed rows attend within themselves, so give one")
    mask = attention_mask.interval_mask(position_ids, cu_seq_lens_q)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if attention_mask.live is not None:
        k, v = (x[attention_mask.live.flatten()] for x in (k, v))
    out, _ = attention(q, k, v, mask, softmax_scale=scaling, softcap=softcap, sink=s_aux, backend=backend)
    return out.unflatten(0, (rows, queries)), None


def visible_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | Visible | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Visible:
    """transformers' mask call: the keys that `mask_function` and the 2D `attention_mask` show each query.

    Causal, bidirectional, sliding and packed masks are known by name; any other function is evaluated on every pair,
    a block of rows at a time.

    Raises:
        ValueError: a function whose visible keys are no interval with ends that never decrease.
    """
    if isinstance(attention_mask, Visible):  # generation made it ahead, for a static cache
        return attention_mask
    q_offset = int(q_offset)
    known = ((UNBOUNDED, 0), None) if mask_function is None else _known(mask_function)
    if known is not None:
        lo, hi = _reached(known[0], batch_size, q_length, kv_length, q_offset - kv_offset, device)
        if known[1] is not None:
            first, stop = _edges(known[1])
            lo, hi = torch.maximum(lo, first), torch.minimum(hi, stop)
    else:
        assert mask_function is not None
        sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
        lo, hi = _evaluated(mask_function, sizes, use_vmap, device)
    live = None
    if attention_mask is not None:
        live = attention_mask.to(device=device, dtype=torch.bool)
        missing = kv_offset + kv_length - live.shape[1]
        if missing > 0:
            live = nn.functional.pad(live, (0, missing))
        live = live[:, kv_offset : kv_offset + kv_length]
        live = None if bool(live.all()) else live.expand(batch_size, -1)
    return Visible(lo, hi, kv_length, live, shiftable=known is not None)


def _visible_of(
    mask: Any, causal: bool, window: int | None, rows: int, queries: int, keys: int, device: torch.device
) -> Visible:
    """For models that make no mask through transformers' interface: from what the call itself says."""
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"longfold takes a 2D attention mask [batch, keys], not {shape}; give documents by position_ids or "
            f"cu_seq_lens_q, or use eager attention for masks of another kind"
        )
    left = UNBOUNDED if window is None else window - 1
    lo, hi = _reached((left, 0 if causal else left), rows, queries, keys, keys - queries, device)
    live = None if mask is None or bool(mask.all()) else mask.bool()[:, -keys:]
    return Visible(lo, hi, keys, live)


def _known(function: Callable[..., Any]) -> tuple[Reach, Tensor | None] | None:
    """(keys before and after its own position, ids of packed sequences [B, T]) of a mask function of transformers."""
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return None
    name = function.__qualname__.split(".")[0]
    inside = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    if name == "causal_mask_function":
        return (UNBOUNDED, 0), None
    if name == "bidirectional_mask_function":
        return (UNBOUNDED, UNBOUNDED), None
    if name == "sliding_window_overlay":
        return (inside["sliding_window"] - 1, UNBOUNDED), None
    if name == "sliding_window_bidirectional_overlay":
        return (inside["sliding_window"], inside["sliding_window"]), None
    if name == "packed_sequence_mask_function":
        return (UNBOUNDED, UNBOUNDED), inside["packed_sequence_mask"]
    if name == "remap_positions_for_packed_sequence":  # within a sequence, positions count as indices do
        return _known(inside["mask_function"])
    if name != "and_masks":
        return None
    parts = [_known(part) for part in inside["mask_functions"]]
    reaches = [part[0] for part in parts if part is not None]
    ids = [part[1] for part in parts if part is not None and part[1] is not None]
    if len(reaches) < len(parts) or len(ids) > 1:
        return None
    return (min(left for left, _ in reaches), min(right for _, right in reaches)), ids[0] if ids else None


def known_reach(function: Callable[..., Any]) -> Reach | None:
    """Keys before and after its own position that a mask function of transformers shows a query, whatever sequences it
    keeps apart; None for a function that is not known by name."""
    known = _known(function)
    return None if known is None else known[0]


def _reached(
    reach: Reach, rows: int, queries: int, keys: int, ahead: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """[B, Tq] intervals of a reach around query i's own key, i + ahead."""
    at = (torch.arange(queries, device=device) + ahead).expand(rows, -1)
    return BandPiece(*reach).keys(at, keys)


def _evaluated(
    function: Callable[..., Any], sizes: tuple[int, ...], use_vmap: bool, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """[B, Tq] intervals of any mask function, all of whose pairs are looked at."""
    from transformers.masking_utils import sdpa_mask

    rows, queries, keys, q_offset, kv_offset = sizes
    block = max(1, BLOCK // max(1, rows * keys))
    found = []
    for start in range(0, queries, block):
        n = min(block, queries - start)
        pairs = sdpa_mask(
            rows, n, keys, q_offset + start, kv_offset, function, None,
            allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        assert pairs is not None  # it may leave a mask out only where it is asked to
        seen = pairs[:, 0].int()
        count, lo = seen.sum(-1), seen.argmax(-1)
        last = keys - 1 - seen.flip(-1).argmax(-1)
        if bool(((count > 0) & (last - lo + 1 != count)).any()):
            raise ValueError(
                "this model's mask shows a query keys that are no single interval; use eager or flex attention for it"
            )
        found.append((torch.where(count > 0, lo, -1), count))
    lo, count = (torch.cat(parts, 1) for parts in zip(*found))
    steady = lo.cummax(1).values
    stops = (steady + count).cummax(1).values
    if bool(((count > 0) & ((steady != lo) | (stops != lo + count))).any()):
        raise ValueError(
            "this model's mask shows a later query earlier keys, or fewer late ones; use eager or flex attention for it"
        )
    lo = steady.clamp(min=0)
    return lo, torch.where(count > 0, lo + count, lo)


def _edges(ids: Tensor) -> tuple[Tensor, Tensor]:
    """First index and stop [B, T] of the run of equal ids that each token is in; ids never decrease along a row."""
    ids = ids.contiguous()
    return torch.searchsorted(ids, ids), torch.searchsorted(ids, ids, right=True)


def _documents_at(positions: Tensor, live: Tensor | None) -> tuple[Tensor, Tensor]:
    """[B, T] first index and stop of each token's document: one begins where a live token's position does not rise."""
    if live is None:
        rises = positions[:, 1:] > positions[:, :-1]
    else:
        top = torch.where(live, positions, -1)
        # the last live position before each token
        order = torch.arange(positions.shape[1], device=positions.device)
        last = torch.where(live, order, -1).cummax(1).values[:, :-1]
        before = torch.where(last >= 0, top.gather(1, last.clamp(min=0)), -1)
        rises = ~live[:, 1:] | (positions[:, 1:] > before)
    return _edges(nn.functional.pad(~rises, (1, 0)).cumsum(1))


def _documents_of(cu_seqlens: Tensor, rows: int, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """[B, T] first index and stop of each token's document within its row, from cumulative lengths over all rows."""
    total = rows * queries
    if queries != keys or int(cu_seqlens[-1]) != total or int(cu_seqlens[0]) != 0:
        raise ValueError(
            f"cu_seq_lens_q runs from {int(cu_seqlens[0])} to {int(cu_seqlens[-1])}, but the batch has {rows} rows of "
            f"{queries} queries and {keys} keys; documents must cover it, without a cache"
        )
    edges = cu_seqlens.long().contiguous()
    if bool((edges[1:] < edges[:-1]).any()):
        raise ValueError("cu_seq_lens_q decreases somewhere; give each document's first index, and the total")
    at = torch.arange(total, device=edges.device)
    document = torch.searchsorted(edges, at, right=True)
    before = torch.arange(rows, device=edges.device)[:, None] * queries
    first, stop = (edges[document - shift].view(rows, queries) - before for shift in (1, 0))
    return first.clamp(min=0), stop.clamp(max=queries)


def _check_cache(seen: Tensor, positions: Tensor) -> None:
    if bool((seen > positions + 1).any()):
        row, i = (int(x) for x in (seen > positions + 1).nonzero()[0])
        raise ValueError(
            f"a query at position {int(positions[row, i])} would see {int(seen[row, i])} keys, so its cache holds more "
            f"than its document; generate from one document a row, padded on the left"
        )
