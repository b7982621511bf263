"""Do the tests notice? Small changes of the sources on which everything rests, each tried against its tests.

python -m bench.mutants                       200 changes drawn with seed 0, at most two at a time: an hour or two
python -m bench.mutants --paths parallel/proof --number 1000      every change there
python -m bench.mutants --paths parallel/proof --operators statement     does a test need each rule of the proof?
python -m bench.mutants --quick               a handful, under a minute
python -m bench.mutants --json                rows as JSON lines
python -m bench.mutants --again rows.jsonl    only those that survived in an earlier run

`operators.py` lists the kinds of changes, `tables.py` which tests answer for which file, and which changes nothing can
notice, with the reason. Changes are made in copies of the tree. The rate at the end is killed / (drawn - equivalent).
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench.mutants.operators import OPERATORS, Mutant, mutants_of
from bench.mutants.run import Tree, Verdict
from bench.mutants.tables import EQUIVALENT, TESTS, answering
from bench.table import Report

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("kernels/codec/torch_codec.py",)  # whose tests take seconds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="which changes are drawn")
    parser.add_argument("--number", type=int, default=200, help="how many")
    parser.add_argument("--paths", nargs="+", default=None, help="files or folders; all that tables.py knows")
    parser.add_argument("--operators", nargs="+", choices=list(OPERATORS), help="these kinds of changes alone")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=2, help="how many are tried at a time")
    parser.add_argument("--again", type=Path, help="JSON lines of an earlier run: try what survived there")
    parser.add_argument("--quick", action="store_true", help="four changes whose tests take seconds")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines on standard output, nothing else")
    options = parser.parse_args(arguments)
    report = Report(options.json)
    files = known_files(list(QUICK) if options.quick and not options.paths else options.paths)
    number = min(options.number, 4) if options.quick else options.number
    kinds = options.operators or list(OPERATORS)
    drawn = earlier_survivors(options.again) if options.again else draw(files, number, options.seed, kinds)
    report.note(f"{len(drawn)} changes of {len(files)} files, seed {options.seed}")
    tally(report, drawn, options.jobs, options.seed)


def known_files(paths: list[str] | None) -> list[str]:
    """The files of `paths`, or all that have tests in the table. ValueError for a path with none."""
    every = sorted(
        str(path.relative_to(ROOT))
        for name in TESTS
        for path in ([ROOT / name] if name.endswith(".py") else (ROOT / name).glob("*.py"))
        if path.name != "__init__.py"
    )
    if paths is None:
        return every
    wanted = [str(Path(path).resolve().relative_to(ROOT)) if Path(path).exists() else path for path in paths]
    for path in wanted:
        if not any(one == path or one.startswith(f"{path.rstrip('/')}/") for one in every):
            raise ValueError(f"no tests are listed for {path} in bench/mutants/tables.py; it knows {', '.join(TESTS)}")
    return [one for one in every if any(one == p or one.startswith(f"{p.rstrip('/')}/") for p in wanted)]


def draw(files: list[str], number: int, seed: int, kinds: Sequence[str] = tuple(OPERATORS)) -> list[Mutant]:
    """`number` of the files' mutants (all where there are fewer), each as likely as any other, in order of files."""
    every = [mutant for path in files for mutant in mutants_of(path, ROOT) if mutant.operator in kinds]
    chosen = random.Random(seed).sample(range(len(every)), min(number, len(every)))
    return [every[index] for index in sorted(chosen)]


def earlier_survivors(path: Path) -> list[Mutant]:
    """What survived in an earlier run and can still be made."""
    rows = [row for line in path.read_text().splitlines() if (row := json.loads(line)).get("result") == "survived"]
    wanted = {(r["file"], r["text"], r["operator"], r["becomes"]) for r in rows}
    found = [m for file in sorted({r["file"] for r in rows}) for m in mutants_of(file, ROOT)]
    return [m for m in found if (m.path, m.text, m.operator, m.becomes) in wanted]


def reason(mutant: Mutant) -> str | None:
    """Why no test can notice a mutant, where that is known."""
    return EQUIVALENT.get((mutant.path, mutant.text, mutant.operator, mutant.becomes))


def tally(report: Report, drawn: list[Mutant], jobs: int, seed: int) -> None:
    """Try them; a line for each, and the rate of each file and of all."""
    counts: Counter[tuple[str, str]] = Counter()
    with Tree(ROOT, jobs) as tree:
        for outcome in tree.attempt_all([(mutant, answering(mutant.path)) for mutant in drawn]):
            result = _result(outcome)
            counts[outcome.mutant.path, result] += 1
            _line(report, outcome, result)
    for path in [*sorted({path for path, _ in counts}), "all"]:
        of = Counter({r: n for (p, r), n in counts.items() if p == path}) if path != "all" else Counter()
        if path == "all":
            for (_, result), number in counts.items():
                of[result] += number
        killed, tried = of["killed"] + of["timeout"], of.total() - of["equivalent"]
        report.row(
            {
                "total": path, "drawn": of.total(), "killed": killed, "survived": of["survived"],
                "equivalent": of["equivalent"], "rate": round(killed / tried, 3) if tried else 1.0, "seed": seed,
            }
        )  # fmt: skip


def _result(outcome: Verdict) -> str:
    return "equivalent" if outcome.result == "survived" and reason(outcome.mutant) else outcome.result


def _line(report: Report, outcome: Verdict, result: str) -> None:
    mutant = outcome.mutant
    if report.as_json:
        report.row(
            {
                "result": result, "file": mutant.path, "line": mutant.line, "operator": mutant.operator,
                "before": mutant.before, "after": mutant.after, "text": mutant.text, "becomes": mutant.becomes,
                "seconds": round(outcome.seconds, 1), "by": outcome.by, "reason": reason(mutant) or "",
            }
        )  # fmt: skip
        return
    why = f"  ({reason(mutant)})" if result == "equivalent" else ""
    report.note(f"{result:10}  {mutant.where}  {mutant.operator}: {mutant.before} -> {mutant.after}{why}")


if __name__ == "__main__":
    main()
