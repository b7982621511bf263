"""The static report: what the compiler made of every kernel at its chosen tile, as rows, beside peers.

`measure.py` says what the columns mean. The figure for the whole backward is the sum of its kernels' bound cycles
over the tensor cycles of five matrix products (FlashAttention's count); two passes do seven, so it is at least 1.4.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from bench.kernels import cases, peer_fla, peer_flex
from bench.kernels.compile import Case, report
from bench.kernels.measure import KernelReport, LoopReport
from bench.kernels.targets import TARGETS

BACKWARD_PRODUCTS = 5
MEAN_KEYS = 8192  # per query, over which the cost of delta is spread: a causal document of 16K tokens

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Query:
    """Which case to compile; a case itself does not travel between processes."""

    group: str  # a key of GROUPS
    head_dim: int
    dtype: str
    target: str
    index: int = 0

    def case(self) -> Case:
        return GROUPS[self.group](self.head_dim, self.dtype, self.target)[self.index]


def _attention(head_dim: int, dtype: str, target: str) -> list[Case]:
    return list(cases.attention_cases((head_dim,), (dtype,), (target,)))


def _rows(head_dim: int, dtype: str, target: str) -> list[Case]:
    return list(cases.row_cases((head_dim,), (dtype,), (target,)))


GROUPS = {"attention": _attention, "rows": _rows, "fla": peer_fla.fla_cases, "flex": peer_flex.flex_cases}
PEERS = ("fla", "flex")


def queries(
    head_dims: Sequence[int], dtypes: Sequence[str], targets: Sequence[str], groups: Sequence[str]
) -> tuple[list[Query], list[str]]:
    """All cases of these groups, and why a group of peers is left out."""
    found: list[Query] = []
    missing: dict[str, None] = {}
    for target in targets:
        for dtype in dtypes:
            for head_dim in head_dims:
                for group in groups:
                    try:
                        count = len(GROUPS[group](head_dim, dtype, target))
                    except ImportError as error:
                        missing[f"peer left out: {error}"] = None
                        continue
                    found += [Query(group, head_dim, dtype, target, n) for n in range(count)]
    return found, list(missing)


def measured(query: Query) -> KernelReport | str:
    """The report of one query; for a peer that does not compile, why."""
    case = query.case()
    try:
        return report(case)
    except Exception as error:
        if case.peer is None:
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"{case.name} left out: {first[:200]}"


def static_rows(wanted: Sequence[Query], jobs: int = 1) -> Iterator[Row | str]:
    """Rows in the order of `wanted`, a backward row after the last kernel of each; a string: why a peer is left out."""
    parts: dict[tuple[Any, ...], dict[str, tuple[Case, KernelReport]]] = {}
    if jobs > 1:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            yield from _rows_of(wanted, pool.map(measured, wanted), parts)
    else:
        yield from _rows_of(wanted, map(measured, wanted), parts)


def _rows_of(wanted: Sequence[Query], reports: Any, parts: dict[tuple[Any, ...], Any]) -> Iterator[Row | str]:
    for query, found in zip(wanted, reports):
        if isinstance(found, str):
            yield found
            continue
        case = query.case()
        yield from kernel_rows(case, found)
        key = (case.peer, case.target, case.dtype, case.head_dim)
        parts.setdefault(key, {})[case.kernel] = (case, found)
        if {"dq", "dkdv"} <= set(parts[key]) and (case.peer or "delta" in parts[key]):
            yield backward_row(parts.pop(key))


def kernel_rows(case: Case, found: KernelReport) -> list[Row]:
    """A row for each inner loop with matrix products; one row without ratios for a kernel that has none."""
    base = {
        "kernel": case.kernel, "target": case.target, "dtype": case.dtype, "head_dim": case.head_dim,
        "tile": case.tile_name, "stages": case.stages, "warps": case.warps,
    }  # fmt: skip
    resources = {
        "registers": found.registers, "stack_bytes": found.stack, "shared_bytes": found.shared,
        "tensor_memory": found.tensor_memory, "blocks_per_core": found.blocks, "occupancy": round(found.occupancy, 3),
        "instructions": found.instructions,
    }  # fmt: skip
    return [base | _loop_row(loop) | resources | {"peer": case.peer} for loop in found.loops or (None,)]


def _loop_row(loop: LoopReport | None) -> Row:
    if loop is None:
        keys = ("loop", "issue_ratio", "bound", "overlap", "exp_ratio", "shared_ratio", "operand_ratio")
        return dict.fromkeys(keys) | {"loop_spills": 0, "loop_instructions": None, "predicated": None}
    tensor = loop.tensor_cycles
    return {
        "loop": loop.kind,
        "issue_ratio": round(loop.issue_ratio, 4),
        "bound": round(loop.bound, 4),
        "overlap": round(loop.overlap, 4),
        "exp_ratio": round(loop.exp_cycles / tensor, 4),
        "shared_ratio": round(loop.shared_cycles / tensor, 4),
        "operand_ratio": round(loop.operand_cycles / tensor, 4),
        "loop_spills": loop.spills,
        "loop_instructions": loop.counts,
        "predicated": loop.predicated,
        "tensor_cycles": tensor,
    }


def backward_row(parts: dict[str, tuple[Case, KernelReport]]) -> Row:
    """The whole backward in full tiles: `bound` is its bound cycles over the tensor cycles of five products.

    `issue_ratio` is the same with the cycles of issue alone.
    """
    cycles = issue = 0.0  # of one core, for one pair of a query and a key
    for kernel in ("dq", "dkdv"):
        case, found = parts[kernel]
        loops = [x for x in found.loops if x.kind == "full"] or list(found.loops)
        if case.tile and loops:
            pairs = case.tile.rows * case.tile.columns
            cycles += min(x.bound_cycles for x in loops) / pairs
            issue += min(x.issue_cycles for x in loops) / pairs
    if "delta" in parts:
        delta = delta_cycles(*parts["delta"]) / MEAN_KEYS
        cycles, issue = cycles + delta, issue + delta
    case = parts["dq"][0]
    five = BACKWARD_PRODUCTS * 2 * case.head_dim / TARGETS[case.target].tensor[case.dtype]
    return {
        "kernel": "backward", "target": case.target, "dtype": case.dtype, "head_dim": case.head_dim, "tile": "",
        "stages": None, "warps": None, **_loop_row(None), "loop": "full", "issue_ratio": round(issue / five, 4),
        "bound": round(cycles / five, 4),
        "registers": None, "stack_bytes": max(found.stack for _, found in parts.values()), "peer": case.peer,
    }  # fmt: skip


def delta_cycles(case: Case, found: KernelReport) -> float:
    """Cycles of one core for one row of delta: the larger of issuing its instructions and reading out and dout."""
    target = TARGETS[case.target]
    rows = case.spec.constexprs["BLOCK_M"]
    size = 4 if case.dtype == "fp32" else 2
    issue = found.instructions * case.warps * target.gpu.warp_size / target.issue / rows
    return max(issue, 2 * case.head_dim * size / target.global_bytes)


COLUMNS = (
    ("kernel", 8), ("target", 7), ("dtype", 5), ("head_dim", 8), ("tile", 8), ("stages", 6), ("warps", 5), ("loop", 6),
    ("issue_ratio", 11), ("bound", 6), ("exp_ratio", 9), ("shared_ratio", 12), ("operand_ratio", 13), ("overlap", 7),
    ("loop_spills", 11), ("registers", 9), ("stack_bytes", 11), ("shared_bytes", 12), ("occupancy", 9), ("peer", 4),
)  # fmt: skip


def table_line(row: Row | None) -> str:
    """A row as a line of the table; the header for None."""
    cells = []
    for name, width in COLUMNS:
        value = name if row is None else row.get(name)
        text = "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
        cells.append(f"{text:>{width}}" if name != "peer" else text)
    return " ".join(cells).rstrip()
