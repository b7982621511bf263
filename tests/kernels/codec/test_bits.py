"""Codes by integer arithmetic against torch's cast of the clamped value."""

import pytest
import torch
from torch import Tensor

from kernels.codec.bits import FLOAT8, from_codes, to_codes


def cast(x: Tensor, name: str) -> Tensor:
    kind = FLOAT8[name]
    return x.clamp(-kind.largest, kind.largest).to(kind.dtype).view(torch.uint8)


@pytest.mark.parametrize("name", list(FLOAT8))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_finite_half(name: str, dtype: torch.dtype):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()
    x = x[x.isfinite()]
    assert torch.equal(to_codes(x, name), cast(x, name))


@pytest.mark.parametrize("name", list(FLOAT8))
def test_a_million_fp32(name: str):
    """Any bits at all, and as many where the format's steps, ties and subnormals are."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (1_000_000,), generator=g).to(torch.int32).view(torch.float32)
    near = torch.randn(500_000, generator=g) * torch.exp2(torch.rand(500_000, generator=g) * 44 - 24)
    codes = torch.arange(256).to(torch.uint8).view(FLOAT8[name].dtype).float()
    codes = codes[codes.isfinite()].unique()
    ties = (codes[1:] + codes[:-1]) / 2
    edges = torch.cat([codes, ties, ties * (1 + 2**-23), ties * (1 - 2**-23), torch.tensor([torch.inf, -torch.inf])])
    x = torch.cat([x[x.isfinite()], near, edges])
    assert torch.equal(to_codes(x, name), cast(x, name))


@pytest.mark.parametrize("name", list(FLOAT8))
def test_back(name: str):
    """Every code of a finite value; codes mixed up between formats are other numbers (0x38 is 1 or .5)."""
    codes = torch.arange(256).to(torch.uint8)
    want = codes.view(FLOAT8[name].dtype).float()
    finite = want.isfinite()
    assert torch.equal(from_codes(codes, name)[finite], want[finite])
    assert from_codes(torch.tensor([0x38], dtype=torch.uint8), name).item() == {"e4m3": 1, "e4m3fnuz": 0.5}.get(
        name, 0.5
    )


@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("int4", 7)])
def test_integers(name: str, largest: int):
    """Ties to even, clamped, two's complement."""
    x = torch.tensor([0.5, 1.5, -0.5, -2.5, 1e9, -1e9, -1.0])
    back = from_codes(to_codes(x, name), name)
    assert back.tolist() == [0, 2, 0, -2, largest, -largest, -1]
