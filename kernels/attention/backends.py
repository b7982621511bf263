"""The table of attention backends, and the choice of one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from kernels.arguments import spelled
from kernels.attention import reference as attention_reference
from kernels.attention import torch_backend as attention_torch
from kernels.attention.autograd import Passes
from kernels.attention.problem import Problem
from kernels.attention.rounds import Rounds
from kernels.compile.runtime import interpreted, triton_installed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """One implementation of attention."""

    attention: Callable[[Problem], tuple[Tensor, Tensor]]  # (out, lse), differentiable
    passes: Callable[[], Passes]  # its two directions, which a compiler's graph calls
    rounds: Callable[[], Rounds]  # its accumulate form
    device_types: tuple[str, ...] | None  # None: any
    about: str
    refuses: Callable[[Tensor], str | None] = lambda q: None  # why it cannot take such a q, or None


def _attention_triton(problem: Problem) -> tuple[Tensor, Tensor]:
    """`attention_triton`, imported at the first call, since a machine without a GPU may lack Triton."""
    from kernels.attention.triton_backend import attention_triton

    return attention_triton(problem)


def _triton_passes() -> Passes:
    from kernels.attention.triton_backend import PASSES

    return PASSES


def _triton_rounds() -> Rounds:
    from kernels.attention.triton_backend import TritonRounds

    return TritonRounds()


def _triton_refuses(q: Tensor) -> str | None:
    if not triton_installed():
        return "needs the triton package, which is not installed"
    if q.dtype == torch.float64:
        return "computes fp32, fp16 and bf16, not float64"
    if q.device.type == "cpu" and not interpreted():
        return "runs on the CPU only in Triton's interpreter (TRITON_INTERPRET=1 before the start)"
    if q.device.type == "cuda" and interpreted():
        return "is interpreted on the CPU while TRITON_INTERPRET=1 is set; unset it"
    return None


BACKENDS: dict[str, Backend] = {
    "torch": Backend(
        attention_torch.attention_torch,
        lambda: attention_torch.PASSES,
        attention_torch.TorchRounds,
        ("cpu",),
        "torch's flash operator on the parts of the mask, O(T) memory",
    ),
    "triton": Backend(
        _attention_triton,
        _triton_passes,
        _triton_rounds,
        ("cuda", "cpu"),
        "Triton kernels that visit only seen tiles",
        _triton_refuses,
    ),
    "reference": Backend(
        attention_reference.attention_reference,
        lambda: attention_reference.PASSES,
        attention_reference.ReferenceRounds,
        None,
        "dense scores and autograd; defines what is correct",
    ),
}


def choose_backend(name: str, q: Tensor) -> Backend:
    """The backend called `name`, or the first of the table that takes q if `name` is "auto".

    Raises:
        ValueError: an unknown name, or a backend that does not take q's device or dtype; names those that do.
    """
    device = q.device.type
    able = able_backends(q)
    if name == "auto":
        _say_once(able[0], device)
        return BACKENDS[able[0]]
    if not isinstance(name, str) or name not in BACKENDS:
        known = ", ".join(able)
        raise ValueError(f"unknown attention backend {spelled(name)}; on {device} use one of {known}, or auto")
    if name not in able:
        reason = _refusal(BACKENDS[name], q)
        raise ValueError(f"attention backend {name!r} {reason}; use one of {', '.join(able)}, or auto")
    return BACKENDS[name]


def choose_rounds(backend: str, q: Float[Tensor, "Tq H D"]) -> Rounds:
    """The rounds of the backend called `backend`, or of the one that "auto" picks for q.

    Raises:
        ValueError: as `choose_backend`.
    """
    return choose_backend(backend, q).rounds()


def able_backends(q: Tensor) -> list[str]:
    """The names of the backends that take q's device and dtype, in the order in which "auto" prefers them."""
    return [name for name, backend in BACKENDS.items() if _refusal(backend, q) is None]


def _refusal(backend: Backend, q: Tensor) -> str | None:
    if backend.device_types is not None and q.device.type not in backend.device_types:
        return f"does not run on {q.device.type}"
    return backend.refuses(q)


@lru_cache
def _say_once(name: str, device: str) -> None:
    logger.info("attention on %s uses the %r backend (%s)", device, name, BACKENDS[name].about)
