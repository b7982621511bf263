"""The walls of the house: what may import what, where torch.distributed may appear, what importing loads."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ["kernels", "parallel", "models", "data", "training", "bench"]
# where talking to other ranks is the job
DISTRIBUTED = {
    "parallel/runtime/comm.py",
    "parallel/runtime/groups.py",
    "parallel/weights/data_parallel.py",
    "parallel/pipeline.py",
    "training/team.py",
}
ENVIRONMENT = {"kernels/compile/runtime.py", "training/start/launch.py"}


def sources() -> list[Path]:
    return [ROOT / "train.py"] + [p for floor in FLOORS for p in sorted((ROOT / floor).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_import_linter_contracts_hold():
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_data_takes_only_the_plan_of_parallel():
    for path in (ROOT / "data").rglob("*.py"):
        for name in imported(path):
            if name.split(".")[0] == "parallel":
                assert name.startswith("parallel.plan"), f"{path.name} imports {name}"


def test_no_import_circle():
    """All imports count, lazy ones and those for a type checker too: a lazy import that closes a circle hides it."""
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in sources()}
    graph = {name: (imported(path) & names.keys()) - {name} for name, path in names.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}; move what both need to a file below both")


def test_train_is_a_thin_entry():
    ours = {n.split(".")[0] for n in imported(ROOT / "train.py")} & set(FLOORS)
    assert ours == {"training"}


def test_nothing_imports_bench():
    for path in sources():
        if path.relative_to(ROOT).parts[0] != "bench":
            assert not any(n.split(".")[0] == "bench" for n in imported(path)), path


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_file_keeps_the_house_rules(path: Path):
    """torch.distributed and the environment only in their rooms; no `utils`; files under 450 lines."""
    name = str(path.relative_to(ROOT))
    text = path.read_text()
    if name not in DISTRIBUTED:
        assert not any(n.startswith("torch.distributed") for n in imported(path))
    if name not in ENVIRONMENT:
        assert not re.search(r"os\.environ|os\.getenv", text)
    assert path.stem not in {"utils", "helpers", "common", "misc"}
    assert len(text.splitlines()) <= 450


@pytest.mark.parametrize("package", ["parallel", "parallel.plan", "kernels"])
def test_package_init_is_empty(package: str):
    assert (ROOT / package.replace(".", "/") / "__init__.py").read_text() == ""


def test_no_folder_is_a_bag():
    """A person finds a file among 16; tests and conf mirror what is elsewhere."""
    for folder in (path for floor in FLOORS for path in (ROOT / floor, *(ROOT / floor).rglob("*/"))):
        files = [path.name for path in folder.glob("*.py")]
        assert len(files) <= 16, f"{folder.relative_to(ROOT)} holds {len(files)} files; give a part of them a folder"


def test_a_class_name_means_one_thing():
    found: dict[str, list[str]] = {}
    for path in sources():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    twice = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert not twice, f"classes of one name: {twice}; give each a name of its own"


def test_planning_loads_no_torch():
    """Of kernels nothing but the mask's rule."""
    code = "import sys, parallel.strategy, parallel.auto; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not {"torch", "triton", "hydra"} & loaded
    assert {name for name in loaded if name.split(".")[0] == "kernels"} == {"kernels", "kernels.mask_spec"}


def test_the_masks_rule_needs_nothing_but_python():
    assert {name.split(".")[0] for name in imported(ROOT / "kernels" / "mask_spec.py")} <= sys.stdlib_module_names


def test_every_declared_dependency_is_imported():
    """A pin that nothing uses is a lie about what the project needs."""
    modules = {"hydra-core": "hydra", "triton": "triton"}
    texts = {n for p in sources() for n in imported(p)}
    used = {n.split(".")[0] for n in texts}
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            package = re.split(r"[=;\[ ]", line)[0]
            if package == "triton":
                continue  # torch.compile needs it, and torch's CPU wheel does not bring it
            assert modules.get(package, package) in used, package


def test_project_does_not_name_its_birthplace():
    done = subprocess.run(
        ["git", "grep", "-nIE", r"\.\./shared|/(work|farm)/|pypi\.org"], cwd=ROOT, capture_output=True, text=True
    )
    hits = [line for line in done.stdout.splitlines() if not line.startswith("tests/house/")]
    assert not hits, hits
