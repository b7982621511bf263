"""Plans as JSON: token sets in one table, each step a short list, so that a plan of a million tokens stays readable."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from kernels.mask_spec import MaskSpec
from parallel.plan.ir import (
    Add,
    Attend,
    AttendBackward,
    AttentionShape,
    Buffer,
    Copy,
    Free,
    MakeStats,
    Merge,
    Message,
    Post,
    Program,
    Step,
    Wait,
)  # fmt: skip
from parallel.plan.layout import PackedLayout
from parallel.plan.mesh import MeshSpec
from parallel.plan.placement import Placement
from parallel.plan.tokens import TokenSet

FORMAT = 2
STEPS: dict[str, type] = {
    step.__name__: step for step in (Post, Wait, Attend, MakeStats, AttendBackward, Merge, Add, Copy, Free)
}


class _Table:
    """Token sets by number."""

    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {}
        self.sets: list[list[list[int]]] = []

    def number(self, tokens: TokenSet) -> int:
        if tokens.key not in self.numbers:
            self.numbers[tokens.key] = len(self.sets)
            self.sets.append(tokens.ranges.tolist())
        return self.numbers[tokens.key]


def plan_to_json(plan: Any) -> str:
    """The JSON text of a `parallel.plan.plan.Plan`, which is built on this file."""
    table = _Table()

    def plain(value: Any) -> Any:
        if isinstance(value, TokenSet):
            return {"tokens": table.number(value)}
        if isinstance(value, tuple):  # messages and buffers are tuples, too
            return [plain(item) for item in value]
        return value

    def program(one: Program | None) -> Any:
        if one is None:
            return None
        return {
            "rank": one.rank,
            "buffers": {name: plain(buffer) for name, buffer in one.buffers.items()},
            "steps": [[type(step).__name__, *(plain(item) for item in step)] for step in one.steps],
            "results": one.results,
            "slabs": one.slabs,
        }

    placement = plan.placement
    return json.dumps(
        {
            "format": FORMAT,
            "hash": plan.hash,
            "axes": plan.axes,
            "layout": json.loads(placement.layout.to_json()),
            "mesh": asdict(placement.mesh),
            "units": [table.number(unit) for unit in placement.units],
            "split": placement.split,
            "groups": placement.groups,
            "shape": asdict(plan.shape),
            "mask": asdict(plan.mask),
            "sends_only_needed": plan.sends_only_needed,
            "forward": [program(one) for one in plan.forward],
            "backward": [program(one) for one in plan.backward],
            "tokens": table.sets,
        },
        separators=(",", ":"),
    )


def plan_from_json(text: str, make: Callable[..., Any]) -> Any:
    """Read `plan_to_json`'s text, and make a plan of its fields (`parallel.plan.plan` is built on this file).

    Raises:
        ValueError: no plan of this format, or one whose hash does not fit.
    """
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not a plan: {error}") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
        raise ValueError(f"not a plan of format {FORMAT} (found {found!r}); write it again with to_json")
    try:
        plan = make(**_read(raw))
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"the plan's JSON is damaged: {type(error).__name__} {error}") from error
    if plan.hash != raw["hash"]:
        raise ValueError(f"the plan's JSON says hash {raw['hash']}, and its contents make {plan.hash}; it was changed")
    return plan


def _read(raw: dict[str, Any]) -> dict[str, Any]:
    sets = [TokenSet(np.array(ranges, np.int64).reshape(-1, 3)) for ranges in raw["tokens"]]

    def tokens(value: Any) -> Any:
        if isinstance(value, dict):
            return sets[value["tokens"]]
        return tuple(tokens(item) for item in value) if isinstance(value, list) else value

    def step(kind: str, *values: Any) -> Step:
        if kind == "Post":
            number, comm, sends, recvs = values
            return Post(number, comm, *(tuple(Message(*tokens(m)) for m in side) for side in (sends, recvs)))
        return STEPS[kind](*(tokens(value) for value in values))

    def program(one: dict[str, Any] | None) -> Program | None:
        if one is None:
            return None
        buffers = {name: Buffer(*tokens(values)) for name, values in one["buffers"].items()}
        return Program(
            one["rank"],
            buffers,
            [step(*values) for values in one["steps"]],
            one["results"],
            [(size, n) for size, n in one["slabs"]],
        )

    layout = PackedLayout.from_json(json.dumps(raw["layout"]))
    units = tuple(sets[number] for number in raw["units"])
    return {
        "axes": raw["axes"],
        "placement": Placement(layout, MeshSpec(**raw["mesh"]), units, raw["split"], raw["groups"]),
        "shape": AttentionShape(**raw["shape"]),
        "mask": MaskSpec(**raw["mask"]),
        "forward": tuple(program(one) for one in raw["forward"]),
        "backward": tuple(program(one) for one in raw["backward"]),
        "sends_only_needed": raw["sends_only_needed"],
    }
