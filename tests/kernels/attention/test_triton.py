"""The Triton backend through the tests that every backend passes, in processes that interpret its kernels.

Triton reads TRITON_INTERPRET when it decorates a kernel, and the compile checks need it unset, so each part below is a
pytest of its own. Run one by hand with
`TRITON_INTERPRET=1 pytest -n0 tests/kernels/attention/test_failures.py -k triton`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PARTS = {
    "failures": ["tests/kernels/attention/test_failures.py", "-k", "triton"],
    "sweep": ["tests/kernels/attention/test_attention.py", "-k", "triton and test_exact"],
    "precision": ["tests/kernels/attention/test_attention.py", "-k", "triton and precision"],
    "layouts": ["tests/kernels/attention/test_attention.py", "-k", "triton and not test_exact and not precision"],
    "memory": ["tests/kernels/attention/test_layouts.py", "-k", "triton"],
    "accumulating": ["tests/kernels/attention/test_triton_rounds.py", "tests/kernels/merge/test_triton_merge.py"],
    "accumulators": ["tests/kernels/attention/test_accumulators.py", "-k", "triton"],
    "rounds": ["tests/kernels/attention/test_rounds.py", "-k", "triton"],
    "codec": ["tests/kernels/codec/test_codec.py", "tests/kernels/codec/test_triton_codec.py", "-k", "triton"],
}


def run_interpreted(arguments: list[str]) -> None:
    """A pytest in the interpreter; its output is the message if it fails or runs nothing."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        environment.pop(name, None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.timeout(1500)  # a minute of computing at most; the machine may be shared
@pytest.mark.parametrize("part", list(PARTS))
def test_in_the_interpreter(part: str) -> None:
    """Right answers in fp32, fp16 and bf16 on the whole contract."""
    run_interpreted([*PARTS[part], "-m", "not deep"])


@pytest.mark.deep
@pytest.mark.timeout(3000)
def test_in_the_interpreter_deep() -> None:
    """The long tests of those files."""
    files = ["attention/test_attention.py", "attention/test_triton_rounds.py"]
    files += ["codec/test_codec.py", "codec/test_triton_codec.py"]
    run_interpreted([*(f"tests/kernels/{name}" for name in files), "-k", "triton", "-m", "deep"])
