"""What the CPU backend costs beside plain torch, in one run on this machine.

python -m bench.cpu            8,192 and 16,384 tokens, some minutes
python -m bench.cpu --quick    4,096 tokens, under a minute
python -m bench.cpu --json     rows as JSON lines
"""

from __future__ import annotations

import argparse

from bench.attention_cpu import attention_section
from bench.table import Report


def main(arguments: list[str] | None = None) -> None:
    """Run the bench's sections one after the other."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu", description="What the CPU backend costs beside plain torch."
    )
    parser.add_argument("--quick", action="store_true", help="4,096 tokens only, under a minute on 2 cores")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines on standard output, nothing else")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn document lengths and inputs")
    options = parser.parse_args(arguments)
    report = Report(options.json)
    sizes, seconds = ([4096], 2.0) if options.quick else ([8192, 16384], 12.0)
    attention_section(report, sizes, seconds, options.seed)


if __name__ == "__main__":
    main()
