"""Whatever stands for an argument of the public functions by mistake is refused in one sentence that names it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest
import torch

from kernels import api
from kernels.api import IntervalMask


@pytest.fixture(autouse=True)
def production() -> Iterator[None]:
    """Annotations are not checked, as outside of tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def x(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape)


def cu(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# what people pass by mistake; an argument's row in TABLE says which of these it takes
WRONG: dict[str, Any] = {
    "None": None,
    "text": "text",
    "2.5": 2.5,
    "nan": float("nan"),
    "-3": -3,
    "True": True,
    "an object": object(),
    "a list of nothing": [],
    "a list of None": [None, None],
    "a list of text": ["a", "b"],
    "a list of fractions": [0.0, 2.5, 4.0],
    "a dict": {},
    "a number as a tensor": torch.tensor(1.0),
    "a vector": x(4),
    "a matrix": x(2, 4),
    "four dims": x(1, 4, 2, 8),
    "whole numbers": torch.zeros(4, 2, 8, dtype=torch.int64),
    "whole numbers in two dims": torch.zeros(2, 4, dtype=torch.int32),
    "booleans": torch.zeros(4, 2, 8, dtype=torch.bool),
    "complex": torch.zeros(4, 2, 8, dtype=torch.complex64),
    "another dtype": torch.zeros(4, 2, 8, dtype=torch.float64),
    "a complex vector": torch.zeros(4, dtype=torch.complex64),
    "a device's": torch.zeros(4, 2, 8, device="meta"),
}

SPOKEN = {"mask": r"masks?\b", "outs": "out", "lses": "lse"}  # how sentences name what has many
MASK = IntervalMask.from_cu_seqlens([0, 4])
QKV = {"q": x(4, 2, 8), "k": x(4, 2, 8), "v": x(4, 2, 8)}
VARLEN = QKV | {"cu_seqlens_q": cu(0, 4), "cu_seqlens_k": cu(0, 4), "max_seqlen_q": 4, "max_seqlen_k": 4}
UNSUPPORTED = ("alibi_slopes", "block_table", "seqused_q", "seqused_k", "leftpad_k", "qv", "q_descale", "k_descale",
               "v_descale", "out")  # fmt: skip

# function, good arguments, and for each argument what of WRONG it takes
TABLE: list[tuple[str, Callable[..., Any], dict[str, Any], dict[str, set[str]]]] = [
    (
        "attention", api.attention, QKV | {"mask": MASK},
        {"q": set(), "k": set(), "v": set(), "mask": set(), "softmax_scale": {"None", "2.5", "-3"},
         "softcap": {"None", "2.5"}, "sink": {"None"}, "backend": set()},
    ),
    (
        "flash_attn_varlen_func", api.flash_attn_varlen_func, VARLEN,
        {"q": set(), "k": set(), "v": set(), "cu_seqlens_q": set(), "cu_seqlens_k": set(), "max_seqlen_q": set(),
         "max_seqlen_k": set(), "dropout_p": set(), "softmax_scale": {"None", "2.5", "-3"}, "causal": {"True"},
         "window_size": set(), "softcap": {"None", "2.5"}, "deterministic": {"True"}, "return_attn_probs": {"True"},
         "s_aux": {"None"}, "learnable_sink": {"None"}} | {name: {"None"} for name in UNSUPPORTED},
    ),
    ("merge", api.merge, {"outs": [x(4, 2, 8)], "lses": [x(2, 4)]}, {"outs": {"four dims"}, "lses": set()}),
    (
        "IntervalMask", IntervalMask,
        {"k_start": cu(0, 0), "k_end": cu(1, 2), "q_start": cu(0, 1), "q_end": cu(2, 2)},
        {"k_start": set(), "k_end": set(), "q_start": set(), "q_end": set()},
    ),
    (
        "from_rows", IntervalMask.from_rows, {"k_start": cu(0, 0), "k_end": cu(1, 2), "Tk": 2},
        {"k_start": set(), "k_end": set(), "Tk": set()},
    ),
    (
        "from_cu_seqlens", IntervalMask.from_cu_seqlens, {"cu_seqlens_q": [0, 4]},
        {"cu_seqlens_q": set(), "cu_seqlens_k": {"None"}, "causal": {"True"}, "window": {"None"}, "device": {"None"},
         "total_q": {"None"}, "total_k": {"None"}},
    ),
    (
        "from_documents", IntervalMask.from_documents, {"starts": [0], "stops": [4], "total": 4},
        {"starts": set(), "stops": set(), "total": set(), "causal": {"True"}, "window": {"None"}, "device": {"None"}},
    ),
    (
        "from_positions", IntervalMask.from_positions,
        {"q_positions": [0, 1], "k_positions": [0, 1], "starts": [0], "stops": [4]},
        {"q_positions": {"a list of nothing"}, "k_positions": {"a list of nothing"}, "starts": set(), "stops": set(),
         "causal": {"True"}, "window": {"None"}, "device": {"None"}},
    ),
    ("to", lambda device: MASK.to(device), {}, {"device": set()}),
]  # fmt: skip
CASES = [
    pytest.param(function, good, argument, takes, id=f"{name}-{argument}")
    for name, function, good, arguments in TABLE
    for argument, takes in arguments.items()
]  # fmt: skip


def test_every_argument_is_in_the_table() -> None:
    names = {name for name, *_ in TABLE}
    assert {name for name in api.__all__ if callable(getattr(api, name))} <= names
    for _, function, _, arguments in TABLE:
        assert set(arguments) == set(inspect.signature(function).parameters)


def complaint(function: Callable[..., Any], good: dict[str, Any], argument: str, value: Any) -> str | None:
    """What is wrong with how a function takes a wrong value, or None."""
    try:
        function(**good | {argument: value})
    except (ValueError, TypeError) as error:
        message = str(error)
        if "\n" in message or not re.search(r"\b" + SPOKEN.get(argument, rf"{argument}\b"), message):
            return f"{type(error).__name__}: {message}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    else:
        return "taken"
    return None


@pytest.mark.parametrize(("function", "good", "argument", "takes"), CASES)
def test_wrong_arguments_are_named(
    function: Callable[..., Any], good: dict[str, Any], argument: str, takes: set[str]
) -> None:
    """ValueError or TypeError, in one line; what an argument takes is taken."""
    if good:
        function(**good)
    found = {what: complaint(function, good, argument, value) for what, value in WRONG.items() if what not in takes}
    found = {what: why for what, why in found.items() if why}
    assert not found, "\n".join(f"{what}: {why}" for what, why in found.items())
    for what in takes:
        function(**good | {argument: WRONG[what]})
