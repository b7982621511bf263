import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.rotary import angles, frequencies, rotate


def stretched(frequency, factor, original):
    """Llama 3.1's rule as its paper's code states it, one channel at a time, on wavelengths."""
    wavelength = 2 * math.pi / frequency
    if wavelength < original / 4:
        return frequency
    if wavelength > original / 1:
        return frequency / factor
    smooth = (original / wavelength - 1) / (4 - 1)
    return (1 - smooth) * frequency / factor + smooth * frequency


@pytest.mark.parametrize("factor, original", [(None, None), (8.0, 8192), (32.0, 8192), (3.0, 50)])
def test_frequencies(factor, original):
    plain = [500000.0 ** (-2 * i / 64) for i in range(32)]
    want = plain if factor is None else [stretched(f, factor, original) for f in plain]
    got = frequencies(64, 500000.0, factor, original)
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-13, atol=0)
    if factor is not None:
        assert got[0] == plain[0] and got[-1] == pytest.approx(plain[-1] / factor, rel=1e-13)
        assert any(f / factor * 1.001 < g < f * 0.999 for f, g in zip(plain, got.tolist()))


def test_angles_are_exact_at_a_million_tokens():
    positions = torch.tensor([0, 1, 999_983, 1_048_575], dtype=torch.int32)
    cos, sin = angles(positions, frequencies(6, 10000.0), torch.float32)
    assert cos.dtype == sin.dtype == torch.float32
    for row, position in enumerate(positions.tolist()):
        for column in range(3):
            turned = position * 10000.0 ** (-2 * column / 6)
            assert abs(cos[row, column].item() - math.cos(turned)) < 1e-7
            assert abs(sin[row, column].item() - math.sin(turned)) < 1e-7


@settings(deadline=None)
@given(st.integers(0, 500_000), st.integers(0, 500_000), st.integers(0, 500_000))
def test_products_depend_on_the_distance_alone(a, b, shift):
    generator = torch.Generator().manual_seed(a)
    q, k = torch.randn(2, 1, 1, 8, generator=generator, dtype=torch.float64)

    def product(i, j):
        radians = frequencies(8, 10000.0)
        turned_q = rotate(q, *angles(torch.tensor([i]), radians, torch.float64))
        turned_k = rotate(k, *angles(torch.tensor([j]), radians, torch.float64))
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(product(a + shift, b + shift), product(a, b), rtol=0, atol=1e-8)


def test_rotation_is_taken_in_fp32_for_bf16():
    x = torch.randn(5, 2, 6).bfloat16()
    cos, sin = angles(torch.arange(5), frequencies(6, 100.0), torch.float32)
    assert torch.equal(rotate(x, cos, sin), rotate(x.float(), cos, sin).bfloat16())
