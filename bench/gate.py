"""The compile gate: does every kernel compile for every target at its tile, and fit there?

    python -m bench.gate --target sm_90                a covering subset
    python -m bench.gate --target sm_90 --every        all of that target; --dtype and --options take a part of it

Prints a JSON object for each case: `error` (null where it compiles) and what `bench/kernels/measure.py` reads. Exits 1
if a case has an error or fits no core.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench.kernels import cases
from bench.kernels.compile import Case, report
from bench.kernels.targets import TARGETS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", choices=list(TARGETS), required=True)
    parser.add_argument("--every", action="store_true", help="not only a covering subset")
    parser.add_argument("--dtype", choices=cases.DTYPES, help="with --every: this dtype alone")
    parser.add_argument("--options", action="store_true", help="what a launch can switch on, instead of the tables")
    options = parser.parse_args(arguments)
    if (options.dtype and not options.every) or (options.options and options.every):
        parser.error("--dtype takes a part of --every, and --options stands alone")
    good = True
    for case in _chosen(options):
        found = outcome(case)
        good = good and found["error"] is None
        print(json.dumps(found), flush=True)
    return 0 if good else 1


def _chosen(options: argparse.Namespace) -> Iterator[Case]:
    if options.options:
        yield from cases.option_cases((options.target,))
    elif options.every:
        dtypes = (options.dtype,) if options.dtype else cases.DTYPES
        yield from cases.attention_cases(dtypes=dtypes, targets=(options.target,))
        yield from cases.row_cases(dtypes=dtypes, targets=(options.target,))
        yield from cases.codec_cases(cases.every_codec(), dtypes, (options.target,))
    else:
        yield from cases.covering_cases(options.target)


def outcome(case: Case) -> dict[str, Any]:
    """What came of one case: resources, and for each loop with matrix instructions its kind and spills."""
    row: dict[str, Any] = {
        "case": case.name, "kernel": case.kernel, "dtype": case.dtype, "head_dim": case.head_dim, "stages": case.stages,
        "error": None,
    }  # fmt: skip
    try:
        found = report(case)
    except Exception as error:  # whatever the compiler raises is a finding about this case, not about the gate
        return row | {"error": f"{type(error).__name__}: {str(error).strip()[:500]}"}
    if found.blocks < 1:
        limits = TARGETS[case.target]
        row["error"] = (
            f"does not fit a core: {found.shared} bytes of shared memory (of {limits.shared_bytes}), {found.registers} "
            f"registers x {case.warps} warps (of {limits.registers // limits.gpu.warp_size}), {found.tensor_memory} "
            f"columns of tensor memory (of {limits.tensor_memory}); choose a smaller tile or fewer stages"
        )
    elif case.tile and not found.loops:
        row["error"] = f"compiled to {found.instructions} instructions without a loop of matrix products"
    loops = [{"kind": x.kind, "products": x.products, "spills": x.spills, "copies": x.copies} for x in found.loops]
    return row | {"registers": found.registers, "stack": found.stack, "shared": found.shared, "loops": loops}


if __name__ == "__main__":
    sys.exit(main())
