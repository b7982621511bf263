"""Every command of the README and the pages works: what a laptop can run is run, the others are composed and checked.

Commands run in a folder that holds what they name; those that train are cut to two small steps.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pyarrow.parquet
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.console import Console

from data.prepare.command import parse, prepare
from tests.checkpoints import make_model
from tests.data.conftest import train as train_tokenizer
from training.adopt import adopt_checkpoint
from training.config import Config
from training.record.metrics import METRICS
from training.screen import CONF, config_groups, screen_overrides
from training.show.keys import SECTIONS, keys_of
from training.start.launch import launch

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [path for path in PAGES if path.name != "log.md"]
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
STARTS = re.compile(r"(make|python|torchrun|srun|pip|longfold|\.venv/bin/\w+) ")
SMALL = ["run.steps=2", "data.seq_len=64", "data.rows=4", "data.eval_rows=4", "data.eval_fraction=0.3"]
SMALL += ["optim.warmup_steps=0", "run.device=cpu", "wandb.mode=disabled"]
PIP = {  # what another test does, or a network would be asked for
    "pip install .", "pip wheel . --no-deps", "pip install -e .", ".venv/bin/pip install -r requirements-extras.txt",
    ".venv/bin/pip install --no-deps -r requirements-peers.txt",
}  # fmt: skip
TIMEOUT = 280


class Command(NamedTuple):
    page: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def commands() -> Iterator[Command]:
    for path in PAGES:
        text = re.sub(r"```python\n.*?```", "", path.read_text(), flags=re.S)
        blocks = "\n".join(re.findall(r"```\n(.*?)```", text, re.S))
        inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
        for line in dict.fromkeys([*blocks.splitlines(), *inline]):
            if STARTS.match(line) and "..." not in line.split("#")[0]:
                yield Command(path.name, line)


def overrides_of(words: list[str]) -> tuple[int, list[str]] | None:
    """(ranks that a launcher gives, or 0; what follows the entry) of a command that trains, plans or explains."""
    for entry in ("train.py", "longfold", "longfold.train"):
        if entry in words:
            before, after = words[: words.index(entry)], words[words.index(entry) + 1 :]
            given = [int(before[before.index(k) + 1]) for k in ("--nnodes", "--nodes") if k in before]
            each = [int(before[before.index(k) + 1]) for k in before if "per-node" in k]
            return (given or [1])[0] * each[0] if each else 0, after
    return None


COMMANDS = list(commands())
TRAINING = [command for command in COMMANDS if overrides_of(command.words)]
OTHERS = [command for command in COMMANDS if not overrides_of(command.words)]


def here(command: Command) -> bool:
    """Whether a laptop runs it in seconds: no launcher, no sweep, no files of a run that is not there."""
    ranks, overrides = overrides_of(command.words) or (0, [])
    return not ranks and "-m" not in overrides and command.words[0] != "longfold"


def names(command: Command) -> str:
    return f"{command.page}: {command.text.split('#')[0].strip()}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the files that the pages' commands name."""
    found = tmp_path_factory.mktemp("work")
    for name in ("corpus/deep", "DIR"):
        (found / name).mkdir(parents=True)
    text = [f"document {n} of a corpus, {n * n}, and so on" for n in range(40)]
    for n, each in enumerate(text):
        (found / "corpus" / "deep" / f"{n}.txt").write_text(each * 3)
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), found / "corpus" / "a.parquet")
    for name, form in (
        ("my", '{{"text": "{}"}}'),
        ("answers", '{{"question": "why {}?", "answer": "so"}}'),
        ("chats", '{{"messages": [{{"role": "user", "content": "{}"}}, {{"role": "assistant", "content": "yes"}}]}}'),
    ):
        (found / f"{name}.jsonl").write_text("".join(form.format(each) + "\n" for each in text))
    for path in (found / "tokenizer.json", found / "DIR" / "tokenizer.json"):
        train_tokenizer(path, "gpt2", ["<|endoftext|>"])
    make_model("llama", vocab_size=320, max_position_embeddings=2048).save_pretrained(found / "DIR")
    return found


def test_there_are_commands_to_check():
    assert len(TRAINING) > 15 and len(OTHERS) > 12 and sum(map(here, TRAINING)) > 10


@pytest.mark.parametrize("command", TRAINING, ids=names)
def test_overrides_are_known_and_fit_the_ranks(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    ranks, overrides = overrides_of(command.words) or (0, [])
    screen_overrides(overrides)
    flags = {"-m", "--cfg", "job", "--help"}
    plain = [part.split(",")[0] if "-m" in overrides else part for part in overrides if part not in flags]
    if "data=tokens" in plain:
        return  # what it reads is prepared where it is run
    config = _composed(plain)
    if config.run.task.value == "train":
        world = ranks or config.nproc or 1
        config.data.rows = world  # a batch for so many ranks
        config.check_ranks(world)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(each, marks=[pytest.mark.deep] if "nproc=" in each.text and "run=" not in each.text else [])
        for each in TRAINING
        if here(each)
    ],
    ids=names,
)
def test_a_laptops_command_runs(command: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As `train.py` runs it, in this process."""
    monkeypatch.chdir(folder)
    _, overrides = overrides_of(command.words) or (0, [])
    if {"--help", "--cfg"} & set(overrides):
        assert "layers" in _run([str(ROOT / "train.py"), *overrides], folder)
        return
    if "data=tokens" in overrides:
        prepare(parse(_prepare_of("tokenizer.json")), Console(quiet=True))
    trains = not any(part.startswith("run=") for part in overrides)
    config = _composed([*overrides, *(SMALL if trains else []), f"run.dir={tmp_path}"])
    outcome = launch(config)
    if trains:
        assert outcome.step == 2 and (tmp_path / "summary.json").exists()
    if "run=plan" in overrides:
        assert list(tmp_path.glob("*-timeline.svg"))


def _composed(overrides: list[str]) -> Config:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("config", overrides=overrides)
    adopt_checkpoint(composed)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    config.validate()
    return config


def _prepare_of(word: str) -> list[str]:
    (found,) = [each.words[3:] for each in OTHERS if each.words[1:3] == ["-m", "data.prepare"] and word in each.words]
    return found


def _run(words: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("command", OTHERS, ids=names)
def test_other_commands(command: Command, folder: Path):
    words = [word.removeprefix(".venv/bin/") for word in command.words]
    if words[0] == "make":
        assert words[1] in TARGETS
        return
    if words[0] == "pip":
        assert " ".join(command.words) in PIP
        assert all((ROOT / word).exists() for word in words if word.startswith("requirements"))
        return
    if words[-1] == "own_loop.py":  # tests/docs/test_own_loop.py
        return
    assert words[:2] == ["python", "-m"], command
    module, arguments = words[2].removeprefix("longfold."), words[3:]
    if module == "data.prepare" and arguments:
        assert "tokens" in _run(["-m", module, *arguments], folder)
        assert (folder / arguments[arguments.index("--out") + 1] / "manifest.json").exists()
    elif module == "training.generated":
        assert not arguments  # tests/house/test_generated.py compares what it writes
    else:
        shown = _run(["-m", module, "--help"], folder)
        assert all(word in shown for word in arguments if word.startswith("--"))


HINTS = sorted({
    (path.name, code)
    for path in PAGES
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", path.read_text(), flags=re.S))
    if re.match(r"'?(model|data|optim|strategy|run|nproc|wandb)(\.\w+)*=", code) and "..." not in code
})  # fmt: skip


@pytest.mark.parametrize(("page", "hint"), HINTS)
def test_hints_of_overrides_compose(page: str, hint: str):
    words = [word for word in shlex.split(hint) if word not in ("-m",)]
    screen_overrides([word.replace("NAME_OR_FOLDER", "x").replace("DIR", "x") for word in words])


def test_keys_that_the_pages_name_exist():
    known = {key.name for section in SECTIONS for key in keys_of(section)} | {f"data.{s}" for s in ("sources",)}
    for path in PAGES:
        for name in re.findall(r"`((?:model|data|optim|strategy|run|wandb)(?:\.\w+)+)[`=]", path.read_text()):
            module = ROOT / name.replace(".", "/")
            exists = name in known or module.with_suffix(".py").exists() or module.is_dir()
            assert exists or name in ("strategy.planner",), f"{path.name} names {name}"
        for name in re.findall(r"`((?:train|eval|perf|mem|plan|data|comm)/\w+)`", path.read_text()):
            assert name in METRICS or (ROOT / name).exists(), f"{path.name} names the metric {name}"
    assert config_groups()
