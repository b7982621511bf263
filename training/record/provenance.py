"""Where a run came from: code, versions, hardware, command."""

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "hydra-core",
    "safetensors",
    "wandb",
    "tokenizers",
    "tiktoken",
    "pyarrow",
    "datasets",
)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def provenance(ranks: int = 1) -> dict:
    """JSON-able facts about a run on `ranks` ranks: git commit and uncommitted changes, versions, hardware, command."""
    sha, diff = _git("rev-parse", "HEAD"), _git("diff", "HEAD")
    return {
        "git_sha": sha.strip() if sha else None,
        "git_diff": diff or None,
        "command": sys.argv,
        "ranks": ranks,
        "python": platform.python_version(),
        "versions": {p: _version(p) for p in PACKAGES},
        "platform": platform.platform(),
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
