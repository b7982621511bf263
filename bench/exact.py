"""The fewest keys that any plan on a grid must move: a mixed integer program.

    python -m bench.exact tests/bench/exact_plans.json      # writes the fixture anew; about an hour

A batch is documents of a few cells. Every cell goes to one rank; all ranks hold equally many, and work up to a limit.
A rank receives the cells before its last one of a document that it does not hold. The optimum is that of the worst
rank's plus the mean: both count, as in the planner's objective.
"""

# scipy's stubs are narrower than scipy
# pyright: reportArgumentType=false, reportMissingImports=false

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from parallel.plan.layout import PackedLayout
from parallel.price.needs import Needs
from parallel.sharding.planner import DEFAULT, Planner, Setting
from parallel.sharding.whole_document import whole_document

CELLS = 64  # of a batch
Row = tuple[list[int], list[float], float, float]  # of a constraint: variables, factors, least, most


def received(lengths: Sequence[int], owner: Sequence[int], ranks: int) -> tuple[list[int], list[int]]:
    """([ranks] cells received, [ranks] work in pairs of cells) of a plan: `owner` of each cell, documents in order."""
    keys, work, at = [0] * ranks, [0] * ranks, 0
    for length in lengths:
        mine = owner[at : at + length]
        for rank in range(ranks):
            held = [i for i in range(length) if mine[i] == rank]
            if held:
                keys[rank] += held[-1] + 1 - len(held)
                work[rank] += sum(i + 1 for i in held)
        at += length
    return keys, work


def value(keys: Sequence[int]) -> float:
    """What is minimised: cells of the worst rank plus the mean rank's."""
    return max(keys) + sum(keys) / len(keys)


def solve(
    lengths: Sequence[int], ranks: int, limit: float, below: float = np.inf, seconds: float = 120.0
) -> tuple[float | None, bool]:
    """(least `value` of plans whose value is under `below`, or None; whether that is proven).

    Variables, for each cell and rank: whether the rank holds it, and whether it holds it or a later one of the
    document; and the most cells that a rank receives.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_matrix

    cells = sum(lengths)
    position = np.concatenate([np.arange(length) for length in lengths])
    hold = np.arange(cells * ranks).reshape(cells, ranks)
    reach, worst = hold + cells * ranks, 2 * cells * ranks
    rows: list[Row] = []
    for cell in range(cells):
        rows.append((hold[cell].tolist(), [1.0] * ranks, 1, 1))
        for rank in range(ranks):
            rows.append(([int(reach[cell, rank]), int(hold[cell, rank])], [1.0, -1.0], 0, np.inf))
            if cell + 1 < cells and position[cell + 1]:
                rows.append(([int(reach[cell, rank]), int(reach[cell + 1, rank])], [1.0, -1.0], 0, np.inf))
    for rank in range(ranks):
        mine, all_mine = hold[:, rank].tolist(), reach[:, rank].tolist()
        rows.append((mine, [1.0] * cells, cells / ranks, cells / ranks))
        rows.append((mine, (position + 1.0).tolist(), 0, limit))
        rows.append(([*all_mine, *mine, worst], [1.0] * cells + [-1.0] * cells + [-1.0], -np.inf, 0))
    if below < np.inf:
        step = 1 / ranks  # values are multiples of it
        columns = [*reach.ravel().tolist(), *hold.ravel().tolist(), worst]
        rows.append((columns, [step] * cells * ranks + [-step] * cells * ranks + [1.0], -np.inf, below - step))
    cost = np.zeros(worst + 1)
    cost[reach.ravel()], cost[hold.ravel()], cost[worst] = 1 / ranks, -1 / ranks, 1
    upper = np.ones(worst + 1)
    upper[worst] = cells
    rows += _rank_order(lengths, hold)
    data = [(i, j, v) for i, (columns, values, _, _) in enumerate(rows) for j, v in zip(columns, values)]
    i, j, v = (np.array(column) for column in zip(*data))
    matrix = coo_matrix((v, (i, j)), (len(rows), worst + 1)).tocsr()
    lower = np.zeros(worst + 1)
    integral = np.ones(worst + 1)
    integral[reach.ravel()] = 0
    found = milp(
        cost,
        integrality=integral,
        bounds=Bounds(lower, upper),  # pyright: ignore[reportArgumentType]
        constraints=LinearConstraint(matrix, [row[2] for row in rows], [row[3] for row in rows]),  # pyright: ignore[reportArgumentType]
        options={"time_limit": seconds},
    )
    best = None if found.x is None else round(float(found.fun) * ranks) / ranks
    return best, found.status in (0, 2)  # solved, or shown to have no plan


def _rank_order(lengths: Sequence[int], hold: np.ndarray) -> list[Row]:
    """Ranks are alike, so they are named in the order in which they hold documents' last cells, longest first: rank r
    holds one only where rank r - 1 holds an earlier one."""
    ends = np.cumsum(lengths)[np.argsort(-np.array(lengths), kind="stable")] - 1
    rows: list[Row] = []
    for number, end in enumerate(ends.tolist()):
        for rank in range(1, hold.shape[1]):
            earlier = hold[ends[:number], rank - 1].tolist()
            rows.append(([*earlier, int(hold[end, rank])], [1.0] * number + [-1.0], 0, np.inf))
    return rows


def batches(count: int) -> list[list[int]]:
    """Batches of 4 to 12 documents, `CELLS` cells in all: random lengths with a long tail, as mixes have."""
    random = np.random.default_rng(0)
    found: list[list[int]] = []
    while len(found) < count:
        lengths = np.exp(random.normal(0, 0.9, int(random.integers(4, 13))))
        edges = np.rint(np.cumsum(lengths) * (CELLS / lengths.sum())).astype(int)
        cells = np.diff(edges, prepend=0)
        if cells.min() > 0:
            found.append(cells.tolist())
    return found


def planned(lengths: Sequence[int], ranks: int) -> tuple[float, int]:
    """(value, most work) of the planner's deep plan with cells for tokens."""
    layout = PackedLayout.from_lengths(lengths)
    setting = Setting(Planner(effort="deep", objective="bytes"), DEFAULT.shape)
    needs = Needs.of(layout, whole_document(layout, ranks, setting))
    return value(needs.received.tolist()), int(needs.work.max())


def write_fixture(path: str, count: int, ranks: int = 4, seconds: float = 240.0) -> None:
    """Cases in which the optimum at the planner's own imbalance is proven, each {lengths, limit, optimum}."""
    cases = []
    for lengths in batches(4 * count):
        mine, limit = planned(lengths, ranks)
        limit = max(limit, int(1.03 * sum(n * (n + 1) / 2 for n in lengths) / ranks))
        found, proven = solve(lengths, ranks, limit, below=mine, seconds=seconds)
        print(lengths, mine, found, proven, flush=True)
        if proven:
            cases.append({"lengths": lengths, "limit": limit, "optimum": mine if found is None else found})
            Path(path).write_text(json.dumps({"ranks": ranks, "cases": cases}, indent=1) + "\n")
        if len(cases) == count:
            return


if __name__ == "__main__":
    write_fixture(sys.argv[1], 50)
