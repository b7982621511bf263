"""What the README and docs show is what the code makes: tables, worked numbers, figures, library use."""

import dataclasses
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from parallel.strategy import load_strategy, preset_names
from training.config import Config, config_hash
from training.generated import BLOCKS, ROOT, figures, rewrite, small_plan
from training.show.plan_view import rank_lines

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_what_the_code_makes(name: str):
    text = (ROOT / name).read_text()
    assert rewrite(text, BLOCKS[name]) == text, f"{name} is out of date: python -m training.generated"


def test_missing_markers_are_refused():
    with pytest.raises(ValueError, match="<!-- presets: "):
        rewrite("no table here", BLOCKS["docs/strategies.md"])


def test_every_preset_has_its_row():
    for name in preset_names():
        assert f"\n| `{name}` | " in (ROOT / "docs" / "strategies.md").read_text()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_figures_are_there(path: Path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (path.parent / target).exists(), target


def test_every_figure_is_made_and_shown():
    shown = {name for path in PAGES for name in re.findall(r"figures/([\w-]+)\.svg", path.read_text())}
    assert shown == {path.stem for path in (ROOT / "docs" / "figures").glob("*.svg")} == set(figures())


def test_the_numbers_in_the_prose_of_the_plan():
    """docs/plan.md works a batch through; what it says in words is the plan's."""
    plan, text = small_plan(), (ROOT / "docs" / "plan.md").read_text()
    assert plan.placement.layout.lengths.tolist() == [5, 3, 4] and "5, 3 and 4 tokens" in text
    assert [n * (n + 1) // 2 for n in (5, 3, 4)] == [15, 6, 10] and plan.work.sum() == 31
    keys = 6 * 1 * (64 + 64) * 4
    assert keys == 3072 and "= 3,072 bytes" in text
    assert all(plan.bytes_of("forward")["kv"][a, 1 - a] == keys for a in (0, 1))
    assert all(plan.bytes_of("backward")[c][a, 1 - a] == keys for a in (0, 1) for c in ("kv", "grad_kv"))
    assert [line.peak for line in rank_lines(plan, (0, 1))] == [2 * keys + 96] * 2 and "= 96." in text
    command = re.search(r"run=plan strategy=(\w+) nproc=(\d) 'run.lengths=\[([\d,]+)\]'", text)
    assert command and command.groups() == (plan.axes["name"], str(plan.size), "5,3,4")
    assert plan.axes == dataclasses.asdict(load_strategy("zigzag_ring"))


def test_run_folder_in_the_readme_is_the_default_commands():
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = OmegaConf.to_object(compose("config"))
    assert isinstance(config, Config)
    config.validate()
    assert set(re.findall(r"runs/run-([0-9a-f]{8})", README)) == {config_hash(config)}
