"""The AMD reader on hand-written lines."""

import pytest

from bench.kernels import gcn
from bench.kernels.listing import Function, Loop, innermost_loops


def read(*lines: str) -> Function:
    return gcn.parse("\n".join(line if line.endswith(":") else f"\t{line}" for line in lines))[""]


def whole(function: Function) -> Loop:
    return Loop(0, tuple(range(len(function.instructions))))


@pytest.mark.parametrize(
    "line, unit",
    [
        ("v_mfma_f32_32x32x8_bf16_1k a[0:15], v[2:3], v[4:5], a[0:15]", "tensor"),
        ("v_exp_f32_e32 v1, v2", "exp"),
        ("v_fma_f32 v1, v2, v3, v4", "fp"),
        ("v_pk_mul_f32 v[0:1], v[2:3], v[4:5]", "fp"),
        ("v_cmp_lt_f32_e32 vcc, v1, v2", "integer"),
        ("v_cndmask_b32_e32 v1, v2, v3, vcc", "integer"),
        ("s_add_i32 s1, s2, s3", "integer"),
        ("ds_read_b128 v[0:3], v4 offset:16", "shared"),
        ("global_load_dwordx4 v[0:3], v4, s[0:1]", "global"),
        ("buffer_store_dword v1, off, s[0:3], 0 offset:4 ; 4-byte Folded Spill", "spill"),
        ("scratch_load_dword v1, off, off", "spill"),
        ("s_waitcnt lgkmcnt(0)", "sync"),
        ("s_cbranch_scc1 .LBB0_1", "branch"),
    ],
)
def test_every_instruction_has_a_class(line: str, unit: str):
    assert read(line).instructions[0].unit == unit


def test_flops_bytes_and_the_vector_port():
    function = read(
        "v_mfma_f32_32x32x8_bf16_1k a[0:15], v[2:3], v[4:5], a[0:15]",
        "v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3]",
        "ds_read_b128 v[0:3], v4",
        "ds_read2_b64 v[0:3], v4 offset1:1",
        "ds_write_b16 v4, v5",
        "s_add_i32 s1, s2, s3",
        "v_add_u32 v1, v2, v3",
    )
    assert gcn.flops(function, whole(function), 4) == 4 * 2 * (32 * 32 * 8 + 16 * 16 * 16)
    assert gcn.shared_bytes(function, whole(function), 2) == (2 * 64 * (16 + 16 + 2), 0)
    assert gcn.issued(function, whole(function)) == 3


def test_products_fly_until_read_or_done():
    """A 32x32x8 product occupies the unit for 8 slots of four cycles."""
    function = read(
        ".LBB0_1:",
        "v_mfma_f32_32x32x8_bf16_1k a[0:15], v[2:3], v[4:5], a[0:15]",
        "v_add_f32 v20, v21, v22",
        "v_accvgpr_read_b32 v30, a15",
        "v_add_f32 v23, v21, v22",
        "v_mfma_f32_32x32x8_bf16_1k a[0:15], v[2:3], v[4:5], a[0:15]",
        *["v_mul_f32 v40, v41, v42"] * 10,
        "s_cbranch_scc1 .LBB0_1",
    )
    (loop,) = innermost_loops(function)
    flying = gcn.overlapped(function, loop)
    assert flying[1] and not flying[3]
    assert flying[5:15] == [True] * 7 + [False] * 3


def test_resources_come_from_the_metadata():
    text = ".group_segment_fixed_size: 128\n .private_segment_fixed_size: 16\n .vgpr_count:     256\n"
    assert gcn.resource_usage(text, "k") == (256, 16, 128)
    with pytest.raises(ValueError, match=r"no \.vgpr_count"):
        gcn.resource_usage("", "k")


def test_comparisons_are_of_integers():
    function = read("v_cmp_lt_f32_e32 vcc, v1, v2", "v_cndmask_b32_e32 v1, v2, v3, vcc", "v_cmp_lt_i32_e32 vcc, v1, v2")
    assert gcn.comparisons(function, whole(function)) == 1
