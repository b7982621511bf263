"""Installed, longfold is one name: beside a project's own models/ and data/ its library, operators and command work."""

import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
SOURCE = '''"""Say python -m data.prepare, or python train.py."""
from data.config import (  # é
    DataConfig,
)
import dataclasses; from models import decoder
import kernels.api as k, os
from .near import kernels
from database.models import data

def f():
    from parallel . plan import ir
    "from data.config import nothing"
'''


def test_imports_are_rewritten_and_nothing_else():
    text = SETUP["rewrite"](SOURCE)
    assert text == SOURCE.replace("from data.config import (", "from longfold.data.config import (").replace(
        "from models import", "from longfold.models import"
    ).replace("import kernels.api", "import longfold.kernels.api").replace(
        "from parallel . plan", "from longfold.parallel . plan"
    ).replace("python -m data", "python -m longfold.data").replace("python train.py", "longfold")


def test_an_import_that_binds_a_lost_name_ends_the_build():
    with pytest.raises(ValueError, match=r"a\.py:2: write 'import kernels\.api as"):
        SETUP["rewrite"]("import os\nimport os, kernels.api\n", "a.py")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what git would commit, in a copy, as building leaves files."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines():
        if not name.startswith(("tests/", "docs/")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, ".", "-w", out, cwd=source)
    (found,) = out.glob("longfold-*.whl")
    return found


@pytest.fixture(scope="module")
def project(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with its own models/ and data/, and a fresh venv that sees the requirements of this one."""
    folder = tmp_path_factory.mktemp("project")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "requirements.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    install = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index")
    run(*install, wheel, cwd=folder)
    for name in ("models", "data"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("MINE = True\n")
    return folder


def test_library_and_operators_beside_own_packages(project: Path):
    code = """
import data, models, sys, torch
import longfold.parallel.api as api
from longfold.kernels.api import IntervalMask, attention
from longfold.models.config import ModelConfig
assert models.MINE and data.MINE and "venv" in api.__file__
q, k = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
attention(q, k, k, IntervalMask.from_cu_seqlens([0, 1, 4]))
assert torch.ops.longfold.attention and torch.ops.longfold.merge
api.verify(api.load_strategy("hsap").plan(
    api.load_strategy("hsap").shard(api.PackedLayout.from_lengths([5, 3]), api.MeshSpec(cp_outer=2)),
    api.AttentionShape(2, 1, 8, 8, "fp32"), api.MaskSpec()))
short = {"kernels", "parallel", "training", "bench"} & sys.modules.keys()
assert not short, short
"""
    run(project / "venv" / "bin" / "python", "-c", code, cwd=project)


def test_command_finds_presets_and_trains(project: Path):
    longfold = project / "venv" / "bin" / "longfold"
    shown = run(longfold, "run=plan", "strategy=hsap", "nproc=4", "run.lengths=[40,8,8]", "run.dir=plan", cwd=project)
    assert "strategy hsap on 4 ranks" in shown and list((project / "plan").glob("*-coverage.svg"))
    assert "\n  model.layers" in run(longfold, "--help", cwd=project)
    small = ("run=smoke", "run.steps=2", "data=synthetic", "data.seq_len=64", "data.rows=2", "data.eval_rows=2")
    shown = run(longfold, *small, "nproc=2", "strategy=ring", "wandb.mode=disabled", "run.dir=run", cwd=project)
    assert "smoke: finished" in shown and (project / "run" / "summary.json").exists()


def test_an_editable_install_is_refused(tmp_path: Path):
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("requirements-dev.txt", "requirements-extras.txt", "requirements-peers.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    command = [sys.executable, "setup.py", "-q", "editable_wheel"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode and "longfold cannot be installed editable" in done.stderr
