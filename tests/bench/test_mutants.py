"""The mutation runner: what it changes and what it leaves, and that it tells the noticed from the unnoticed."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import bench.mutants.__main__ as bench
from bench.mutants import run
from bench.mutants.operators import OPERATORS, Mutant, mutants_of
from bench.mutants.run import Tree, Verdict
from bench.mutants.tables import EQUIVALENT, TESTS, answering

SOURCE = '''"""A docstring of 1 number."""
import os
LIMIT: int = 3
KIND = A | int


def f(x: int | None, y: list[int] = [1], *, z: bool = True) -> bool:
    """Another, with 2 < 3."""
    if x is None and not z:
        raise ValueError(f"no {1 + 2} " + "words")
    for k in sorted(y):
        if k == 5:
            continue
        self.total += min(k, 7)
    print("nothing", 4)
    while x < 9:
        cache[x] = -x
    assert x > 0, "says so"
    return [i for i in y[:2] if i in y]


def g(a):
    side(a, "left")
    return a <= 1
'''
WANTED = {
    ("number", "3", "4"), ("number", "3", "2"),
    ("number", "1", "2"), ("number", "1", "0"), ("constant", "True", "False"),
    ("condition", "x is None and not z", "True"), ("condition", "x is None and not z", "False"),
    ("boolean", "x is None and not z", "(x is None or not z)"), ("compare", "x is None", "(x is not None)"),
    ("negation", "not z", "z"), ("statement", 'raise ValueError(f"no {1 + 2} " + "words")', "pass"),
    ("call", "sorted(y)", "list(y)"),
    ("condition", "k == 5", "True"), ("condition", "k == 5", "False"), ("compare", "k == 5", "(k != 5)"),
    ("number", "5", "6"), ("number", "5", "4"), ("statement", "continue", "pass"),
    ("statement", "self.total += min(k, 7)", "pass"),
    ("arithmetic", "self.total += min(k, 7)", "self.total -= min(k, 7)"), ("call", "min(k, 7)", "max(k, 7)"),
    ("number", "7", "8"), ("number", "7", "6"),
    ("condition", "x < 9", "False"), ("compare", "x < 9", "(x <= 9)"), ("compare", "x < 9", "(x >= 9)"),
    ("number", "9", "10"), ("number", "9", "8"),
    ("statement", "cache[x] = -x", "pass"), ("negation", "-x", "x"),
    ("return", "return [i for i in y[:2] if i in y]", "return None"),
    ("slice", ":2", ":"), ("slice", ":2", "1:2"), ("number", "2", "3"), ("number", "2", "1"),
    ("condition", "i in y", "True"), ("condition", "i in y", "False"), ("compare", "i in y", "(i not in y)"),
    ("statement", "side(a, \"left\")", "pass"), ("call", "side(a, \"left\")", "side(a, 'right')"),
    ("return", "return a <= 1", "return None"), ("return", "return a <= 1", "return True"),
    ("return", "return a <= 1", "return False"), ("compare", "a <= 1", "(a < 1)"), ("compare", "a <= 1", "(a > 1)"),
}  # fmt: skip


def test_every_change_and_no_word(tmp_path: Path):
    (tmp_path / "one.py").write_text(SOURCE)
    found = mutants_of("one.py", tmp_path)
    assert {(m.operator, m.before, m.after) for m in found} == WANTED
    assert {m.operator for m in found} == set(OPERATORS)
    lines = SOURCE.splitlines()
    for mutant in found:
        changed = mutant.source.splitlines()
        compile(mutant.source, "one.py", "exec")
        differing = [n for n, (a, b) in enumerate(zip(lines, changed), 1) if a != b]
        assert len(lines) == len(changed) and differing == [mutant.line]
        assert (mutant.text, mutant.becomes) == (lines[mutant.line - 1].strip(), changed[mutant.line - 1].strip())


def test_a_draw_is_its_seeds_alone():
    files = bench.known_files(["data/packing.py", "parallel/proof"])
    assert files[0] == "data/packing.py" and "parallel/proof/verify.py" in files and len(files) == 6
    first, again, other = (bench.draw(files, 20, seed) for seed in (3, 3, 4))
    assert first == again != other and len({m.source for m in first}) == 20
    assert {m.operator for m in bench.draw(files, 9, 0, ["boolean", "slice"])} == {"boolean", "slice"}
    assert len(bench.draw(["data/packing.py"], 10**6, 0)) == len(mutants_of("data/packing.py", bench.ROOT))
    assert {"parallel/runtime/executor.py", "training/record/checkpoint.py"} <= set(bench.known_files(None))
    with pytest.raises(ValueError, match=r"no tests are listed for data/order\.py"):
        bench.known_files(["data/order.py"])


def test_every_test_in_the_table_is_there():
    for tests in TESTS.values():
        for test in tests:
            assert (bench.ROOT / test.split("::")[0]).exists(), test
    assert answering("parallel/proof/verify.py") == TESTS["parallel/proof/"]


def test_reasons_are_of_changes_that_can_be_made():
    known = {
        (m.path, m.text, m.operator, m.becomes)
        for path in {key[0] for key in EQUIVALENT}
        for m in mutants_of(path, bench.ROOT)
    }
    for key, why in EQUIVALENT.items():
        assert key in known, key
        assert len(why) > 10


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[Tree]:
    """A repository of one function and one test."""
    (tmp_path / "toy.py").write_text("def f(n):\n    while n < 3:\n        n += 1\n    return n\n")
    (tmp_path / "test_toy.py").write_text("from toy import f\n\n\ndef test_f():\n    assert f(1) == 3\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = deep\npythonpath = .\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    with Tree(tmp_path, 1) as tree:
        yield tree
    assert not tree.folder.exists()


def test_noticed_unnoticed_and_never_ending(toy: Tree, monkeypatch: pytest.MonkeyPatch):
    by_change = {m.becomes: m for m in mutants_of("toy.py", toy.root)}
    changes = ("return None", "while n < 2:", "while (n <= 3):")
    outcomes = list(toy.attempt_all([(by_change[change], ("test_toy.py", "test_absent.py")) for change in changes]))
    assert [(outcome.result, outcome.by) for outcome in outcomes] == [("killed", "test_toy.py::test_f")] * 3
    same = Mutant("toy.py", 4, "", "return", "", "", "", (toy.root / "toy.py").read_text() + "# as it was\n")
    assert toy.attempt(same, ("test_toy.py",)).result == "survived"
    monkeypatch.setattr(run, "AT_LEAST_S", 5.0)
    monkeypatch.setattr(run, "PATIENCE", 0.0)
    assert toy.attempt(by_change["pass"], ("test_toy.py",)).result == "timeout"
    assert (toy.folder / "0" / "toy.py").read_text() == (toy.root / "toy.py").read_text()


def test_tests_that_fail_by_themselves_are_no_judges(toy: Tree):
    (toy.folder / "0" / "test_toy.py").write_text("def test_f():\n    assert False\n")
    mutant = mutants_of("toy.py", toy.root)[0]
    with pytest.raises(RuntimeError, match=r"the tests fail before anything is changed: test_toy\.py::test_f"):
        toy.attempt(mutant, ("test_toy.py",))


def test_rows_rate_and_another_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Without running anything: the first survives, the second never ends, the third nothing can notice."""
    results = {}

    def pretend(self: Tree, tasks: list) -> Iterator[Verdict]:
        for number, (mutant, _) in enumerate(tasks):
            result = ["survived", "timeout", "survived", "killed"][number % 4]
            results[mutant] = result
            yield Verdict(mutant, result, 1.0, "")

    monkeypatch.setattr(Tree, "attempt_all", pretend)
    monkeypatch.setattr(Tree, "__enter__", lambda self: self)
    monkeypatch.setattr(Tree, "__exit__", lambda self, *_: None)
    third = bench.draw(["data/packing.py"], 4, 0)[2]
    monkeypatch.setitem(bench.EQUIVALENT, (third.path, third.text, third.operator, third.becomes), "as fast as it was")
    arguments = ["--paths", "data/packing.py", "--number", "4"]
    bench.main([*arguments, "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["result"] for row in rows[:4]] == ["survived", "timeout", "equivalent", "killed"]
    assert rows[2]["reason"] == "as fast as it was"
    assert rows[-1] == {
        "total": "all", "drawn": 4, "killed": 2, "survived": 1, "equivalent": 1, "rate": 0.667, "seed": 0,
    }  # fmt: skip
    bench.main(arguments)
    printed = capsys.readouterr().out
    assert "4 changes of 1 files, seed 0" in printed and "(as fast as it was)" in printed and "0.667" in printed
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    again = bench.earlier_survivors(tmp_path / "rows.jsonl")
    assert next(iter(results)) in again and len({m.becomes for m in again}) == 1
