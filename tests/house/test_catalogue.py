"""What can be chosen by name is documented, and the tree in the docs is the tree."""

import re
from pathlib import Path

import pytest
import yaml

from data.packing import PACKINGS
from data.sources.kinds import SOURCES
from data.sources.mixes import MIXES
from data.tokenizers.table import TOKENIZERS
from kernels.api import BACKENDS
from training.optim.kinds import OPTIMIZERS
from training.screen import config_groups

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ["kernels", "parallel", "models", "data", "training", "bench"]
README = (ROOT / "README.md").read_text()
PAGES = [path for path in (ROOT / "docs").glob("*.md") if path.name != "log.md"]
DOCS = README + "".join(path.read_text() for path in PAGES)
TREE = (ROOT / "docs" / "tree.md").read_text().split("```")[1]
NOTATION = re.findall(r"^\| \*\*(\w+)\*\* \| (.+) \|$", (ROOT / "docs" / "notation.md").read_text(), re.M)
WORDS = re.findall(
    r"\w+",
    "pair block span staircase sight unit lane member scene halo partial buffer field exact stats message wire parcel "
    "batch round edge colour home hop lap slab share seat twin sink piece place team crew",
)
CHOICES = {
    "backend": BACKENDS,
    "source": SOURCES,
    "packing": PACKINGS,
    "mix": MIXES,
    "tokenizer": TOKENIZERS,
    **{f"conf/{group}": names for group, names in config_groups().items()},
}


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in CHOICES.items() for n in names])
def test_choice_is_in_the_docs(kind: str, name: str):
    assert re.search(rf"\b{re.escape(name)}\b", DOCS), f"neither README nor docs name {kind} {name}"


@pytest.mark.parametrize("name", SOURCES)
def test_source_has_a_row_that_names_the_keys_it_reads(name: str):
    keys = {key for kind in SOURCES.values() for key in kind.keys}
    rows = [row for row in re.findall(r"^\| .*", DOCS, re.M) if re.match(rf"\| `data={name}[ `]", row)]
    assert rows, f"no table has a row for data={name}"
    named = {key for row in rows for key in re.findall(r"\bdata\.(\w+)", row)} & keys
    assert named == set(SOURCES[name].keys), f"the row of data={name} names {named}"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimiser_has_a_row_and_the_docs_name_its_keys(name: str):
    assert re.search(rf"^\| `optim={name}[ _`]", DOCS, re.M), f"no table has a row for optim={name}"
    unnamed = [key for key in OPTIMIZERS[name].keys if not re.search(rf"\boptim\.{key}\b", DOCS)]
    assert not unnamed, f"neither README nor docs name optim.{unnamed}"


@pytest.mark.parametrize("path", sorted((ROOT / "conf").rglob("*.yaml")), ids=lambda p: str(p.relative_to(ROOT)))
def test_preset_says_where_it_comes_from(path: Path):
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ") and len(first) > 20
    assert isinstance(yaml.safe_load(path.read_text()), dict)


@pytest.mark.parametrize("floor", FLOORS)
def test_tree_lists_every_file(floor: str):
    section = re.split(r"\n(?=\S)", TREE[TREE.index(f"\n{floor}/") + 1 :])[0]  # a name under another floor is no entry
    for path in (ROOT / floor).rglob("*.py"):
        if path.name not in ("__init__.py", "__main__.py"):
            known = re.search(rf"(?<![\w.]){re.escape(path.name)}", section)
            assert known, f"{path.relative_to(ROOT)} is not in docs/tree.md"
    for folder in (path for path in (ROOT / floor).rglob("*/") if (path / "__init__.py").exists()):
        assert f"\n  {folder.name}/" in section, f"{folder.relative_to(ROOT)} is not in docs/tree.md"


def test_every_file_says_what_it_is():
    for floor in FLOORS:
        for path in (ROOT / floor).rglob("*.py"):
            text = path.read_text()
            assert not text or text.startswith('"""'), f"{path.relative_to(ROOT)} has no docstring"


def test_commands_in_the_readme_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`?make ([a-z]+)", README)) <= targets
    for name in ("help", "setup", "train", "test", "deep", "lint", "bench"):
        assert name in targets


@pytest.mark.parametrize("word", WORDS)
def test_word_of_the_code_is_in_the_notation(word: str):
    assert word in dict(NOTATION), f"docs/notation.md does not say what a {word} is"


def test_notation_defines_words_before_it_uses_them():
    """And each is one that the code uses."""
    code = "".join(path.read_text() for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
    for number, (word, _) in enumerate(NOTATION):
        for earlier, text in NOTATION[:number]:
            assert not re.search(rf"\b{word}(s|es)?\b", text), f"{earlier} is explained by {word}, which comes later"
        assert re.search(rf"\b{word}", code, re.I), f"{word} is in docs/notation.md, and no code says it"
