"""Sizes of wires, in closed form."""

import re

import pytest

from parallel.plan.codec import CODECS, GROUPS, CodecSpec, codec_named


@pytest.mark.parametrize("group", GROUPS)
def test_a_value_costs_a_byte_and_its_share_of_two_scales(group: int):
    """1 + 8/G bytes where groups are full and even in number: 1.0625 at G = 128."""
    n = 2 * group * 1000
    assert CodecSpec(group=group).wire_bytes((n,)) - 16 == n * (1 + 8 / group)
    assert CodecSpec("int4", group).wire_bytes((n,)) - 16 == n * (0.5 + 8 / group)


@pytest.mark.parametrize(
    ("shape", "view", "groups"),
    [((), "hidden", 1), ((0,), "hidden", 0), ((1,), "hidden", 1), ((129,), "strided", 2), ((5, 100), "hidden", 5),
     ((5, 3, 50), "strided", 10), ((5, 100), "tokens", 100), ((129, 100), "tokens", 200), ((0, 7), "tokens", 0)],
)  # fmt: skip
def test_groups_never_span_two_rows_of_the_view(shape: tuple[int, ...], view: str, groups: int):
    codec = CodecSpec(view=view)
    assert codec.groups(shape) == groups
    assert codec.wire_bytes(shape) == 16 + -(-groups * 136 // 16) * 16


def test_names():
    assert codec_named("none") is None
    assert codec_named("fp8") == CodecSpec("e4m3", 128) == CODECS["fp8"]
    assert codec_named("int4/32") == CodecSpec("int4", 32)


@pytest.mark.parametrize(
    ("name", "says"), [("fp9", "unknown codec 'fp9'"), ("fp8/100", "group cannot be 100"), ("none/32", "no group"),
                       ("fp8/x", "no group 'x'")]
)  # fmt: skip
def test_refusals(name: str, says: str):
    with pytest.raises(ValueError, match=re.escape(says)):
        codec_named(name)


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match=re.escape("(3, -1) has a negative size")):
        CodecSpec().groups((3, -1))
