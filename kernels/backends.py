"""The table of attention backends, and the choice of one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from kernels.attention_reference import attention_reference
from kernels.attention_torch import attention_torch
from kernels.mask import IntervalMask

logger = logging.getLogger(__name__)

AttentionFunction = Callable[
    [Tensor, Tensor, Tensor, Sequence[IntervalMask], float, float | None, Tensor | None], tuple[Tensor, Tensor]
]


@dataclass(frozen=True)
class Backend:
    """One implementation of attention(q, k, v, masks, scale, softcap, sink) -> (out, lse) on checked inputs."""

    attention: AttentionFunction
    device_types: tuple[str, ...] | None  # None: any
    about: str


BACKENDS: dict[str, Backend] = {
    "torch": Backend(attention_torch, ("cpu",), "torch's flash operator on the parts of the mask, O(T) memory"),
    "reference": Backend(attention_reference, None, "dense scores and autograd; defines what is correct"),
}


def choose_backend(name: str, q: Tensor) -> Backend:
    """The backend called `name`, or the one for q's device if `name` is "auto".

    Raises:
        ValueError: an unknown name, or a backend that does not run on q's device; names one that does.
    """
    device = q.device.type
    able = [known for known, backend in BACKENDS.items() if _runs_on(backend, device)]
    if name == "auto":
        return BACKENDS[_auto(device)]
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; on {device} use one of {', '.join(able)}, or auto")
    if name not in able:
        raise ValueError(f"attention backend {name!r} does not run on {device}; use one of {', '.join(able)}, or auto")
    return BACKENDS[name]


def _runs_on(backend: Backend, device: str) -> bool:
    return backend.device_types is None or device in backend.device_types


@lru_cache
def _auto(device: str) -> str:
    """Pick for a device type, and say so once."""
    specific = [name for name, backend in BACKENDS.items() if backend.device_types and device in backend.device_types]
    name = specific[0] if specific else "reference"
    logger.info("attention on %s uses the %r backend (%s)", device, name, BACKENDS[name].about)
    return name
