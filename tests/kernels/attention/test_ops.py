"""The kernels as torch operators: torch's own checks of each, and whole graphs that equal eager to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from kernels.api import IntervalMask, attention, merge
from kernels.attention.operator import attention_backward_op, attention_op
from kernels.codec import api as codec_api
from kernels.codec.api import decode, decode_sum, decode_sum_encode, encode
from kernels.merge.merge import merge_backward_op, merge_op
from parallel.plan.codec import CODECS

pytestmark = pytest.mark.usefixtures("traceable")  # torch traces through fake results with symbolic sizes
BATCHES = [[0, 9, 20], [0, 1, 2, 20], [0, 20], [0, 13, 13, 20]]


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((20, 4, 8), (20, 2, 8), (20, 2, 6))
    return [torch.randn(s, generator=generator, dtype=torch.float32).to(dtype).requires_grad_() for s in shapes]


def banded() -> list[IntervalMask]:
    """A document of 20 tokens, and five keys of a shared prefix seen by all but them: two bands."""
    start = torch.full((20,), 5, dtype=torch.int32)
    rows = torch.arange(20, dtype=torch.int32)
    prefix = torch.where(rows < 5, 0, torch.full_like(rows, 5))
    own = IntervalMask.from_rows(torch.where(rows < 5, 0, start).int(), (rows + 1).int(), 20)
    return [own, IntervalMask.from_rows(torch.zeros_like(rows), prefix.int(), 20)]


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("case", ["plain", "options", "bands", "bf16"])
def test_opcheck_attention(backend: str, case: str) -> None:
    """Schema, fake results, autograd's registration, and symbolic shapes."""
    q, k, v = inputs(torch.bfloat16 if case == "bf16" else torch.float32)
    masks = banded() if case == "bands" else [IntervalMask.from_cu_seqlens([0, 9, 18])]
    sink = torch.randn(4).requires_grad_() if case == "options" else None
    softcap = 2.0 if case == "options" else None
    sides = [side for mask in masks for side in mask.sides]
    opcheck(attention_op, (q, k, v, sink, sides, 0.3 if case == "options" else None, softcap, backend))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("need", [(True, True), (True, False), (False, True)])
def test_opcheck_attention_backward(backend: str, need: tuple[bool, bool]) -> None:
    q, k, v = (x.detach() for x in inputs())
    sides = list(IntervalMask.from_cu_seqlens([0, 9, 20]).sides)
    sink = torch.randn(4)
    out, lse = attention_op(q, k, v, sink, sides, None, None, backend)
    opcheck(
        attention_backward_op,
        (torch.randn_like(out), torch.randn_like(lse), q, k, v, sink, out, lse, sides, None, None, backend, *need),
    )


def test_opcheck_merge() -> None:
    outs = [torch.randn(7, 3, 4).requires_grad_() for _ in range(3)]
    lses = [torch.randn(3, 7).requires_grad_() for _ in range(3)]
    opcheck(merge_op, (outs, lses))
    plain = [x.detach() for x in outs], [x.detach() for x in lses]
    opcheck(merge_backward_op, (torch.randn(7, 3, 4), torch.randn(3, 7), *plain))


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_opcheck_codec(name: str) -> None:
    spec = CODECS[name]
    assert spec is not None
    codec = codec_api.spell(replace(spec, group=32, view="strided"))
    x = torch.randn(9, 40)
    wire = codec_api.encode_op(x, codec)
    wires = torch.stack([wire, wire])
    opcheck(codec_api.encode_op, (x, codec))
    opcheck(codec_api.decode_op, (wire, codec, [9, 40], torch.bfloat16, False))
    opcheck(codec_api.decode_sum_op, (wires, codec, [9, 40], False))
    opcheck(codec_api.decode_sum_encode_op, (wires, codec, [9, 40], True))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_documents_change_without_a_new_graph(backend: str) -> None:
    """Gradients through out and lse, sinks and caps; a dozen batches, one graph; as eager, on torch to the bit."""
    leaves = [*inputs(), torch.randn(4).requires_grad_()]

    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, mask: IntervalMask) -> Tensor:
        out, lse = attention(q * 1, k, v, mask, softcap=3.0, sink=sink, backend=backend)
        return out.square().sum() + lse.sum()

    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=graphs)
    for cu in BATCHES * 3:
        mask = IntervalMask.from_cu_seqlens(cu)
        got, want = compiled(*leaves, mask), run(*leaves, mask)
        gradients = (torch.autograd.grad(x, leaves) for x in (got, want))
        for a, b in zip((got, *next(gradients)), (want, *next(gradients))):
            tolerance = 0 if backend == "torch" else 1e-5
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert graphs.frame_count == 1


def test_the_operator_finds_what_its_mask_keeps() -> None:
    """The plan of a mask is made once for all layers and both directions, and dies with the mask."""
    mask = IntervalMask.from_cu_seqlens([0, 9, 20])
    assert IntervalMask.of_sides(*mask.sides) is mask
    q, k, v = inputs()
    attention_op(q, k, v, None, list(mask.sides), None, None, "torch")
    assert any(key[0] == "staircase" for key in mask.cache if isinstance(key, tuple))
    sides = mask.sides
    other = IntervalMask.of_sides(*(x.clone() for x in sides))
    assert other is not mask and other.pairs() == mask.pairs()
    del mask
    assert IntervalMask.of_sides(*sides).cache.keys() == {"pairs"}


def test_compiled_refusals_come_when_it_runs() -> None:
    compiled = torch.compile(lambda q, k, v, m: attention(q, k, v, m)[0], fullgraph=True, backend="aot_eager")
    q, k, v = (x.detach() for x in inputs())
    with pytest.raises(ValueError, match="covers 21 queries"):
        compiled(q, k, v, IntervalMask.from_cu_seqlens([0, 21]))
    with pytest.raises(ValueError, match="bands 0 and 1 overlap"):
        compiled(q, k, v, [IntervalMask.from_cu_seqlens([0, 20])] * 2)


def test_merge_and_codec_compile_whole() -> None:
    spec = CODECS["fp8"]
    assert spec is not None

    def merged(outs: list[Tensor], lses: list[Tensor]) -> Tensor:
        out, lse = merge([x * 1 for x in outs], lses)
        return out.square().sum() + lse.sum()

    def coded(x: Tensor) -> tuple[Tensor, ...]:
        wire = encode(x * 1, spec)
        wires = torch.stack([wire, wire])
        both = decode_sum_encode(wires, spec, x.shape, out=torch.empty_like(wire))
        return wire, both, decode_sum(wires, spec, x.shape), decode(both, spec, x.shape, torch.bfloat16, trusted=True)

    outs = [torch.randn(7, 3, 4).requires_grad_() for _ in range(3)]
    lses = [torch.randn(3, 7).requires_grad_() for _ in range(3)]
    with torch.no_grad():
        lses[0][:, 2] = -float("inf")
    got, want = (
        torch.autograd.grad(f(outs, lses), outs + lses)
        for f in (torch.compile(merged, fullgraph=True, backend="aot_eager"), merged)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    x = torch.randn(9, 200)
    for a, b in zip(torch.compile(coded, fullgraph=True, backend="aot_eager")(x), coded(x)):
        assert torch.equal(a, b)
