"""What the CPU backend costs beside plain torch, in one run on this machine.

python -m bench.cpu            8,192 and 16,384 tokens, some minutes
python -m bench.cpu --quick    4,096 tokens, under a minute
python -m bench.cpu --json     rows as JSON lines
"""

from __future__ import annotations

import argparse

import torch

from bench.cpu.attention import attention_section
from bench.cpu.step import step_section
from bench.table import Report


def main(arguments: list[str] | None = None) -> None:
    """Run the bench's sections one after the other."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu", description="What the CPU backend costs beside plain torch."
    )
    parser.add_argument("--quick", action="store_true", help="4,096 tokens only, under a minute on 2 cores")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines on standard output, nothing else")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn document lengths and inputs")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of attention's inputs"
    )
    options = parser.parse_args(arguments)
    report = Report(options.json)
    sizes, seconds = ([4096], 2.0) if options.quick else ([8192, 16384], 12.0)
    attention_section(report, sizes, seconds, options.seed, getattr(torch, options.dtype))
    step_section(report, sizes[:1], 3, options.seed)


if __name__ == "__main__":
    main()
