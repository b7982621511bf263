"""Every operator on tensors however they lie in memory, and on empty ones: the numbers of contiguous copies."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.api import IntervalMask, attention
from kernels.attention.backends import able_backends, choose_rounds
from kernels.codec import api as codec_api
from kernels.codec.api import decode, decode_sum, decode_sum_encode, encode
from kernels.compile.runtime import interpreted
from kernels.merge.merge import merge, merge_into
from parallel.plan.codec import VIEWS, CodecSpec

Draw = Callable[..., Tensor]
Results = dict[str, Tensor]
SIZES = [(12, 12), (0, 0), (0, 6), (6, 0)] if interpreted() else [(20, 20), (0, 0), (0, 6), (6, 0), (1, 1)]


def plain(draw: Draw, *shape: int) -> Tensor:
    return draw(*shape)


def expanded(draw: Draw, *shape: int) -> Tensor:
    """One number for all, as the gradient of a sum is: every stride is 0."""
    return draw(*(1 for _ in shape)).expand(shape)


def expanded_tokens(draw: Draw, *shape: int) -> Tensor:
    return draw(1, *shape[1:]).expand(shape)


def transposed(draw: Draw, *shape: int) -> Tensor:
    """The last dim outermost."""
    return draw(*shape[::-1]).permute(*reversed(range(len(shape))))


def heads_first(draw: Draw, *shape: int) -> Tensor:
    """The first two of three dims swapped in memory; the last keeps its neighbours."""
    return draw(shape[1], shape[0], shape[2]).transpose(0, 1) if len(shape) == 3 else draw(*shape)


def sliced(draw: Draw, *shape: int) -> Tensor:
    """A part of a larger tensor, 4 bytes after an aligned address in the last dim."""
    return draw(*(n + 3 for n in shape))[tuple(slice(1, n + 1) for n in shape)]


def stepped(draw: Draw, *shape: int) -> Tensor:
    """Every other element of every dim."""
    return draw(*(2 * n for n in shape))[tuple(slice(None, None, 2) for _ in shape)]


LAYOUTS = [plain, expanded, expanded_tokens, transposed, heads_first, sliced, stepped]
ADJACENT = [plain, heads_first, sliced]  # results that an operator writes to must have neighbours in their last dim


class Drawn:
    """Random tensors of one layout or, `alike`, contiguous copies of the same."""

    def __init__(self, layout: Callable[..., Tensor], alike: bool, buffers: Callable[..., Tensor] = plain) -> None:
        self.layout, self.alike, self.buffers = layout, alike, buffers
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def __call__(self, *shape: int) -> Tensor:
        x = self.layout(self.draw, *shape)
        assert x.shape == shape
        return x.clone(memory_format=torch.contiguous_format) if self.alike else x

    def buffer(self, value: float, *shape: int) -> Tensor:
        """Room for results."""
        return self.buffers(torch.zeros, *shape).fill_(value)


def mask_of(Tq: int, Tk: int) -> IntervalMask:
    return IntervalMask.from_cu_seqlens([0, Tq // 3, Tq], [0, Tk // 3, Tk], causal=Tq == Tk)


def gradients(leaves: list[Tensor], ends: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Of the leaves, for results with their gradients; zeros for one that none depends on."""
    results, grads = zip(*ends)
    found = torch.autograd.grad(results, leaves, grads, allow_unused=True)
    return [torch.zeros(x.shape) if grad is None else grad for x, grad in zip(leaves, found)]


def attend(drawn: Drawn, backend: str, size: tuple[int, int], used: str) -> Results:
    """`attention` and its gradients through out, lse or both."""
    Tq, Tk = size
    q, k, v, sink = drawn(Tq, 4, 8), drawn(Tk, 2, 8), drawn(Tk, 2, 6), drawn(4)
    leaves = [x.requires_grad_() for x in (q, k, v, sink)]
    out, lse = attention(q, k, v, mask_of(*size), sink=sink, backend=backend)
    ends = {"out": (out, drawn(Tq, 4, 6)), "lse": (lse, drawn(4, Tq))}
    grads = gradients(leaves, [ends[name] for name in used.split()])
    return dict(zip(("out", "lse", "dq", "dk", "dv", "dsink"), (out, lse, *grads)))


def in_rounds(drawn: Drawn, backend: str, size: tuple[int, int], used: str) -> Results:
    """Two rounds over the same keys, forward and backward, with stats of both kinds."""
    (Tq, Tk), mask, buffer = size, mask_of(*size), drawn.buffer
    q, k, v, dout, dlse = drawn(Tq, 4, 8), drawn(Tk, 2, 8), drawn(Tk, 2, 6), drawn(Tq, 4, 6), drawn(4, Tq)
    rounds, out, lse = choose_rounds(backend, q), buffer(0, Tq, 4, 6), buffer(-math.inf, 4, Tq)
    for _ in range(2):
        rounds.forward(q, k, v, mask, out, lse, 0.4)
    stats = rounds.stats(out, dout, lse, dlse if "lse" in used else None)
    if used == "lse":
        stats = rounds.stats_of(rounds.delta(out, dout, lse, dlse), lse, dout)
    dq, dk, dv = buffer(1, Tq, 4, 8), buffer(1, Tk, 2, 8), buffer(1, Tk, 2, 6)
    rounds.backward(q, k, v, dout, rounds.part(stats, slice(None)), mask, dq, dk, dv, 0.4)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def merged(drawn: Drawn, backend: str, size: tuple[int, int], used: str) -> Results:
    """`merge` of lists and its gradients."""
    join = merge
    if backend == "triton":
        from kernels.merge.triton_merge import merge_triton as join
    T = size[0]
    leaves = [drawn(T, 4, 6), drawn(T, 4, 6), drawn(4, T), drawn(4, T)]
    out, lse = join([x.requires_grad_() for x in leaves[:2]], [x.requires_grad_() for x in leaves[2:]])
    ends = {"out": (out, drawn(T, 4, 6)), "lse": (lse, drawn(4, T))}
    grads = gradients(leaves, [ends[name] for name in used.split()])
    return dict(zip(("out", "lse", "da", "db", "dla", "dlb"), (out, lse, *grads)))


def merged_into(drawn: Drawn, backend: str, size: tuple[int, int], used: str) -> Results:
    join = merge_into
    if backend == "triton":
        from kernels.merge.triton_merge import merge_into_triton as join
    T = size[0]
    out, lse = drawn.buffer(0.5, T, 4, 6), drawn.buffer(0.25, 4, T)
    join(out, lse, drawn(T, 4, 6), drawn(4, T))
    return {"out": out, "lse": lse}


def coded(drawn: Drawn, backend: str, size: tuple[int, int], used: str) -> Results:
    """`encode`, and each reader of wires, which lie apart, or are one wire four times."""
    found = {}
    for view, width in (("hidden", 40), *((view, 64) for view in VIEWS)):  # with and without padding
        codec = CodecSpec(group=32, view=view)
        x = drawn(size[0], width)
        wire = encode(x, codec)
        apart = torch.zeros(4, 2 * len(wire) + 16, dtype=torch.uint8)[:, 1 : 1 + 2 * len(wire) : 2]
        apart[:] = wire
        far = wire.expand(4, -1) if drawn.layout is expanded else apart
        wires = wire.repeat(4, 1) if drawn.alike else far
        results = {
            "wire": wire,
            "one": decode(wires[1], codec, x.shape),
            "sum": decode_sum(wires, codec, x.shape),
            "again": decode_sum_encode(wires, codec, x.shape),
        }
        found |= {f"{name} {view} {width}": result for name, result in results.items()}
    return found


BACKENDS = able_backends(torch.zeros(1))
CASES = [
    (operator, backend)
    for operator in (attend, in_rounds, merged, merged_into, coded)
    for backend in (BACKENDS if operator in (attend, in_rounds) else [name for name in BACKENDS if name != "reference"])
]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize(("operator", "backend"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_any_layout(
    operator: Callable[..., Results],
    backend: str,
    layout: Callable[..., Tensor],
    size: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and backward, through either result or both, into buffers of every layout that is allowed there."""
    monkeypatch.setattr(codec_api, "_fused", lambda x: backend == "triton")
    twin = "torch" if operator is coded else "reference"
    buffers = [plain] if operator is coded else ADJACENT
    if operator is merged_into and backend == "triton":  # whose buffers are contiguous
        buffers = [plain]
    for used, buffer in zip(("out lse", "out", "lse"), buffers):
        want = operator(Drawn(layout, True), twin, size, used)
        got = operator(Drawn(layout, False, buffer), backend, size, used)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # dicts: it names the tensor that differs
