"""Every sentence of the proof is said about a plan that deserves it, and of no other."""

import ast
import re
import traceback
from pathlib import Path

import pytest

import parallel.proof.verify as proof
from parallel.plan.plan import Plan
from parallel.proof.verify import PlanError, verify
from tests.parallel.proof.broken import BROKEN

FOLDER = Path(proof.__file__).parent
CASES = {name: case for group in BROKEN.values() for name, case in group.items()}
DOCS = (Path(__file__).resolve().parents[3] / "docs" / "proof.md").read_text()


def said(plan: Plan) -> tuple[str, set[tuple[str, int]]]:
    """What verify says about a plan, and the lines of the proof on the way of its error."""
    with pytest.raises((PlanError, ValueError)) as caught:
        verify(plan)
    frames = traceback.extract_tb(caught.value.__traceback__)
    return str(caught.value), {(Path(f.filename).name, f.lineno or 0) for f in frames}


@pytest.mark.parametrize("name", CASES)
def test_broken_plan_is_refused(name: str):
    match, make = CASES[name]
    sentence, _ = said(make())
    assert re.search(match, sentence), sentence


def test_every_sentence_has_a_broken_plan():
    """Each `raise` of the proof is reached, and each fault that one raise or another quotes."""
    reached: set[tuple[str, int]] = set()
    sentences = []
    for _, make in CASES.values():
        sentence, lines = said(make())
        reached |= lines
        sentences.append(sentence)
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                assert any((path.name, line) in reached for line in lines), f"{path.name}:{node.lineno} is never raised"
            elif isinstance(node, ast.FunctionDef) and node.name.endswith("_fault"):
                for fault in (n.value for n in ast.walk(node) if isinstance(n, ast.Return)):
                    if isinstance(fault, ast.JoinedStr):
                        wanted = pattern(fault)
                        assert any(re.search(wanted, s) for s in sentences), f"{path.name}:{fault.lineno}: {wanted}"


def pattern(text: ast.JoinedStr) -> str:
    """An f-string as a pattern: what it always says, and anything between."""
    return ".+".join(re.escape(str(part.value)) for part in text.values if isinstance(part, ast.Constant))


def test_no_two_sentences_are_the_same():
    """A sentence names one rule: where two places raise, what is said differs."""
    known: dict[str, str] = {}
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                text = ast.unparse(node.exc.args[-1])
                assert text not in known, f"{path.name}:{node.lineno} says what {known[text]} says"
                known[text] = f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("group", BROKEN)
def test_the_page_of_the_proof_lists_them(group: str):
    section = DOCS.split(f"\n## {group}\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| [^|]+ \| ([^|]+) \|$", section, re.M)[1:]
    assert sorted(name.strip() for row in listed for name in row.split(";")) == sorted(BROKEN[group])


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("not declared", "forward, rank 0, step 1 (Attend into=acc q=nowhere kv=kv): buffer nowhere"),
        ("a batch of nothing", "forward, rank 0, step 5 (Post batch=9 comm=cp): batch 9"),
        ("what is sent is changed later", "backward, rank 1, grad_kv: head 0"),
        ("dq into a dk", "backward, rank 0, step 2 (AttendBackward q=q kv=kv into_q=grad_kv into_kv=grad_kv): "),
        ("freed twice", "forward, rank 0, step 5 (Free buffer=kv1): kv1"),
        ("never freed", "forward, rank 0, step 4 (the end): temporary buffer kv1"),
        ("a lost block", "forward, rank 0, out: head 0"),
        ("too little reserved", "forward, rank 0: kv1"),
    ],
)  # fmt: skip
def test_an_error_says_where(name: str, where: str):
    sentence, _ = said(CASES[name][1]())
    assert sentence.startswith(where), sentence
