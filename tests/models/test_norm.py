import pytest
import torch

from models.norm import LayerNorm, RMSNorm

CASES = [(RMSNorm, torch.bfloat16), (LayerNorm, torch.bfloat16), (RMSNorm, torch.float16), (LayerNorm, torch.float16)]


@pytest.mark.parametrize("kind, dtype", CASES)
def test_narrow_inputs_are_normalised_in_fp32_and_rounded_once(kind, dtype):
    norm = kind(33, 1e-5)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(33))
    x = (300 * torch.randn(7, 33)).to(dtype)  # its squares overflow fp16
    got = norm(x)
    assert got.dtype == dtype and bool(got.isfinite().all())
    assert torch.equal(got, norm(x.float()).to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norm(x), got)


def test_a_row_of_zeros_stays_finite():
    for kind in (RMSNorm, LayerNorm):
        norm = kind(5, 1e-6)
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.fill_(1.0)
        x = torch.zeros(2, 5, requires_grad=True)
        norm(x).sum().backward()
        assert x.grad is not None and bool(x.grad.isfinite().all())
