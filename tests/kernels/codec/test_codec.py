"""The codec's rules, on both of its paths, and the fused kernels' bytes against their twin's.

The Triton path runs in processes that interpret it (`test_triton.py`).
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.codec import api as fp8
from kernels.codec import torch_codec as fp8_torch
from kernels.codec.bits import LARGEST
from kernels.codec.wire import header_of, layout_of
from kernels.compile.runtime import interpreted
from parallel.plan.codec import CODE_BITS, GROUPS, VIEWS, CodecSpec
from tests.kernels.values import normal

FP8 = CodecSpec()
PLAIN = CodecSpec(hadamard=False, alpha=False)
STAGES = [{"hadamard": h, "alpha": a} for h, a in itertools.product((True, False), repeat=2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["torch", "triton"] if interpreted() else ["torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "triton":
        monkeypatch.setattr(fp8, "_fused", lambda x: True)
    return request.param


def some(path: str, items: list, step: int = 3) -> list:
    """All of them, or a few where each takes the interpreter a while."""
    return items if path == "torch" else items[::step]


def through(x: Tensor, codec: CodecSpec) -> Tensor:
    return fp8.decode(fp8.encode(x, codec), codec, x.shape, x.dtype)


def error(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


# the transform


@pytest.mark.parametrize("group", GROUPS)
def test_hadamard_is_orthonormal(group: int):
    H = fp8_torch.hadamard(torch.eye(group)) * fp8_torch.norm_of(group)
    torch.testing.assert_close(H @ H.T, torch.eye(group), rtol=0, atol=1e-6)
    x = normal(3, group)
    twice = fp8_torch.hadamard(fp8_torch.hadamard(x)) * fp8_torch.norm_of(group) ** 2
    torch.testing.assert_close(twice, x, rtol=1e-6, atol=1e-6)


# what a wire is


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (31,), (3, 128), (5, 3, 50), (129, 7), (0, 8), (8, 0), (1, 513)])
def test_sizes_are_those_of_the_plan(path: str, view: str, shape: tuple[int, ...]):
    """Tails, odd numbers of groups, nothing, one value."""
    for group, form in some(path, list(itertools.product((32, 128), CODE_BITS)), 4):
        codec = CodecSpec(form, group, view=view)
        x = normal(*shape)
        wire = fp8.encode(x, codec)
        assert wire.dtype == torch.uint8 and wire.shape == (codec.wire_bytes(shape),)
        assert layout_of(codec, shape).groups == codec.groups(shape)
        back = fp8.decode(wire, codec, shape)
        assert back.shape == shape
        if x.numel() and form != "int4":
            assert error(back, x) < 0.08


def test_the_block_of_the_standard(path: str):
    x = torch.tensor([448, -448, 1, 0.0625, 0.875, 17, 2**-10, 2**-9])
    assert through(x, PLAIN).tolist() == [448, -448, 1, 0.0625, 0.875, 16, 0, 0.001953125]


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_whole_numbers_come_back_as_they_are(path: str, form: str):
    """Where the largest is the format's own, a step is 1: two nibbles of a byte are two values."""
    top = int(LARGEST[form])
    x = torch.cat([torch.arange(-top, top + 1), torch.tensor([top, -top, 0, 1, -1])]).float()
    x = torch.cat([x, x.flip(0)])
    codec = CodecSpec(form, 32, hadamard=False, alpha=False)
    for values in (x[: len(x) // 32 * 32], x[:13]) if len(x) >= 32 else (x, x[:13]):
        values = values.clone()
        values[::32] = top  # in every group
        back = through(values, codec)
        torch.testing.assert_close(back, values, rtol=1e-6, atol=1e-6)
        both = fp8.decode_sum(torch.stack([fp8.encode(values, codec)] * 2), codec, values.shape)
        torch.testing.assert_close(both, 2 * values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("form", "reach", "floor"), [("e4m3", 16, 10), ("e5m2", 8, 17), ("e4m3fnuz", 16, 11)])
def test_bound_without_a_transform(path: str, form: str, reach: int, floor: int):
    """|x - x'| is at most half a step of the format: |x| / 16 and scale x 2^-10 for e4m3."""
    x = normal(64, 128) * torch.exp2(normal(64, 128, seed=1) * 6)
    codec = replace(PLAIN, format=form)
    scale = x.abs().amax(1, keepdim=True) / LARGEST[form]
    assert bool(((through(x, codec) - x).abs() <= torch.maximum(x.abs() / reach, scale * 2**-floor) * 1.000001).all())


def test_bound_with_the_transform(path: str):
    """In the transformed values, so in all of a group together."""
    x = normal(64, 128) * torch.exp2(normal(64, 1, seed=1) * 6)
    norm = fp8_torch.norm_of(128)
    y, back = (fp8_torch.hadamard(v) * norm for v in (x, through(x, FP8)))
    scale = y.abs().amax(1, keepdim=True) / 448
    assert bool(((y - back).abs() <= torch.maximum(y.abs() / 16, scale * 2**-10) + scale * 1e-3).all())


@pytest.mark.parametrize("n", [2, 4, 8])
def test_gaussian_error_does_not_grow_with_the_ranks(path: str, n: int):
    """.027 after one coding, .037 after a sum that is coded again."""
    xs = normal(n, 16, 256)
    wires = torch.stack([fp8.encode(x, FP8) for x in xs])
    assert error(fp8.decode(wires[0], FP8, (16, 256)), xs[0]) < 0.027
    assert error(fp8.decode_sum(wires, FP8, (16, 256)), xs.sum(0)) < 0.027
    middle = fp8.decode_sum_encode(wires, FP8, (16, 256))
    assert error(fp8.decode(middle, FP8, (16, 256)), xs.sum(0)) < 0.037


E4M3 = {1.0: 0x38, 2.0: 0x40, -2.0: 0xC0, 0.5: 0x30, 448.0: 0x7E, -448.0: 0xFE}


def by_hand(codec: CodecSpec, values: int, codes: list[list[float]], scales: list[tuple[float, float]]) -> Tensor:
    """A wire written down: for each group its first codes' values (the rest 0), s, and alpha."""
    body = torch.zeros(len(codes), codec.group, dtype=torch.uint8)
    for row, numbers in zip(body, codes):
        row[: len(numbers)] = torch.tensor([E4M3[number] for number in numbers], dtype=torch.uint8)
    head = torch.frombuffer(bytearray(header_of(codec, values)), dtype=torch.uint8)
    wire = torch.cat([head, body.flatten(), torch.tensor(scales).view(torch.uint8).flatten()])
    return torch.cat([wire, wire.new_zeros(-len(wire) % 16)])


def test_wires_of_unequal_alphas_add_up(path: str):
    """By hand: a value is code x s / alpha, each wire with its own. All numbers here are exact in fp32."""
    codec = CodecSpec(group=32, hadamard=False)
    big = by_hand(codec, 64, [[1, 2, 448], [1]], [(8.0, 2.0**-4), (1.0, 1.0)])  # units of 128, and of 1
    small = by_hand(codec, 64, [[2, -2, -448, 0.5], [2, 2]], [(0.5, 2.0**3), (1.0, 2.0**20)])  # of 1/16, and of 2^-20
    wanted = torch.zeros(2, 32)
    wanted[0, :4] = torch.tensor([128 + 2 / 16, 256 - 2 / 16, 448 * 128 - 448 / 16, 0.5 / 16])
    wanted[1, :2] = torch.tensor([1 + 2 * 2.0**-20, 2 * 2.0**-20])
    for wires in ([big, small], [small, big]):
        assert torch.equal(fp8.decode_sum(torch.stack(wires), codec, (2, 32)), wanted)
    assert torch.equal(fp8.decode(small, codec, (2, 32))[0, :4], torch.tensor([2.0, -2, -448, 0.5]) / 16)
    # summed again as a wire: in units of the least alpha, which travels on
    middle = fp8.decode_sum_encode(torch.stack([big, small]), codec, (2, 32))
    alphas = middle[16 + 64 :].view(torch.float32).view(2, 2)[:, 1]
    assert alphas.tolist() == [2.0**-4, 1.0]
    top = (448 * 128 - 448 / 16) * 2.0**-4
    assert middle[16 + 64 :].view(torch.float32)[0].item() == torch.tensor(top / 448, dtype=torch.float32).item()
    assert middle[16:20].tolist() == [E4M3[1.0], E4M3[2.0], E4M3[448.0], 0x00]  # 1.001, 1.999, 448, 0.0002


def test_transformed_wires_of_unequal_alphas_add_up(path: str):
    """A lone first code of c is c s / sqrt(G) / alpha everywhere: of 64, an eighth."""
    codec = CodecSpec(group=64)
    wires = [
        by_hand(codec, 64, [[c]], [(s, a)]) for c, s, a in ((2.0, 4.0, 2.0**-3), (1.0, 1.0, 2.0**5), (-2.0, 2.0, 1.0))
    ]
    found = fp8.decode_sum(torch.stack(wires), codec, (1, 64))
    assert torch.equal(found, torch.full((1, 64), 2 * 4 / 8 * 8 + 1 / 8 / 32 - 2 * 2 / 8))


def test_the_wire_of_zeros(path: str):
    """Scales are made of 2^-100 at least, so that no division by them overflows or is flushed."""
    for codec in (PLAIN, CodecSpec(group=32)):
        wire = fp8.encode(torch.zeros(1, codec.group), codec)
        s, alpha = wire[16 + codec.group :][:8].view(torch.float32).tolist()
        norm = fp8_torch.norm_of(codec.group) if codec.hadamard else 1.0
        assert s == torch.tensor(2.0**-100 * norm, dtype=torch.float32).div(448).item()
        assert alpha == (2.0**72 if codec.alpha else 1.0)
        assert not wire[16 : 16 + codec.group].any()


def test_coding_at_every_hop_is_worse():
    """Eight hops of a ring, each of which codes the running sum: what decode_sum is there to avoid."""
    xs = normal(8, 64, 256)
    running = xs[0]
    for x in xs[1:]:
        running = through(running, FP8) + x
    hops = error(through(running, FP8), xs.sum(0))
    once = error(fp8.decode_sum(torch.stack([fp8.encode(x, FP8) for x in xs]), FP8, (64, 256)), xs.sum(0))
    assert 0.05 < hops < 0.06 and once < 0.027


@pytest.mark.parametrize("stages", STAGES)
def test_sums_are_sums(path: str, stages: dict[str, bool]):
    codec = replace(FP8, **stages)
    xs = normal(3, 5, 200) * torch.tensor([1.0, 1e-3, 1e4])[:, None, None]
    wires = torch.stack([fp8.encode(x, codec) for x in xs])
    want = sum(fp8.decode(wire, codec, (5, 200)) for wire in wires)
    total = fp8.decode_sum(wires, codec, (5, 200))
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-2)
    again = fp8.decode(fp8.decode_sum_encode(wires, codec, (5, 200)), codec, (5, 200))
    assert error(again, total) < 0.03


# bad values: the same on every path


@pytest.mark.parametrize("stages", STAGES)
def test_zero_groups_are_zeros(path: str, stages: dict[str, bool]):
    """One value among zeros: no NaN, and zeros everywhere else but in its own group."""
    codec = replace(FP8, **stages)
    x = torch.zeros(256, 256)
    assert through(x, codec).abs().max() == 0
    x[3, 5] = 2.0
    back = through(x, codec)
    assert bool(back.isfinite().all()) and abs(back[3, 5].item() - 2) < 0.1
    back[3, :128] = 0
    assert back.abs().max() == 0


@pytest.mark.parametrize("stages", STAGES)
def test_any_size_stays_finite(path: str, stages: dict[str, bool]):
    codec = replace(FP8, **stages)
    for size in some(path, [1e-45, 1e-41, 1e-36, 1e-20, 1.0, 1e20, 3e37]):
        x = (normal(4, 128) * size).clamp(-3.4e38, 3.4e38)
        back = through(x, codec)
        if size < 1e30 or not stages["hadamard"] or stages["alpha"]:
            assert bool(back.isfinite().all())
        if 1e-29 < size < 1e30 or (stages["alpha"] and size > 1e-40):
            assert error(back.double(), x.double()) < 0.03


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_do_not_become_infinite(path: str, dtype: torch.dtype):
    largest = torch.finfo(dtype).max
    x = torch.full((3, 128), largest, dtype=dtype)
    x[1, ::3] = 0
    x[2] *= -1
    back = through(x, FP8)
    assert bool(back.isfinite().all())
    assert back[[0, 2], 0].tolist() == pytest.approx([largest, -largest], rel=0.04)


def test_what_alpha_is_for(path: str):
    """Codes do not depend on it, since a power of two cancels; without it sums overflow and subnormals are flushed."""
    x = normal(8, 256) * torch.exp2(normal(8, 1, seed=1) * 10)
    for hadamard in (True, False):
        on, off = (replace(FP8, hadamard=hadamard, alpha=alpha) for alpha in (True, False))
        assert torch.equal(through(x, on), through(x, off))
        codes = slice(16, layout_of(on, x.shape).scales)
        assert torch.equal(fp8.encode(x, on)[codes], fp8.encode(x, off)[codes])
    huge, tiny = torch.full((1, 128), 3e38), normal(1, 128) * 1e-40
    assert bool(through(huge, replace(FP8, alpha=False)).isnan().all())
    assert error(through(huge, FP8).double(), huge.double()) < 0.04
    assert through(tiny, replace(FP8, alpha=False)).abs().max() == 0
    assert error(through(tiny, FP8).double(), tiny.double()) < 0.03


@pytest.mark.parametrize("form", list(CODE_BITS))
def test_a_bad_value_spoils_its_own_group_alone(path: str, form: str):
    for stages in some(path, STAGES):
        codec = CodecSpec(form, 32, **stages)
        x = normal(5, 96)
        x[:4, 40] = torch.tensor([math.nan, -math.nan, math.inf, -math.inf])
        wires = torch.stack([fp8.encode(v, codec) for v in (x, normal(5, 96, seed=1))])
        again = fp8.decode_sum_encode(wires, codec, x.shape)
        total = fp8.decode_sum(wires, codec, x.shape)
        for back in (fp8.decode(wires[0], codec, x.shape), total, fp8.decode(again, codec, x.shape)):
            assert bool(back[:4, 32:64].isnan().all())
            back[:4, 32:64] = 0
            assert bool(back.isfinite().all())


@pytest.mark.parametrize("view", VIEWS)
def test_strides_do_not_matter(path: str, view: str):
    codec = CodecSpec(view=view)
    base = normal(60, 140)
    for x in some(path, [base.T, base[::2], base[:, 3:], base[:, ::3], base[:1].expand(5, 140)]):
        assert torch.equal(fp8.encode(x, codec), fp8.encode(x.contiguous(), codec))


def test_documents_cannot_leak(path: str):
    """Of two tokens, what one holds changes nothing of the other, unless the view is over tokens."""
    for view in VIEWS:
        codec = CodecSpec(view=view)
        x = normal(6, 200)
        before = through(x, codec)
        x[3] = math.nan
        after = through(x, codec)
        same = torch.equal(before[[0, 1, 2, 4, 5]], after[[0, 1, 2, 4, 5]])
        assert same != (view == "tokens")


@pytest.mark.parametrize("shape", [(5, 100), (1,), (33, 31)])
def test_nothing_is_written_outside(path: str, shape: tuple[int, ...]):
    """Canaries on both sides; every byte between them is written, so that wires can be compared."""
    for group, form, view in some(path, list(itertools.product((32, 128), ("e4m3", "int4"), VIEWS))):
        codec = CodecSpec(form, group, view=view)
        size = codec.wire_bytes(shape)
        wires = []
        for fill in (0xAA, 0x55):
            slab = torch.full((size + 64,), fill, dtype=torch.uint8)
            wires.append(fp8.encode(normal(*shape), codec, out=slab[16 : 16 + size]))
            again = torch.full_like(slab, fill)
            fp8.decode_sum_encode(wires[-1][None], codec, shape, out=again[16 : 16 + size])
            for each in (slab, again):
                assert bool((each[:16] == fill).all() and (each[16 + size :] == fill).all())
            wires.append(again[16 : 16 + size])
        assert torch.equal(wires[0], wires[2]) and torch.equal(wires[1], wires[3])


def test_wires_may_lie_anywhere(path: str):
    """In a buffer with gaps, at odd addresses, transposed."""
    x = normal(2, 3, 100)
    wires = torch.stack([fp8.encode(v, FP8) for v in x])
    want = fp8.decode_sum(wires, FP8, (3, 100))
    size = wires.shape[1]
    slab = torch.zeros(2, size + 48, dtype=torch.uint8)
    for start in (0, 16, 5):
        slab[:, start : start + size] = wires
        assert torch.equal(fp8.decode_sum(slab[:, start : start + size], FP8, (3, 100)), want)
    assert torch.equal(fp8.decode_sum(wires.T.contiguous().T, FP8, (3, 100)), want)
    assert torch.equal(
        fp8.decode_sum(wires[:1].expand(2, size), FP8, (3, 100)) / 2, fp8.decode(wires[0], FP8, (3, 100))
    )


# wires that are not what they should be


@pytest.mark.parametrize(
    ("change", "says"),
    [({"format": "e4m3fnuz"}, "version 1, e4m3fnuz, groups of 128"), ({"hadamard": False}, "128, alpha, view hidden"),
     ({"view": "strided"}, "view strided, 400 values"), ({"alpha": False}, "128, hadamard, view")],
)  # fmt: skip
def test_another_codec_is_an_error(path: str, change: dict, says: str):
    """The formats' bytes differ by a factor of two, silently; where the host does not look, all is NaN."""
    wire = fp8.encode(normal(2, 200), replace(FP8, **change))
    with pytest.raises(ValueError, match=re.escape(says)):
        fp8.decode(wire, FP8, (2, 200))
    assert bool(fp8.decode(wire, FP8, (2, 200), trusted=True).isnan().all())
    good = fp8.encode(normal(2, 200), FP8)
    assert bool(fp8.decode_sum(torch.stack([good, wire]), FP8, (2, 200), trusted=True).isnan().all())
    again = fp8.decode_sum_encode(torch.stack([good, wire]), FP8, (2, 200), trusted=True)
    assert bool(fp8.decode(again, FP8, (2, 200)).isnan().all())


def test_another_size_or_version_is_an_error(path: str):
    wire = fp8.encode(normal(2, 200), FP8)
    for shape in ((2, 300), (200, 2), (4, 200)):
        with pytest.raises(ValueError, match=f"is {FP8.wire_bytes(shape)} uint8 bytes, but got"):
            fp8.decode(wire, FP8, shape)
    with pytest.raises(ValueError, match=r"400 values, but .* 402 values"):
        fp8.decode(wire, FP8, (2, 201))
    wire[2] = 2
    with pytest.raises(ValueError, match="wire 0 is version 2, e4m3"):
        fp8.decode(wire, FP8, (2, 200))
    wire[0] = 0
    with pytest.raises(ValueError, match="it begins with 0046, not 4c46"):
        fp8.decode(wire, FP8, (2, 200))


def test_refusals():
    x = normal(2, 200)
    wire = fp8.encode(x, FP8)
    with pytest.raises(ValueError, match=r"fp32, bf16 or fp16, not torch\.float64"):
        fp8.encode(x.double(), FP8)
    with pytest.raises(ValueError, match=r"fp32, bf16 or fp16, not torch\.float64"):
        fp8.decode(wire, FP8, x.shape, torch.float64)
    with pytest.raises(ValueError, match="use decode_sum"):
        fp8.decode(wire[None], FP8, x.shape)
    with pytest.raises(ValueError, match="n of 1 or more"):
        fp8.decode_sum(wire[None][:0], FP8, x.shape)
    with pytest.raises(ValueError, match="address 4 mod 16"):
        fp8.encode(x, FP8, out=torch.empty(len(wire) + 4, dtype=torch.uint8)[4:])
