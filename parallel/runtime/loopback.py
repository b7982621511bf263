"""All ranks of a plan in one process: the proof that a schedule computes attention, and a debugger's friend."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.attention.backends import choose_rounds
from kernels.attention.problem import scale_of
from parallel.plan.ir import Step
from parallel.plan.plan import Plan
from parallel.runtime.bind import BoundPlan, token_index
from parallel.runtime.buffers import BufferPool
from parallel.runtime.comm import Loopback, Recorder
from parallel.runtime.executor import Execution, Options, saved_buffers


@dataclass
class LoopbackResult:
    """What came of a loopback run, in global order; gradients are None without a dout.

    Attributes:
        events: (rank, direction, what, step) in the order in which the ranks did it.
        recorder: the bytes that really travelled.
    """

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsink: Tensor | None = None
    events: list[tuple[int, str, str, Step]] = field(default_factory=list)
    recorder: Recorder = field(default_factory=Recorder)


def run_loopback(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    backend: str = "auto",
    rules: str = "plain",
    poison: bool = False,
    pools: list[BufferPool] | None = None,
) -> LoopbackResult:
    """Run every rank's steps, in turns, and put the results together.

    Args:
        plan: of all ranks.
        q, k, v: `[T, H, D]`, `[T, Hkv, D]`, `[T, Hkv, Dv]` of the whole buffer, in the dtype of the plan's shape.
        dout: `[T, H, Dv]`, the gradient of out, to run backward as well.
        rules: plain, strict or late; see `parallel.runtime.comm`.
        poison: hand out buffers full of NaN.
        pools: the ranks' buffers of an earlier run, to be used again.

    Raises:
        ValueError: tensors that do not have the plan's shape, or a schedule that breaks the transport's rules.
    """
    _check(plan, q, k, v, dout)
    options = Options(scale_of(q, softmax_scale), softcap, sink)
    result = LoopbackResult(torch.full_like(v[:, :1], 0).expand(-1, q.shape[1], -1).contiguous(), _lse(plan, q))
    index = [token_index(tokens, q.device) for tokens in plan.placement.sets]
    bound = [BoundPlan(plan, rank, q.device) for rank in range(plan.size)]
    pools = pools or [BufferPool(q.device, poison) for _ in bound]
    given = [{"q": {"q": q[at].contiguous()}, "kv": {"k": k[at].contiguous(), "v": v[at].contiguous()}} for at in index]
    runs = _run(bound, "forward", given, options, pools, result, backend, rules)
    for run, at, one in zip(runs, index, bound):
        result.out[at] = run.held[one.programs["forward"].results["out"]].tensors["out"].to(q.dtype)
        for name in one.programs["forward"].accumulators:
            acc = one.programs["forward"].buffers[name]
            where = token_index(acc.tokens, q.device)
            result.lse[acc.heads[0] : acc.heads[1], where] = run.get(name).tensors["lse"]
    if dout is not None:
        saved = [
            saved_buffers(run, q.dtype) | {"grad_out": {"dout": dout[at].contiguous()}} for run, at in zip(runs, index)
        ]
        runs = _run(bound, "backward", saved, options, pools, result, backend, rules)
        result.dq, result.dk, result.dv = (torch.zeros_like(x) for x in (q, k, v))
        for run, at in zip(runs, index):
            grad_q, grad_kv = (run.get(run.program.results[what]).tensors for what in ("grad_q", "grad_kv"))
            result.dq[at] = grad_q["dq"].to(q.dtype)
            result.dk[at], result.dv[at] = grad_kv["dk"].to(q.dtype), grad_kv["dv"].to(q.dtype)
        if sink is not None:
            parts = [run.sink_grad for run in runs if run.sink_grad is not None]
            result.dsink = torch.stack(parts).sum(0) if parts else torch.zeros_like(sink)
    return result


def _run(
    bound: list[BoundPlan],
    direction: str,
    given: list[dict[str, dict[str, Tensor]]],
    options: Options,
    pools: list[BufferPool],
    result: LoopbackResult,
    backend: str,
    rules: str,
) -> list[Execution]:
    net = Loopback(len(bound), rules)
    kind = next(iter(next(iter(given[0].values())).values()))
    rounds = choose_rounds(backend, kind)
    runs = []
    for rank, one in enumerate(bound):

        def trace(what: str, step: Step, rank: int = rank) -> None:
            result.events.append((rank, direction, what, step))

        runs.append(
            Execution(
                one, direction, given[rank], options, rounds, net.transport(rank), pools[rank], result.recorder, trace
            )
        )
    turns = {rank: run.steps() for rank, run in enumerate(runs)}
    while turns:
        before = len(result.events)
        for rank, steps in list(turns.items()):
            if next(steps, "done") == "done":
                del turns[rank]
        if turns and len(result.events) == before:
            raise ValueError(f"{direction}: ranks {sorted(turns)} wait for each other")
    net.check_empty()
    return runs


def _lse(plan: Plan, q: Tensor) -> Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.full((q.shape[1], q.shape[0]), -float("inf"), dtype=dtype, device=q.device)


def _check(plan: Plan, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None) -> None:
    T, shape = plan.placement.layout.total_tokens, plan.shape
    wanted = {"q": (T, shape.H, shape.D), "k": (T, shape.Hkv, shape.D), "v": (T, shape.Hkv, shape.Dv)}
    given = {"q": q, "k": k, "v": v}
    if dout is not None:
        wanted["dout"], given["dout"] = (T, shape.H, shape.Dv), dout
    for name, x in given.items():
        if tuple(x.shape) != wanted[name]:
            raise ValueError(f"{name} is {tuple(x.shape)}, and the plan is for {wanted[name]}")
    if len(plan.ranks) != plan.size:
        raise ValueError(f"the plan holds {len(plan.ranks)} of {plan.size} ranks; plan all of them for a loopback run")
    expected = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
        shape.dtype
    ]
    if any(x.dtype != expected for x in given.values()):
        raise ValueError(f"the plan is for {shape.dtype}, and the tensors are {q.dtype}; plan with their dtype")
