"""What runs Triton kernels here: the interpreter or a device, and the name of its target in the tile table.

The only place that looks at the environment. Importing it needs neither triton nor a device.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from functools import lru_cache
from typing import Any

import torch

INTERPRETER = "interpreter"


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1, set before the first import of a kernel)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def jit(fn: Any = None, **options: Any) -> Any:
    """`triton.jit` of the function as written: a type-checking import hook may have wrapped it, in which case Triton
    would look up its globals in the wrong module."""
    import triton

    if fn is None:
        return lambda fn: triton.jit(inspect.unwrap(fn), **options)
    return triton.jit(inspect.unwrap(fn), **options)


def on_device_of(x: torch.Tensor) -> Any:
    """A context in which kernels launch on x's device; Triton launches on the current one, whatever its arguments."""
    return torch.cuda.device_of(x)


@lru_cache
def target_name(device: torch.device) -> str:
    """The tile table's name for a device: "sm_90" and the like on CUDA, the architecture ("gfx942") on HIP, and
    "interpreter" on the CPU."""
    if device.type == "cpu":
        return INTERPRETER
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
