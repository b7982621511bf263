"""What the device is: where to run, its peak rate, the memory used so far."""

import resource
import sys

import torch

from training.config import ConfigError

# Dense bf16 peaks in TFLOP/s, from the makers' data sheets; matched against the device's name.
BF16_PEAK_TFLOPS = {
    "A100": 312.0,
    "H100": 989.4,
    "H200": 989.4,
    "B200": 2250.0,
    "MI300X": 1307.4,
}


def pick_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device that `run.device` names; auto: cuda when there is one. Rank n of a machine takes its n-th GPU.

    Raises:
        ConfigError: no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"run.device={name} is no device; use auto, cpu or cuda.") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"run.device={name}: longfold trains on cpu and cuda.")
    if device.type == "cuda" and local_rank is not None:
        if device.index is not None:
            raise ConfigError(f"run.device={name} names one GPU for several ranks; use run.device=cuda.")
        device = torch.device("cuda", local_rank)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"{device} is asked for, and this machine shows {torch.cuda.device_count()} GPUs; use fewer ranks, or "
            f"run.device=cpu."
        )
    return device


def peak_tflops(device: torch.device) -> float | None:
    """Dense bf16 peak of the device, where it is known; None on a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in BF16_PEAK_TFLOPS.items() if key in name), None)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory used so far: by the device's allocator, or on a CPU by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
