"""The fused codec's launches, and its bytes against its twin's. Interpreted only."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels.codec import api as fp8
from kernels.codec import torch_codec as fp8_torch
from kernels.compile.runtime import interpreted
from parallel.plan.codec import CODE_BITS, GROUPS, VIEWS, CodecSpec
from tests.kernels.values import normal, rough

if not interpreted():
    pytest.skip("test_triton.py runs this file in a process that interprets kernels", allow_module_level=True)

from kernels.codec import triton_codec as fp8_triton

FP8 = CodecSpec()
STAGES = [{"hadamard": h, "alpha": a} for h, a in itertools.product((True, False), repeat=2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_fused", lambda x: True)


def test_one_launch_each(monkeypatch: pytest.MonkeyPatch):
    launched: list[str] = []

    class Counted:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(fp8_triton, name)

        def __getitem__(self, grid: tuple[int]):
            launched.append(self.name)
            return self.kernel[grid]

    for name in ("fp8_encode", "fp8_decode", "fp8_sum_encode"):
        monkeypatch.setattr(fp8_triton, name, Counted(name))
    wires = torch.stack([fp8.encode(normal(3, 100), FP8)] * 3)
    fp8.decode(wires[0], FP8, (3, 100))
    fp8.decode_sum(wires, FP8, (3, 100))
    fp8.decode_sum_encode(wires, FP8, (3, 100))
    assert launched == ["fp8_encode", "fp8_decode", "fp8_decode", "fp8_sum_encode"]


def same_bytes(codec: CodecSpec, dtype: torch.dtype) -> None:
    """Every byte of both wires, every bit of both tensors, on values of all kinds."""
    x = rough(8, 300).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    wires = torch.stack([fp8_torch.encode(v, codec) for v in (x, x.flip(0), x.flip(1) * 0.01)])
    assert torch.equal(fp8.encode(x, codec), wires[0])
    want = fp8_torch.decode(wires[0], codec, x.shape, dtype)
    torch.testing.assert_close(fp8.decode(wires[0], codec, x.shape, dtype), want, rtol=0, atol=0, equal_nan=True)
    want = fp8_torch.decode_sum(wires, codec, x.shape)
    torch.testing.assert_close(fp8.decode_sum(wires, codec, x.shape), want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(fp8.decode_sum_encode(wires, codec, x.shape), fp8_torch.decode_sum_encode(wires, codec, x.shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", list(CODE_BITS))
def test_bytes_of_the_twin(form: str, dtype: torch.dtype):
    """A covering subset."""
    i = list(CODE_BITS).index(form) + DTYPES.index(dtype)
    group, view = ((32, "hidden"), (128, "strided"), (64, "tokens"))[i % 3]
    same_bytes(CodecSpec(form, group, view=view, **STAGES[i % 4]), dtype)


@pytest.mark.deep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("form", list(CODE_BITS))
def test_all_bytes_of_the_twin(form: str, stages: dict[str, bool], dtype: torch.dtype):
    for group, view in itertools.product(GROUPS, VIEWS):
        same_bytes(CodecSpec(form, group, view=view, **stages), dtype)


@pytest.mark.parametrize("group", GROUPS)
def test_bytes_at_every_group(group: int):
    codec = CodecSpec(group=group)
    x = rough(3, 1100)
    wire = fp8.encode(x, codec)
    assert torch.equal(wire, fp8_torch.encode(x, codec))
    want = fp8_torch.decode(wire, codec, x.shape, x.dtype)
    torch.testing.assert_close(fp8.decode(wire, codec, x.shape), want, rtol=0, atol=0, equal_nan=True)
