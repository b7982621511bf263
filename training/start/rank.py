"""What one rank does, whoever started it: pick its device, meet the others, train, part."""

import torch
from rich.console import Console

from kernels.api import BACKENDS
from kernels.attention.backends import choose_backend
from training.config import Config, ConfigError, Precision
from training.loop import train
from training.outcome import Outcome, PeerLost
from training.place import Place
from training.record.hardware import pick_device
from training.team import is_peers_failure, join, part


def run_rank(config: Config, place: Place) -> Outcome:
    """Train as the rank at `place`.

    Raises:
        ConfigError: the device, the backend or the ranks' configurations do not fit; on every rank.
        PeerLost: another rank left, or did not answer within `run.timeout_s`.
    """
    if config.model.attention not in ("auto", *BACKENDS):
        raise ConfigError(
            f"model.attention={config.model.attention!r} is no attention backend; choose auto or "
            f"{' or '.join(BACKENDS)}."
        )
    device = pick_device(config.run.device, place.local_rank if place.world > 1 else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if config.model.attention != "auto":
        dtype = torch.bfloat16 if config.run.precision is Precision.bf16 else torch.float32
        try:
            choose_backend(config.model.attention, torch.empty(0, 1, 1, dtype=dtype, device=device))
        except ValueError as error:
            raise ConfigError(f"model.attention={config.model.attention}: {error}.") from error
    try:
        team = join(config, place, device)
        outcome = train(config, Console(soft_wrap=True, quiet=not team.first), team)
    except Exception as error:
        if place.world > 1 and is_peers_failure(error):
            waited = f"run.timeout_s={config.run.timeout_s} s"
            raise PeerLost(f"rank {place.rank} lost another rank, or waited {waited} for it in vain.") from error
        raise
    part()
    return outcome
