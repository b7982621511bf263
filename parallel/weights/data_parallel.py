"""Weights on many ranks: replicated (DDP) or fully sharded (FSDP2), with gradients that are sums, never means.

module = parallelise(module, layers, "fully_sharded", group)
with sync_gradients(module, last_micro_batch):
    module(...).backward()

Every rank's loss is its own tokens' sum over the global count, so the whole gradient is the plain sum over ranks:
DDP's and FSDP's averaging is replaced by a sum, which is exact, where multiplying it back would not be.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


def parallelise(
    module: nn.Module,
    layers: Iterable[nn.Module],
    weights: str,
    group: dist.ProcessGroup | None,
    device: torch.device | None = None,
) -> nn.Module:
    """`module` as data parallelism runs it over `group`, or itself where there is none.

    Args:
        module: fp32 weights, the same on every rank; its forward must be the whole way to the loss.
        layers: parts of `module` that are gathered one after the other when sharded; the rest is gathered as one.
        weights: replicated, or fully_sharded (parameters become DTensors in place, so build the optimiser afterwards).
        device: where `module` computes, if it lies on the meta device yet; only fully_sharded takes such a one, whose
            shards are then allocated by `module.to_empty` and filled by `placed_like`.

    Raises:
        ValueError: an unknown kind of weights.
    """
    if weights not in ("replicated", "fully_sharded"):
        raise ValueError(f"weights={weights!r} is unknown; choose replicated or fully_sharded")
    if group is None:
        return module
    if weights == "replicated":
        replica = DistributedDataParallel(module, process_group=group)
        replica.register_comm_hook(group, _sum_bucket)
        return replica
    device = device or next(module.parameters()).device
    mesh = DeviceMesh.from_group(group, device.type)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # a plain sum: gloo has no scaled one
    return module


def settle(module: nn.Module, loss: Callable[[], Tensor]) -> None:
    """Let DDP lay out its buckets for good, by one backward of a `loss()` of `module` that is zero.

    It does so after its first backward, and where a gradient lies in a bucket decides in which order ranks are summed:
    without this the first step of a resumed run would round unlike the same step of a run that never stopped.
    """
    if isinstance(module, DistributedDataParallel):
        loss().backward()
        module.zero_grad(set_to_none=True)


@contextlib.contextmanager
def sync_gradients(module: nn.Module, sync: bool) -> Iterator[None]:
    """Forward and backward inside add to `.grad`; only with `sync` are the sums over ranks taken, of all so far."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(sync)
        yield
    elif isinstance(module, DistributedDataParallel) and not sync:
        with module.no_sync():
            yield
    else:
        yield


def release(module: nn.Module) -> None:
    """Free weights that a forward without backward left gathered."""
    if isinstance(module, FSDPModule):
        module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """A sharded (or partial) tensor's full value, the same on every rank; a collective. A plain one as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(full: Tensor, like: Tensor) -> Tensor:
    """`full` on `like`'s device and, where that is sharded, this rank's shard of it; no communication."""
    if isinstance(like, DTensor):
        return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return full.to(like.device)


def _sum_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])
