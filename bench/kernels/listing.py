"""A disassembled function as instructions and loops, the same for every vendor's machine code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

# what an instruction is to the counts; every instruction has exactly one class
CLASSES = ("tensor", "exp", "fp", "integer", "shared", "global", "spill", "sync", "branch")


@dataclass(frozen=True)
class Instruction:
    """One line of a listing.

    `unit` is one of CLASSES. `guard` is its predicate ("" where it always executes). `jumps` is the label that it may
    go to, and `falls` whether the next line can follow it.
    """

    opcode: str
    operands: str
    unit: str
    guard: str = ""
    jumps: str | None = None
    falls: bool = True


@dataclass
class Function:
    """Instructions in program order, and the labels that stand before some of them."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Loop:
    """A natural loop: `members` are the positions of its instructions, in program order; it is entered at `header`."""

    header: int
    members: tuple[int, ...]


def innermost_loops(function: Function, unit: str = "tensor") -> list[Loop]:
    """Natural loops that hold an instruction of `unit` and no smaller loop that holds one.

    A backward branch alone makes no loop: compilers put the spin of a failed wait far behind the function and jump back
    into the middle of a loop. So a loop is a back edge to a block that dominates it (Aho, Lam, Sethi, Ullman, 9.6).
    Spins (loops of at most 8 instructions around a wait, and the way back from one) are left out of the members.
    """
    natural = _natural_loops(function)
    holds = {header: any(function.instructions[i].unit == unit for i in body) for header, body in natural.items()}
    spins, last = set(), len(function.instructions)
    for header, body in natural.items():
        if not holds[header] and len(body) <= 8 and any(function.instructions[i].unit == "sync" for i in body):
            spins |= body | {i for i in (max(body) + 1,) if i < last and function.instructions[i].unit == "branch"}
    loops = []
    for header, body in natural.items():
        inner = any(other < body and holds[h] for h, other in natural.items() if h != header)
        if holds[header] and not inner:
            loops.append(Loop(header, tuple(sorted(body - spins))))
    return sorted(loops, key=lambda loop: loop.header)


def _natural_loops(function: Function) -> dict[int, set[int]]:
    """Positions of each natural loop's instructions, by the position of its header; loops of one header are one."""
    starts, follow = _blocks(function)
    ends = dict(zip(starts, [*starts[1:], len(function.instructions)]))
    before: dict[int, list[int]] = {start: [] for start in starts}
    for start, nexts in follow.items():
        for n in nexts:
            before[n].append(start)
    dominators = _dominators(starts, follow, before)
    loops: dict[int, set[int]] = {}
    for start, nexts in follow.items():
        for header in nexts:
            if header not in dominators.get(start, ()):
                continue
            body, todo = {header}, [start]
            while todo:
                block = todo.pop()
                if block not in body:
                    body.add(block)
                    todo += [b for b in before[block] if b in dominators]
            loops.setdefault(header, set()).update(i for block in body for i in range(block, ends[block]))
    return loops


def _blocks(function: Function) -> tuple[list[int], dict[int, list[int]]]:
    """First positions of the basic blocks, and the blocks that may follow each."""
    code, labels = function.instructions, function.labels
    cuts = {0} | {i for i in labels.values() if i < len(code)}
    cuts |= {i + 1 for i, x in enumerate(code[:-1]) if x.jumps is not None or not x.falls}
    starts = sorted(cuts)
    follow: dict[int, list[int]] = {}
    for start, end in zip(starts, [*starts[1:], len(code)]):
        last = code[end - 1] if code else None
        nexts = []
        if last and last.jumps in labels and labels[last.jumps] < len(code):
            nexts.append(labels[last.jumps])
        if last and last.falls and end < len(code):
            nexts.append(end)
        follow[start] = nexts
    return starts, follow


def _dominators(
    starts: list[int], follow: dict[int, list[int]], before: dict[int, list[int]]
) -> dict[int, frozenset[int]]:
    """For each block that the entry reaches: the blocks on every way to it, itself included."""
    order = list(_reverse_postorder(starts[0], follow))
    rank = {block: n for n, block in enumerate(order)}
    parent = {starts[0]: starts[0]}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            known = [b for b in before[block] if b in parent]
            new = known[0]
            for other in known[1:]:
                while new != other:
                    if rank[new] > rank[other]:
                        new = parent[new]
                    else:
                        other = parent[other]
            if parent.get(block) != new:
                parent[block] = new
                changed = True
    found: dict[int, frozenset[int]] = {}
    for block in order:
        found[block] = frozenset({block}) if block == starts[0] else found[parent[block]] | {block}
    return found


def _reverse_postorder(entry: int, follow: dict[int, list[int]]) -> Iterator[int]:
    done: list[int] = []
    seen = {entry}
    stack = [(entry, iter(follow[entry]))]
    while stack:
        block, nexts = stack[-1]
        for n in nexts:
            if n not in seen:
                seen.add(n)
                stack.append((n, iter(follow[n])))
                break
        else:
            done.append(block)
            stack.pop()
    return reversed(done)
