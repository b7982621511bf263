"""Arguments of masks and attention, one by one: a refusal is a sentence that names the argument and its form."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1
Indices = Sequence[int] | Tensor


def check_cumulative(name: str, cu: Any) -> None:
    """Raise ValueError unless `cu` is a list of whole numbers, or a tensor of them, that is not empty."""
    if isinstance(cu, Tensor):
        good = cu.dim() == 1 and cu.dtype in (torch.int32, torch.int64) and cu.numel() > 0
    else:
        good = isinstance(cu, Sequence) and len(cu) > 0 and all(isinstance(n, Integral) for n in cu)
    if not good:
        raise ValueError(
            f"{name} must be a list of whole numbers or a 1-D int32 tensor, [0, n0, n0 + n1, ...], not {spelled(cu)}"
        )


def check_count(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a whole number of at least 0; a tensor's value is not looked at."""
    if isinstance(value, Tensor):
        good = value.dim() == 0 and value.dtype in (torch.int32, torch.int64)
    else:
        good = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0
    if not good:
        raise ValueError(f"{name} must be a whole number of tokens, 0 or more, not {spelled(value)}")


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {spelled(value)}")


def is_number(value: Any) -> bool:
    """Whether it is a number that is real and no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool)


def spelled(value: Any) -> str:
    """A value in a refusal: tensors by shape, dtype and device, numbers and short text as they are, others by type."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype} on {value.device}"
    plain = value is None or isinstance(value, (str, bool, int, float, complex, list, tuple))
    return repr(value) if plain and len(repr(value)) <= 60 else type(value).__name__


def check_indices(name: str, values: Any) -> None:
    """Raise ValueError unless `values` is a list of whole numbers or a 1-D integer tensor; it may be empty."""
    if isinstance(values, Tensor):
        good = values.dim() == 1 and values.dtype in (torch.int32, torch.int64)
    else:
        good = isinstance(values, Sequence) and not isinstance(values, str)
        good = good and all(isinstance(n, Integral) and not isinstance(n, bool) for n in values)
    if not good:
        raise ValueError(f"{name} must be a list of whole numbers or a 1-D int32 tensor, not {spelled(values)}")


def check_ends(name: str, values: Any) -> None:
    """Raise ValueError unless `values` is a 1-D int32 tensor."""
    if not isinstance(values, Tensor) or values.dim() != 1 or values.dtype != torch.int32:
        raise ValueError(f"{name} must be a 1-D int32 tensor, not {spelled(values)}")


def check_window(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is None, a whole number or a pair of them."""
    sides = value if isinstance(value, tuple) and len(value) == 2 else (value,)
    if value is not None and not all(isinstance(n, Integral) and not isinstance(n, bool) for n in sides):
        raise ValueError(f"{name} must be a whole number, a pair (left, right) or None, not {spelled(value)}")


def check_device(name: str, value: Any) -> torch.device:
    """The device that `value` names. ValueError for what names none."""
    try:
        if isinstance(value, torch.device | str):
            return torch.device(value)
    except RuntimeError:
        pass
    raise ValueError(f"{name} must be a device such as 'cpu' or 'cuda:0', not {spelled(value)}")


def index_tensor(name: str, values: Indices) -> Tensor:
    """A list or integer tensor as an int64 tensor on its own device."""
    check_indices(name, values)
    return (
        values.long()
        if isinstance(values, Tensor)
        else torch.tensor([int(x) for x in values], dtype=torch.int64, device="cpu")
    )


def total_of(cu_name: str, total_name: str, cu: Tensor, total: int | None) -> int:
    """Check cumulative lengths and return the number of tokens in their buffer."""
    if cu.numel() == 0:
        raise ValueError(f"{cu_name} is empty; the cumulative lengths of no documents are [0]")
    if cu.device.type != "cpu":
        if total is None:
            raise ValueError(
                f"{cu_name} is on {cu.device}, where reading its last entry would wait for the device; "
                f"pass {total_name} (the number of tokens in the buffer), or give {cu_name} as a list"
            )
        return total
    if int(cu[0]) != 0:
        raise ValueError(f"{cu_name} must start at 0, not at {int(cu[0])}; prepend the 0")
    if bool((cu[1:] < cu[:-1]).any()):
        i = int((cu[1:] < cu[:-1]).nonzero()[0])
        raise ValueError(
            f"{cu_name} decreases from {int(cu[i])} (entry {i}) to {int(cu[i + 1])}; it holds cumulative lengths"
        )
    last = int(cu[-1])
    if max(last, total or 0) > INT32_MAX:
        raise ValueError(f"{cu_name} counts {max(last, total or 0)} tokens, beyond int32 ({INT32_MAX}); split it")
    if total is not None and total < last:
        raise ValueError(f"{total_name} is {total}, but {cu_name} ends at {last}; give the whole buffer's length")
    return last if total is None else total


def document_ranges(starts: Indices, stops: Indices) -> tuple[Tensor, Tensor]:
    """Checked document ranges as int64 tensors."""
    begin, end = index_tensor("starts", starts), index_tensor("stops", stops)
    if begin.shape != end.shape:
        raise ValueError(f"{begin.shape[0]} document starts were given with {end.shape[0]} stops; give one of each")
    if begin.device.type == "cpu" and begin.numel():
        ends = torch.stack([begin, end], 1).flatten()
        if int(ends[0]) < 0 or bool((ends[1:] < ends[:-1]).any()):
            i = 0 if int(ends[0]) < 0 else int((ends[1:] < ends[:-1]).nonzero()[0] + 1) // 2
            raise ValueError(
                f"document {i} is [{int(begin[i])}, {int(end[i])}), which is no range after the documents before it; "
                "sort the documents and let none overlap"
            )
    return begin, end
