"""Where a process sits among the ranks of a run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a process sits among the ranks of a run; `address` is where they meet (a torch init_method)."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    address: str = ""
