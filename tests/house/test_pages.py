"""The README fits a newcomer's patience, and what it and the pages show runs as it stands."""

import re
from pathlib import Path

import pytest

from training.show.help import help_text, wants_help
from training.show.keys import SECTIONS, UNITS, keys_of

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = {"extending.md", "own_loop.md"}  # their blocks run in tests/docs
BLOCKS = [
    pytest.param(code, id=f"{path.name}-{number}")
    for path in PAGES
    if path.name not in ELSEWHERE
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S))
]


def test_readme_is_short():
    assert len(README) <= 9000, f"README.md has {len(README):,} characters; move a part to a page of docs/"


def test_first_screen_shows_a_picture_and_a_result():
    first = README[:2500]
    assert "](docs/figures/" in first and first.count("\n| `") >= 5


def test_library_block_is_short():
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(block.strip().splitlines()) <= 15


def test_reading_order_is_eight_files_that_can_be_read_in_an_afternoon():
    order = re.findall(r"^\d+\. `([\w/.]+)`", README, re.M)
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in order}
    assert len(order) == 8 and sum(lines.values()) <= 1800, lines


def test_readme_links_every_page():
    for path in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{path.name})" in README, f"README.md does not link docs/{path.name}"


@pytest.mark.parametrize("name", [path.name for path in PAGES if path.parent.name == "docs" and path.name != "log.md"])
def test_page_has_a_picture_a_table_or_code(name: str):
    text = (ROOT / "docs" / name).read_text()
    assert "](figures/" in text or "\n|---" in text or "```" in text


@pytest.mark.parametrize("code", BLOCKS)
def test_python_block_runs(code: str, capsys: pytest.CaptureFixture[str]):
    """Each block as it stands; what a comment `# -> ...` says that print shows, it shows."""
    exec(code, {})
    printed = capsys.readouterr().out.splitlines()
    for shown in re.findall(r"^print\(.*# -> (.*)", code, re.M):
        assert shown in printed


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_has_a_meaning_and_numbers_a_unit(section: str):
    for key in keys_of(section):
        assert len(key.meaning) > 8, key


def test_units_are_of_keys_that_exist():
    assert UNITS.keys() <= {key.name for section in SECTIONS for key in keys_of(section)}


def test_help_lists_every_key_and_command():
    text = help_text("python train.py\n")
    for section in SECTIONS:
        for key in keys_of(section):
            assert f"  {key.name}" in text
    assert text.startswith("python train.py\n") and max(map(len, text.splitlines())) <= 118
    assert wants_help(["run=plan", "--help"]) and wants_help(["-h"]) and not wants_help(["run=plan"])
