"""What a wheel holds: the checkout's folders under one name, longfold, so that they stand beside anyone's own packages.

    pip wheel . --no-deps          longfold.kernels, longfold.parallel, ..., and the command longfold

In the checkout the folders import each other by their short names (`from kernels.api import ...`). Building copies them
into longfold/ and rewrites these imports, found in the syntax tree; nothing else in a file changes but commands in its
text. A form of import that cannot be rewritten ends the build with a sentence.
"""

import ast
import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel
from setuptools.command.egg_info import egg_info

NAME = "longfold"
FLOORS = ("kernels", "parallel", "models", "data", "training", "bench")
COMMANDS = re.compile(rf"python -m ({'|'.join(FLOORS)})\b")


def rewrite(text: str, where: str = "") -> str:
    """A source file of the checkout as it is in the wheel.

    Raises:
        ValueError: `import kernels.api` without `as`, which binds a name that the wheel does not have.
    """
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw, edits = text.encode(), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not node.level and _ours(node.module or ""):
            begin = starts[node.lineno - 1] + node.col_offset
            edits.append(raw.index((node.module or "").split(".")[0].encode(), begin + len("from")))
        for alias in node.names if isinstance(node, ast.Import) else ():
            if _ours(alias.name) and not alias.asname:
                raise ValueError(f"{where}:{node.lineno}: write 'import {alias.name} as ...' or 'from ... import ...'")
            if _ours(alias.name):
                edits.append(starts[alias.lineno - 1] + alias.col_offset)
    for place in sorted(edits, reverse=True):
        raw = raw[:place] + f"{NAME}.".encode() + raw[place:]
    return COMMANDS.sub(rf"python -m {NAME}.\1", raw.decode()).replace("python train.py", NAME)


def _ours(module: str) -> bool:
    return module.split(".")[0] in FLOORS


class Build(build_py):
    """Copies the floors, the entry and the presets into longfold/, and rewrites what is Python."""

    def run(self) -> None:
        root = Path(self.build_lib) / NAME
        shutil.rmtree(root, ignore_errors=True)  # of an earlier build
        super().run()
        root.mkdir(parents=True, exist_ok=True)
        (root / "__init__.py").write_text('"""longfold: training on packed documents; see the README."""\n')
        shutil.copy("train.py", root / "train.py")
        shutil.copytree("conf", root / "conf")
        (root / "conf" / "__init__.py").write_text('"""Presets, which Hydra finds as a package."""\n')
        for path in root.rglob("*.py"):
            path.write_text(rewrite(path.read_text(), str(path)))


class Metadata(egg_info):
    """The one name that the wheel brings."""

    def run(self) -> None:
        super().run()
        Path(self.egg_info, "top_level.txt").write_text(f"{NAME}\n")


class NoEditable(editable_wheel):
    """There is no longfold/ in the checkout to link to."""

    def run(self) -> None:
        raise SystemExit(
            "longfold cannot be installed editable, as its folders would be importable under names such as data and "
            "models; work in the checkout, or install a copy with: pip install ."
        )


if __name__ == "__main__":
    setup(
        packages=[f"{NAME}.{name}" for name in find_packages(include=[f"{floor}*" for floor in FLOORS])],
        package_dir={f"{NAME}.{floor}": floor for floor in FLOORS},
        cmdclass={"build_py": Build, "egg_info": Metadata, "editable_wheel": NoEditable},
    )
