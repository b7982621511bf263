"""Whether strategy=auto chooses well: two gloo ranks run every preset on the same batches, and its choice is judged.

python -m bench.auto                # 30 layouts of 4,096 tokens; some minutes
python -m bench.auto --quick        # 6 layouts of 1,024 tokens
python -m bench.auto --calibrate    # measures the constants of conf/cluster/cpu2.yaml, two ranks at once

A preset's time is a layer's attention forward and backward, on the rank that ends last, the median over rounds in which
the presets take turns. `regret` is the time of auto's choice over the fastest preset's, minus 1: 0.1 is the bar. The
bar at the foot is what always taking one preset would cost, the best such one named.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from bench.packs import packs
from bench.table import Report, Row
from data.config import DataConfig
from data.mixes import MIXES
from kernels.api import IntervalMask, attention
from models.config import ModelConfig
from parallel.api import ContextParallel
from parallel.auto import candidate, candidates, resolve
from parallel.comm import Parcel
from parallel.groups import Groups
from parallel.plan.cost import BACKWARD_PRODUCTS, FORWARD_PRODUCTS
from parallel.plan.ir import AttentionShape
from parallel.plan.layout import PackedLayout
from parallel.plan.mesh import MeshSpec
from parallel.sharding.planner import Planner
from parallel.strategy import load_strategy
from training.config import Config
from training.launch import Place
from training.rendezvous import Team, join, part

ROOT = Path(__file__).resolve().parents[1]
SHAPE = AttentionShape(4, 2, 64, 64, "fp32")
RANKS = 2
DRAWN = 131_072  # tokens of a pack before it is scaled
BAR = 0.10  # regret


def batches(count: int, tokens: int) -> Iterator[tuple[str, list[int]]]:
    """`count` batches, the mixes in turn: packs of 131,072 tokens drawn to scale, so that each mix keeps its shape.

    The mix that is not random has one pack; later ones are its documents as far as an eighth less each time.
    """
    each = -(-count // len(MIXES))
    drawn = {mix: list(packs(mix, DRAWN, each)) for mix in MIXES}
    for number in range(count):
        turn, mix = number // len(MIXES), list(MIXES)[number % len(MIXES)]
        if mix == "one_giant":
            giant, *rest = drawn[mix][0]
            lengths = [max(1, giant * (8 - turn % 8) // 8), *rest]
        else:
            lengths = drawn[mix][turn]
        edges = np.rint(np.cumsum(lengths) * (tokens / sum(lengths))).astype(int)
        yield mix, [n for n in np.diff(edges, prepend=0).tolist() if n]


def _slowest(team: Team, work: Callable[[], object]) -> float:
    """Seconds of `work`, begun together, on the rank that ends last."""
    team.gather([0.0])
    began = time.perf_counter()
    work()
    return float(team.gather([time.perf_counter() - began]).max())


def judge(team: Team, count: int, tokens: int, repeats: int) -> Iterator[Row]:
    """A row for each batch: what auto chose, the fastest preset, and the regret; and all times as `ms`."""
    auto = load_strategy("auto", planner=Planner(cluster="cpu2"), node_size=RANKS)
    groups: dict[MeshSpec, Groups] = {}
    for mix, lengths in batches(count, tokens):
        layout = PackedLayout.from_lengths(lengths, row_length=sum(lengths) + sum(lengths) % RANKS)
        resolved = resolve(auto, auto.mesh(RANKS, SHAPE.H, SHAPE.Hkv), layout, SHAPE)
        work = {}
        for name in resolved.seconds:
            strategy = candidate(name, auto)
            mesh = strategy.mesh(RANKS, SHAPE.H, SHAPE.Hkv)
            if mesh not in groups:
                groups[mesh] = Groups(mesh, team.rank)
            work[name] = _layer(ContextParallel(strategy, mesh, groups[mesh], team.rank), layout)
        times: dict[str, list[float]] = {name: [] for name in work}
        for turn in range(repeats + 1):
            for name, layer in work.items():
                seconds = _slowest(team, layer)
                if turn:  # the first one warms up
                    times[name].append(seconds * 1e3)
        ms = {name: statistics.median(some) for name, some in times.items()}
        chosen, fastest = next(iter(resolved.seconds)), min(ms, key=lambda name: ms[name])
        yield {
            "mix": mix, "documents": len(lengths), "chosen": chosen, "fastest": fastest, "chosen_ms": ms[chosen],
            "fastest_ms": ms[fastest], "predicted_ms": resolved.seconds[chosen] * 1e3,
            "regret": ms[chosen] / ms[fastest] - 1, "ms": json.dumps({n: round(t, 3) for n, t in ms.items()}),
        }  # fmt: skip


def _layer(cp: ContextParallel, layout: PackedLayout) -> Callable[[], object]:
    """A layer's attention, forward and backward, on a bound batch."""
    cp.bind(layout, SHAPE)
    draw = torch.Generator().manual_seed(0)
    total = layout.total_tokens
    q, dout = (cp.shard(torch.randn(total, SHAPE.H, SHAPE.D, generator=draw)) for _ in range(2))
    k, v = (cp.shard(torch.randn(total, SHAPE.Hkv, SHAPE.D, generator=draw)).requires_grad_() for _ in range(2))
    q.requires_grad_()
    return lambda: torch.autograd.backward(cp.attention(q, k, v), dout)


def calibrate(team: Team, tokens: int, repeats: int) -> dict[str, float]:
    """The constants of a cluster of RANKS ranks on this machine, all ranks busy at once.

    Attention of `tokens` tokens in documents of s takes `m (s + 1) / 2 + c`: m gives FLOP/s, c / m the rows that short
    documents cost on top. The least of the repeats counts: a shared machine only adds.
    """

    def least(work: Callable[[], object]) -> float:
        return min(_slowest(team, work) for _ in range(repeats + 1))

    sizes = [64, 128, 256, 512, 1024]
    q = torch.randn(tokens, SHAPE.H, SHAPE.D, requires_grad=True)
    k, v = (torch.randn(tokens, SHAPE.Hkv, SHAPE.D, requires_grad=True) for _ in range(2))
    seconds = []
    for size in sizes:
        mask = IntervalMask.from_cu_seqlens(list(range(0, tokens + 1, size)))
        out = attention(q, k, v, mask)[0]
        forward = least(lambda mask=mask: attention(q, k, v, mask))
        backward = least(lambda out=out: torch.autograd.backward(out, torch.ones_like(out), retain_graph=True))
        seconds.append((forward, backward))
    (slope_f, slope_b), (rest_f, rest_b) = np.polyfit([(size + 1) / 2 for size in sizes], np.array(seconds), 1)
    one = IntervalMask.from_cu_seqlens([0, 1])
    launch = least(lambda: attention(q[:1], k[:1], v[:1], one))
    large = torch.randn(1 << 20)
    copy = least(lambda: large.add_(1e-9))
    cp = ContextParallel(load_strategy("ring"), MeshSpec(cp_outer=RANKS), Groups(MeshSpec(cp_outer=RANKS), team.rank),
                         team.rank)  # fmt: skip
    small, big = (least(lambda size=size: _swap(cp, size)) for size in (1 << 10, 1 << 22))
    width = SHAPE.H * SHAPE.D * tokens
    return {
        "forward_flops": FORWARD_PRODUCTS * width / slope_f,
        "backward_flops": BACKWARD_PRODUCTS * width / slope_b,
        "short_rows": max(1.0, (rest_f + rest_b - 2 * launch) / (slope_f + slope_b)),
        "launch_s": launch,
        "copy_bytes_s": 2 * 4 * large.numel() / copy,
        "intra_bytes_s": (1 << 22) / max(1e-9, big - small),
        "intra_latency_s": small,
    }


def _swap(cp: ContextParallel, size: int) -> None:
    """A message each way."""
    mine, theirs = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
    sends, recvs = ([Parcel(1 - cp.rank, wire, [("kv", size)])] for wire in (mine, theirs))
    cp.transport.finish(cp.transport.post("cp", sends, recvs))


def work_as_rank(rank: int, address: str, args: argparse.Namespace) -> None:
    """A rank's whole life; rank 0 prints what was measured as JSON lines."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ModelConfig(256, 1, 64, SHAPE.H, SHAPE.Hkv, SHAPE.D, 64, args.tokens, 1e-5, True, rope_theta=1e4)
    config = Config(model, DataConfig(source="synthetic"), strategy=load_strategy("ring"))  # to meet; nothing trains
    team = join(config, Place(rank, RANKS, rank, address), torch.device("cpu"))
    found = (
        [calibrate(team, args.tokens, args.repeats)]
        if args.calibrate
        else judge(team, args.layouts, args.tokens, args.repeats)
    )
    for line in found:
        if team.first:
            print(json.dumps(line), flush=True)
    part()


def run_ranks(args: argparse.Namespace) -> Iterator[Row]:
    """Start the ranks and read rank 0's rows as they come. RuntimeError with its words where one fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["env", "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1", sys.executable, "-m", "bench.auto"]
        command += ["--tokens", str(args.tokens), "--layouts", str(args.layouts), "--repeats", str(args.repeats)]
        command += ["--calibrate"] if args.calibrate else []
        errors = Path(folder) / "errors"
        with errors.open("w") as words:
            ranks = [
                subprocess.Popen(
                    [*command, "--rank", str(rank), "--meet", f"file://{folder}/meet"], cwd=ROOT, stderr=words,
                    stdout=subprocess.DEVNULL if rank else subprocess.PIPE, text=True,
                )
                for rank in range(RANKS)
            ]  # fmt: skip
            try:
                assert ranks[0].stdout is not None
                yield from (json.loads(line) for line in ranks[0].stdout)
                codes = [process.wait(60) for process in ranks]
            finally:
                for process in ranks:
                    process.kill()
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}: {errors.read_text()[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.auto", description="auto's choice against measured times.")
    parser.add_argument("--quick", action="store_true", help="6 layouts of 1,024 tokens")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines on stdout")
    parser.add_argument("--layouts", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--calibrate", action="store_true", help="measure the constants of conf/cluster/cpu2.yaml")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        work_as_rank(args.rank, args.meet, args)
        return
    if args.quick:
        args.layouts, args.tokens, args.repeats = 6, 1024, 3
    report = Report(args.json)
    table = []
    for row in run_ranks(args):
        table.append(row)
        report.row(row if args.json or args.calibrate else {k: v for k, v in row.items() if k != "ms"})
    if not args.calibrate:
        summary(report, table)


def summary(report: Report, table: list[Row]) -> None:
    """How often auto's choice is within the bar, and what one preset for all batches would cost."""
    regrets = [float(row["regret"]) for row in table]
    good = sum(regret <= BAR for regret in regrets)
    report.note(f"auto within {BAR:.0%} of the fastest measured preset: {good} of {len(table)}")
    report.note(f"regret: mean {statistics.fmean(regrets):.1%}, worst {max(regrets):.1%}")
    times = [json.loads(str(row["ms"])) for row in table]
    always = {
        name: statistics.fmean(ms[name] / min(ms.values()) - 1 for ms in times)
        for name in candidates()
        if all(name in ms for ms in times)
    }
    name = min(always, key=lambda name: always[name])
    report.note(f"always {name}, the best single preset: mean regret {always[name]:.1%}")


if __name__ == "__main__":
    main()
