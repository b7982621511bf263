"""Document-masked attention on CPU beside what plain torch offers: a loop over documents, and a dense mask.

Every time is forward plus backward through autograd, a median over repeats in which the contenders take turns.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.table import Report
from data.config import DataConfig
from data.sources.files import from_stdlib
from data.sources.mixes import MIXES, draw_lengths
from data.tokenizers.tokenizer import ByteTokenizer
from kernels.api import IntervalMask, attention
from kernels.attention.staircase import plan_staircase

HEADS, WIDTH = 4, 64
REPEATS = 7


@dataclass
class Timing:
    """Seconds of one contender, one entry a repeat."""

    forward: list[float]
    backward: list[float]

    @property
    def total(self) -> float:
        return median(f + b for f, b in zip(self.forward, self.backward))


def document_lengths(mix: str, tokens: int, seed: int) -> list[int]:
    """Lengths that sum to `tokens`: a mix of data.mixes, or the standard library's files, shuffled, last one cut."""
    if mix != "stdlib":
        return draw_lengths(mix, tokens, seed)
    tokenizer = ByteTokenizer()
    source = from_stdlib(DataConfig(source="stdlib"), tokenizer, tokenizer.vocab_size, seed, 0)
    order = list(range(source.size))
    random.Random(seed).shuffle(order)
    lengths: list[int] = []
    for document in order:
        lengths.append(min(source.length(document), tokens - sum(lengths)))
        if sum(lengths) == tokens:
            return lengths
    raise ValueError(f"the standard library has only {sum(lengths)} tokens of the {tokens} asked for")


def headed(x: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D], as scaled_dot_product_attention wants it."""
    return x.transpose(0, 1)[None]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA of one document [n, H, D]."""
    return F.scaled_dot_product_attention(headed(q), headed(k), headed(v), is_causal=True)[0].transpose(0, 1)


def per_document(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """One causal call a document on torch.split views, whose backward is one concatenation."""
    parts = zip(*(x.split(lengths) for x in (q, k, v)))
    return torch.cat([causal(*part) for part in parts])


def per_slice(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """The same loop on slices q[a:b]: the usual way to write it, whose backward fills a whole buffer per document."""
    return torch.cat([causal(q[a:b], k[a:b], v[a:b]) for a, b in pairwise(accumulate(lengths, initial=0))])


def dense_bias(lengths: list[int]) -> Tensor:
    """The document mask as an additive [T, T] matrix, the form that torch's flash operator takes without a copy."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    at = torch.arange(sum(lengths))
    allowed = (document[:, None] == document) & (at[:, None] >= at)
    return torch.zeros(allowed.shape).masked_fill_(~allowed, -float("inf"))


def measure(call: Callable[[], Tensor], leaves: tuple[Tensor, ...], dout: Tensor, timing: Timing) -> Tensor:
    """One forward and backward; returns the output."""
    start = time.perf_counter()
    out = call()
    middle = time.perf_counter()
    torch.autograd.grad(out, leaves, dout)
    timing.forward.append(middle - start)
    timing.backward.append(time.perf_counter() - middle)
    return out


def attention_section(
    report: Report, sizes: list[int], seconds: float, seed: int, dtype: torch.dtype = torch.float32
) -> None:
    """Time all mixes at the given numbers of tokens, each for about `seconds` and 3 to 7 repeats; a row for each."""
    report.note(
        f"Attention, forward + backward, ms: {HEADS} heads of width {WIDTH}, {dtype}, causal documents, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}.\n"
        "per_doc: SDPA for each document on torch.split views; slices: the same on q[a:b]; dense: SDPA with an "
        "additive mask [T, T].\nmask_flops%: pairs that the mask leaves. mask_ms: the mask and its plan, once a batch. "
        "x_...: their time over ours.\ndense does the same work for every mix: its median is over all mixes of a size."
    )
    for tokens in sizes:
        rows, dense = [], Timing([], [])
        for mix in [*MIXES, "stdlib"]:
            rows.append(_time_mix(mix, tokens, seconds, seed, dtype, dense))
        for row, total, sliced, looped in rows:
            row |= {"per_doc": looped * 1e3, "slices": sliced * 1e3, "dense": dense.total * 1e3}
            row |= {"x_per_doc": looped / total, "x_slices": sliced / total, "x_dense": dense.total / total}
            report.row(row)


def _time_mix(
    mix: str, tokens: int, seconds: float, seed: int, dtype: torch.dtype, dense: Timing
) -> tuple[dict, float, float, float]:
    """A row without its ratios, and the totals of ours, slices and per_doc; one more repeat for `dense`."""
    lengths = document_lengths(mix, tokens, seed)
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = torch.randn(4, tokens, HEADS, WIDTH, generator=generator).to(dtype).unbind(0)
    leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    start = time.perf_counter()
    mask = IntervalMask.from_cu_seqlens(list(accumulate(lengths, initial=0)))
    plan_staircase([mask])
    made = time.perf_counter() - start
    ours, looped, sliced = Timing([], []), Timing([], []), Timing([], [])
    began = time.perf_counter()
    out = measure(lambda: attention(q, k, v, mask, backend="torch")[0], leaves, dout, Timing([], []))
    while len(ours.forward) < 3 or (len(ours.forward) < REPEATS and time.perf_counter() - began < seconds):
        measure(lambda: attention(q, k, v, mask, backend="torch")[0], leaves, dout, ours)
        measure(lambda: per_document(q, k, v, lengths), leaves, dout, looped)
        measure(lambda: per_slice(q, k, v, lengths), leaves, dout, sliced)
    rtol, atol = (1e-3, 1e-4) if dtype == torch.float32 else (2e-2, 2e-2)
    torch.testing.assert_close(out, per_document(q, k, v, lengths), rtol=rtol, atol=atol)
    bias = dense_bias(lengths).to(dtype)
    masked = lambda: F.scaled_dot_product_attention(headed(q), headed(k), headed(v), bias)[0].transpose(0, 1)  # noqa: E731
    torch.testing.assert_close(out, measure(masked, leaves, dout, dense), rtol=rtol, atol=atol)
    row = {
        "mix": mix,
        "tokens": tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "docs": len(lengths),
        "mask_flops%": 100 * mask.pairs() / tokens**2,
        "mask_ms": made * 1e3,
        "ours_fwd": median(ours.forward) * 1e3,
        "ours_bwd": median(ours.backward) * 1e3,
        "ours": ours.total * 1e3,
    }
    return row, ours.total, sliced.total, looped.total
