"""What a step, a buffer and a message cost and hold, by hand."""

import pytest

from parallel.plan.ir import CLASSES, AttentionShape, Buffer, fields_of, token_bytes, width_of
from parallel.plan.tokens import TokenSet

SHAPE = AttentionShape(H=6, Hkv=2, D=8, Dv=16, dtype="bf16")


def test_key_heads_of_query_heads():
    """Three query heads share a key head."""
    assert SHAPE.group == 3
    wanted = {(0, 6): (0, 2), (0, 3): (0, 1), (0, 1): (0, 1), (2, 4): (0, 2), (3, 6): (1, 2), (5, 6): (1, 2)}
    assert {heads: SHAPE.key_heads(heads) for heads in wanted} == wanted
    assert SHAPE.key_heads((2, 2)) == SHAPE.key_heads((3, 3)) == (0, 0)


@pytest.mark.parametrize(("dtype", "model", "exact"), [("fp64", 8, 8), ("fp32", 4, 4), ("bf16", 2, 4), ("fp16", 2, 4)])
def test_bytes_of_a_number(dtype: str, model: int, exact: int):
    shape = AttentionShape(4, 2, 8, 8, dtype)
    assert (shape.item_bytes(False), shape.item_bytes(True)) == (model, exact)


def test_the_largest_and_least_shapes():
    for values in ((1, 1, 1, 1), (8, 8, 256, 256), (8, 1, 1, 256)):
        AttentionShape(*values)
    for values, match in (
        ((0, 1, 8, 8), "1 key heads"), ((4, 0, 8, 8), "0 key heads"), ((4, 8, 8, 8), "8 key heads"),
        ((4, 2, 0, 8), "D=0 and Dv=8"), ((4, 2, 8, 257), "D=8 and Dv=257"), ((4, 2, 257, 8), "D=257"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            AttentionShape(*values)
    with pytest.raises(ValueError, match="dtype='fp8' is unknown; choose one of fp64, fp32, bf16, fp16"):
        AttentionShape(4, 2, 8, 8, "fp8")


# kind -> its fields: name, class, whether its heads are key heads, width, bytes of a number where sums are exact
FIELDS = {
    "q": [("q", "q", False, 8, 2)],
    "kv": [("k", "kv", True, 8, 2), ("v", "kv", True, 16, 2)],
    "out": [("out", "out", False, 16, 2)],
    "partial": [("out", "out", False, 16, 4), ("lse", "lse", False, 1, 4)],
    "grad_out": [("dout", "grad_out", False, 16, 2)],
    "stats": [("lse", "lse", False, 1, 4), ("delta", "lse", False, 1, 4)],
    "grad_q": [("dq", "grad_q", False, 8, 4)],
    "grad_kv": [("dk", "grad_kv", True, 8, 4), ("dv", "grad_kv", True, 16, 4)],
}


@pytest.mark.parametrize("kind", FIELDS)
def test_fields_and_bytes_of_a_kind(kind: str):
    fields = fields_of(kind)  # pyright: ignore[reportArgumentType]
    found = [(f.name, f.traffic, f.keys, width_of(f.name, SHAPE), SHAPE.item_bytes(f.exact)) for f in fields]
    assert found == FIELDS[kind] and {f.traffic for f in fields} <= set(CLASSES)
    each = token_bytes(kind, (1, 4), True, SHAPE)  # pyright: ignore[reportArgumentType]
    assert each == [(traffic, 3 * width * size) for _, traffic, _, width, size in FIELDS[kind]]
    rounded = token_bytes(kind, (1, 4), False, SHAPE)  # pyright: ignore[reportArgumentType]
    assert rounded == [(traffic, 3 * width * 2) for _, traffic, _, width, _ in FIELDS[kind]]


def test_a_buffer_reserves_its_capacity():
    tokens = TokenSet.of((0, 5))
    assert Buffer("grad_kv", tokens, (0, 2), True, capacity=7).bytes(SHAPE) == 7 * 2 * (8 + 16) * 4
    assert Buffer("grad_kv", tokens, (0, 2), capacity=7).bytes(SHAPE) == 7 * 2 * (8 + 16) * 2
    plain = Buffer("q", tokens, (0, 6))
    assert (plain.role, plain.exact, plain.capacity) == ("temporary", False, 0)
