"""What the attention kernels cost, beside open peers.

    python -m bench.kernels --static                       every kernel, head dim, dtype and target, by compiling alone
    python -m bench.kernels --static --quick               bf16, D = 64 and 128 on sm_90
    python -m bench.kernels --static --targets sm_80 --head-dims 128 --json
    python -m bench.kernels --gpu                          correctness, then TFLOP/s on the GPU that is here

`--json` prints one JSON object a row and nothing else; reasons for rows that are left out go to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from bench.kernels.cases import DTYPES, HEAD_DIMS, head_dim_argument
from bench.kernels.targets import TARGETS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.gpu:
        static = ("targets", "dtypes", "head_dims", "no_peers", "jobs")
        if ignored := [name for name in static if getattr(options, name)]:
            parser.error(
                f"--{ignored[0].replace('_', '-')} is for --static; the GPU page runs the same cases everywhere"
            )
        from bench.kernels.gpu_page import gpu_page

        return gpu_page(quick=options.quick, as_json=options.json)
    return _static(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=(__doc__ or "").split("\n")[0])
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--static", action="store_true", help="compile and count; needs no GPU")
    kind.add_argument("--gpu", action="store_true", help="check and time on the GPU")
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), help="default: all")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="default: all")
    parser.add_argument("--head-dims", nargs="+", type=head_dim_argument, help="default: 64 80 128 256")
    parser.add_argument("--no-peers", action="store_true", help="our kernels alone")
    parser.add_argument("--jobs", type=int, help="processes; default: one a core")
    return parser


def _static(options: argparse.Namespace) -> int:
    from bench.kernels.static_report import PEERS, queries, static_rows, table_line

    wanted, missing = queries(
        options.head_dims or ((64, 128) if options.quick else HEAD_DIMS),
        options.dtypes or (("bf16",) if options.quick else DTYPES),
        options.targets or (("sm_90",) if options.quick else tuple(TARGETS)),
        ("attention", "rows", *(() if options.no_peers else PEERS)),
    )
    for reason in missing:
        print(reason, file=sys.stderr)
    if not options.json:
        print(table_line(None))
    for row in static_rows(wanted, options.jobs or os.cpu_count() or 1):
        if isinstance(row, str):
            print(row, file=sys.stderr)
        else:
            print(json.dumps(row) if options.json else table_line(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
