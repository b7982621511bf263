"""What the codec loses: errors by format, group, stages and data; sums over ranks; the view that the data choose.

    python -m bench.codec             every group, on drawn tensors and on those of a trained tiny model
    python -m bench.codec --quick     G = 128, under a minute
    python -m bench.codec --static    what the compiler makes of the kernels, beside a plain copy; needs no GPU
    python -m bench.codec --json      rows as JSON lines

`rel_l2` is over the whole tensor, `worst_channel` of the channel that comes out worst, relative to itself. `flushed`:
values that come back as 0. `saturated`: codes at the end of their range; each group has one at least, as its scale is
its largest value. `stages`: h for the Hadamard transform, a for alpha.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bench.codec.data import DRAWN, drawn, trained
from bench.table import Report, Row
from kernels.codec import api as fp8
from kernels.codec.bits import LARGEST, from_codes
from kernels.codec.reshape import channel_errors, rank_codecs
from kernels.codec.wire import HEADER, layout_of
from parallel.plan.codec import CODE_BITS, GROUPS, CodecSpec, alternatives

RANKS = 8
SINGLE = ("attention out", "attention grad", "mlp out", "mlp grad")


def error_row(data: str, x: Tensor, codec: CodecSpec) -> Row:
    """One row of the error table."""
    wire = fp8.encode(x, codec)
    got = fp8.decode(wire, codec, x.shape)
    stages = "h" * codec.hadamard + "a" * codec.alpha
    return {
        "data": data, "format": codec.format, "group": codec.group, "stages": stages or "-",
        "bytes_per_value": round((len(wire) - HEADER) / x.numel(), 4), **_errors(got, x),
        "flushed": ((got == 0) & (x != 0)).double().mean().item(), "saturated": _saturated(wire, codec, x),
        "worst_abs": (got - x).abs().max().item(),
    }  # fmt: skip


def _errors(got: Tensor, want: Tensor) -> dict[str, float]:
    return {
        "rel_l2": ((got - want).norm() / want.norm()).item(),
        "worst_channel": channel_errors(got, want).max().item(),
    }


def _saturated(wire: Tensor, codec: CodecSpec, x: Tensor) -> float:
    codes = wire[HEADER : layout_of(codec, x.shape).scales]
    if codec.format == "int4":
        codes = torch.stack((codes & 15, codes >> 4))
    return (from_codes(codes, codec.format).abs() == LARGEST[codec.format]).double().mean().item()


def sum_rows(seed: int) -> list[Row]:
    """The sum of a tensor over ranks: coded once, coded again in the middle, and coded at each hop."""
    codec = CodecSpec()
    xs = [drawn("gauss", seed + i) for i in range(RANKS)]
    total = torch.stack(xs).sum(0)
    wires = torch.stack([fp8.encode(x, codec) for x in xs])
    again = fp8.decode(fp8.decode_sum_encode(wires, codec, total.shape), codec, total.shape)
    hops = xs[0]
    for x in xs[1:]:
        hops = fp8.decode(fp8.encode(hops, codec), codec, x.shape) + x
    hops = fp8.decode(fp8.encode(hops, codec), codec, total.shape)
    ways = {"one shot": fp8.decode_sum(wires, codec, total.shape), "two shots": again, "each hop": hops}
    return [{"sum_of_8": way, "format": "e4m3", "group": 128, **_errors(got, total)} for way, got in ways.items()]


def view_row(data: str, sample: Tensor, held_out: Tensor, keep_tokens: bool) -> Row:
    """What the statistics pass chooses on a sample, and its error on another tensor beside the default's."""
    default = CodecSpec()
    chosen, _ = rank_codecs([sample], alternatives(default, sample.shape, keep_tokens))[0]
    was, now = (error for _, error in (rank_codecs([held_out], [c])[0] for c in (default, chosen)))
    return {"view_of": data, "tokens": "kept" if keep_tokens else "mixed", "chosen": chosen.view, "group": chosen.group,
            "mean_channel": now, "default": was, "gain": 1 - now / was}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.codec", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines, nothing else")
    parser.add_argument("--static", action="store_true", help="compile and count instead")
    parser.add_argument("--targets", nargs="+", help="with --static: default sm_80 sm_90 sm_100 gfx942")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    report = Report(options.json)
    if options.static:
        return _static(report, options)
    real = trained(20 if options.quick else 200, options.seed)
    data = {name: (drawn(name, options.seed), drawn(name, options.seed + 99)) for name in DRAWN}
    data |= {name: (real[name][0], real[name][1]) for name in SINGLE}
    for (name, (x, _)), form in itertools.product(data.items(), CODE_BITS):
        for G, hadamard in itertools.product((128,) if options.quick else GROUPS, (True, False)):
            codec = CodecSpec(form, G, hadamard)
            report.row(error_row(name, x, codec))
            if G == 128:
                report.row(error_row(name, x, replace(codec, alpha=False)))
    for row in sum_rows(options.seed):
        report.row(row)
    for (name, (x, held_out)), keep in itertools.product(data.items(), (True, False)):
        report.row(view_row(name, x, held_out, keep))


def _static(report: Report, options: argparse.Namespace) -> None:
    from bench.codec.static import static_rows
    from bench.kernels.targets import TARGETS

    codecs = [CodecSpec()] if options.quick else [CodecSpec(), CodecSpec(group=512), CodecSpec("int4", 32)]
    for row in static_rows(codecs, "bf16", options.targets or (("sm_90",) if options.quick else tuple(TARGETS))):
        report.row(row)


if __name__ == "__main__":
    main()
