"""Process groups of a mesh, all made once at the start, in the same order on every rank."""

import torch
import torch.distributed as dist

from parallel.plan.mesh import MeshSpec

# The last two are channels of their own among the same ranks: inside and across move at the same time, and batch groups
# of any size send on them without a group ever being made for a batch.
GROUPS: dict[str, tuple[str, ...]] = {
    "cp": ("cp_outer", "cp_inner"),
    "cp_outer": ("cp_outer", "cp_inner"),
    "cp_inner": ("cp_outer", "cp_inner"),
    "dp": ("dp",),
    "dp_cp": ("dp", "cp_outer", "cp_inner"),
}


class Groups:
    """The groups of GROUPS that `rank` is in; None for a group of one, which communicates nothing.

    `device` is where the ranks compute. Groups of the same ranks under two names stay two groups, so that traffic
    on one never waits for the other.

    Raises:
        ValueError: torch.distributed has another number of ranks than the mesh.
    """

    def __init__(self, mesh: MeshSpec, rank: int, device: torch.device | str = "cpu") -> None:
        self.mesh, self.rank = mesh, rank
        self.cp_ranks = mesh.group_of(rank, *GROUPS["cp"])
        self._groups: dict[str, dist.ProcessGroup | None] = dict.fromkeys(GROUPS)
        if mesh.world == 1:
            return
        warm = torch.zeros(1, dtype=torch.float32, device=device)
        if dist.get_world_size() != mesh.world:
            raise ValueError(f"torch.distributed has {dist.get_world_size()} ranks and the mesh {mesh.world}")
        for name, axes in GROUPS.items():
            for ranks in mesh.groups(*axes):
                if len(ranks) > 1:
                    made = dist.new_group(list(ranks))  # every rank takes part in making every group
                    if rank in ranks:
                        assert isinstance(made, dist.ProcessGroup)
                        self._groups[name] = made
                        # NCCL makes a communicator at its first use, which must be by all of its ranks; a batch of
                        # messages is often not
                        dist.all_reduce(warm, group=made)

    def get(self, name: str) -> dist.ProcessGroup | None:
        """The group called `name` (a key of GROUPS), or None if this rank is alone in it."""
        return self._groups[name]

    def ranks(self, name: str) -> tuple[int, ...]:
        """The world ranks of this rank's group."""
        return self.mesh.group_of(self.rank, *GROUPS[name])


def default_place() -> tuple[int, int]:
    """(this process's rank in the default group, its ranks)."""
    return dist.get_rank(), dist.get_world_size()
