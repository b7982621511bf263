"""A bound plan as one differentiable operation: forward runs the rank's forward program, backward its backward one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.attention.checks import first_order
from kernels.attention.rounds import Rounds
from parallel.runtime.bind import BoundPlan
from parallel.runtime.buffers import BufferPool
from parallel.runtime.comm import Recorder, Transport
from parallel.runtime.executor import Execution, Options, Trace, saved_buffers


@dataclass(frozen=True)
class Engine:
    """What the layers of a rank share: transport, buffers, kernels and the recorder."""

    transport: Transport
    pool: BufferPool
    rounds: Rounds
    recorder: Recorder
    trace: Trace | None = None

    def run(self, bound: BoundPlan, direction: str, given: dict[str, dict[str, Tensor]], options: Options) -> Execution:
        """Run one direction to its end."""
        run = Execution(
            bound, direction, given, options, self.rounds, self.transport, self.pool, self.recorder, self.trace
        )
        _exhaust(run.steps())
        return run


def planned_attention(engine: Engine, bound: BoundPlan, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """`q[t, H, D], k[t, Hkv, D], v[t, Hkv, Dv] -> out[t, H, Dv]` of this rank's tokens; differentiable, the sink too.

    Raises:
        ValueError: tensors that do not have the plan's shape or dtype.
    """
    shape, mine = bound.shape, bound.plan.placement.sets[bound.rank].count
    wanted = {
        "q": (q, (mine, shape.H, shape.D)),
        "k": (k, (mine, shape.Hkv, shape.D)),
        "v": (v, (mine, shape.Hkv, shape.Dv)),
    }
    for name, (x, size) in wanted.items():
        if tuple(x.shape) != size or x.dtype != bound.dtype(False):
            raise ValueError(
                f"rank {bound.rank}: {name} is {tuple(x.shape)} {x.dtype}, and the plan is for {size} "
                f"{bound.dtype(False)}; shard the inputs, and plan with their heads and dtype"
            )
    sink = options.sink
    if sink is not None and (
        tuple(sink.shape) != (shape.H,) or not sink.is_floating_point() or sink.device != q.device
    ):
        raise ValueError(
            f"sink must hold one floating logit for each of {shape.H} heads on {q.device}, not {tuple(sink.shape)} "
            f"{sink.dtype} on {sink.device}"
        )
    return _PlannedAttention.apply(q, k, v, options.sink, engine, bound, options)  # pyright: ignore[reportReturnType]


class _PlannedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        engine: Engine,
        bound: BoundPlan,
        options: Options,
    ) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        run = engine.run(bound, "forward", {"q": {"q": q}, "kv": {"k": k, "v": v}}, options)
        out = run.get(bound.programs["forward"].results["out"]).tensors["out"].to(q.dtype)
        saved = saved_buffers(run, q.dtype)
        ctx.names = [(name, field) for name, tensors in saved.items() for field in tensors]
        ctx.save_for_backward(sink, *(saved[name][field] for name, field in ctx.names))
        ctx.engine, ctx.bound, ctx.options = engine, bound, options
        return out

    @staticmethod
    @first_order
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout: Tensor
    ) -> tuple[Tensor | None, ...]:
        sink, *tensors = ctx.saved_tensors
        given: dict[str, dict[str, Tensor]] = {"grad_out": {"dout": dout.contiguous()}}
        for (name, field), tensor in zip(ctx.names, tensors):
            given.setdefault(name, {})[field] = tensor
        run = ctx.engine.run(ctx.bound, "backward", given, ctx.options)
        grad_q, grad_kv = (run.get(run.program.results[what]).tensors for what in ("grad_q", "grad_kv"))
        dq, dk, dv = grad_q["dq"], grad_kv["dk"], grad_kv["dv"]
        dsink = None if sink is None else torch.zeros_like(sink) if run.sink_grad is None else run.sink_grad
        return dq.to(dout.dtype), dk.to(dout.dtype), dv.to(dout.dtype), dsink, None, None, None


def _exhaust(steps: Iterator[None]) -> None:
    for _ in steps:
        pass
