"""What runs and what is refused, and why: `run=explain` for a configuration, tables for docs/strategies.md.

python train.py run=explain nproc=8 model=llama32_1b     every preset on every split of 8 ranks
"""

import dataclasses
import re
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kernels.mask_spec import CAUSAL
from parallel.auto import resolve
from parallel.exchange import EXCHANGES, INNER_EXCHANGES
from parallel.plan.ir import CLASSES, AttentionShape
from parallel.plan.layout import PackedLayout
from parallel.plan.plan import DIRECTIONS, Plan
from parallel.sharding import SHARDINGS
from parallel.strategy import PRESETS, Strategy, load_strategy, preset_names
from training.config import Config

WORLD = 8  # ranks that run=explain assumes where nproc is null


class Combination(NamedTuple):
    """A strategy on a split of the ranks; `refused` is the sentence that a run would end with, or None."""

    strategy: str
    split: str
    refused: str | None


def combinations(config: Config, world: int) -> Iterator[Combination]:
    """The configuration's own strategy, then every preset on every dp x cp_outer x cp_inner that makes `world`."""
    yield Combination(f"{config.strategy.label} (yours)", "as given", refusal(config, config.strategy, world))
    for name in preset_names():
        if load_strategy(name).exchange == "auto":  # it takes the splits that its candidates want
            for dp in (n for n in range(1, world + 1) if world % n == 0):
                yield Combination(name, f"{dp}x any", refusal(config, load_strategy(name, dp=dp), world))
            continue
        for dp, outer, inner in product(range(1, world + 1), repeat=3):
            if dp * outer * inner == world:
                strategy = load_strategy(name, dp=dp, cp_outer=outer, cp_inner=inner)
                yield Combination(name, f"{dp}x{outer}x{inner}", refusal(config, strategy, world))


def refusal(config: Config, strategy: Strategy, world: int) -> str | None:
    """The sentence with which `strategy` is refused on `world` ranks for this model and these rows, or None."""
    tried = dataclasses.replace(config, strategy=strategy)
    model = config.model
    shape = AttentionShape(model.heads, model.kv_heads, model.head_dim, model.head_dim)
    try:
        mesh = tried.check_ranks(world)
        rows = config.data.rows // (mesh.dp * config.run.accumulate)
        length = max(1, min(config.data.seq_len, 4 * mesh.cp))  # no refusal depends on how long a row is
        layout = PackedLayout.from_lengths([length] * rows, [1] * rows)
        resolve(strategy, mesh, layout, shape, model.layer_masks(), ranks=[0])
    except ValueError as error:
        return str(error)
    return None


def show_refusals(config: Config, console: Console) -> None:
    """Print `combinations`: for each strategy the splits that run and those that are refused, and each reason once."""
    world = config.nproc or WORLD
    model, rows = config.model, config.data.rows
    console.print(
        f"{world} ranks, {model.heads} query and {model.kv_heads} key heads, {rows} rows over {config.run.accumulate} "
        "micro-batches; splits are dp x cp_outer x cp_inner",
        highlight=False,
        markup=False,
    )
    reasons = Reasons()
    found: dict[str, dict[int, list[str]]] = {}
    for strategy, split, refused in combinations(config, world):
        number = reasons.number(strategy.split()[0], split, refused) if refused else 0
        found.setdefault(strategy, {}).setdefault(number, []).append(split)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("strategy")
    table.add_column("runs on")
    table.add_column("is refused on (with the reason below)")
    for strategy, outcomes in found.items():
        refusals = "\n".join(f"({number}) {', '.join(splits)}" for number, splits in sorted(outcomes.items()) if number)
        table.add_row(escape(strategy), ", ".join(outcomes.get(0, [])), refusals)
        table.add_section()
    console.print(table)
    for number, (example, sentence) in enumerate(reasons.said, 1):
        console.print(f"({number}) {example}: {sentence}", highlight=False, markup=False)


class Reasons:
    """Sentences of refusal, numbered from 1; those that differ only in numbers and the strategy's name are one.

    Attributes:
        said: of each reason the first case, as "usp on 1 x 2 x 4", and its sentence.
    """

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []
        self._numbers: dict[str, int] = {}

    def number(self, strategy: str, split: str, sentence: str) -> int:
        """The number of a sentence, a new one for a new reason."""
        key = re.sub(r"\d+", "#", sentence.replace(f"{strategy}:", ""))
        if key not in self._numbers:
            self.said.append((f"{strategy} on {split}" if "x" in split else f"{strategy} as given", sentence))
            self._numbers[key] = len(self.said)
        return self._numbers[key]


def support_table() -> str:
    """Markdown: sharding x exchange x inner exchange, from what `Strategy.validate` refuses."""
    lines = [
        f"| exchange | inside a group | {' | '.join(SHARDINGS)} | refused because |",
        "|---|---|" + "---|" * (len(SHARDINGS) + 1),
    ]
    for exchange, inner in product(EXCHANGES, (None, *INNER_EXCHANGES)):
        refused: dict[str, str] = {}
        for sharding in SHARDINGS:
            try:
                Strategy(sharding=sharding, exchange=exchange, inner_exchange=inner).validate()
            except ValueError as error:
                refused[sharding] = str(error).replace(f", not {sharding}", "")
        cells = ["-" if sharding in refused else "runs" for sharding in SHARDINGS]
        lines.append(
            f"| {exchange} | {inner or ''} | {' | '.join(cells)} | {'; '.join(dict.fromkeys(refused.values()))} |"
        )
    return "\n".join(lines)


def preset_table() -> str:
    """Markdown: each preset's axes and source, and what travels between four ranks that share a document."""
    lines = [
        "| preset | sharding | exchange | inside a group | travels forward | travels backward | source |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in preset_names():
        strategy = load_strategy(name)
        plan = _small_plan(name)
        forward, backward = (", ".join(travelling(plan, direction)) or "nothing" for direction in DIRECTIONS)
        inner = strategy.inner_exchange or ""
        source = (PRESETS / f"{name}.yaml").read_text().splitlines()[0].removeprefix("# ").rstrip(".")
        sharding = "any" if strategy.exchange == "auto" else strategy.sharding
        cells = (f"`{name}`", sharding, strategy.exchange, inner, forward, backward, source)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def travelling(plan: Plan, direction: str) -> list[str]:
    """The classes of traffic that go from one rank to another."""
    sent = plan.bytes_of(direction)
    return [traffic for traffic in CLASSES if (sent[traffic] * (1 - np.eye(plan.size, dtype=np.int64))).any()]


def _small_plan(name: str) -> Plan:
    """One long document, or one for each of two batch groups, on four ranks, two a node; 8 query and 2 key heads."""
    strategy = load_strategy(name, node_size=2)
    shape = AttentionShape(8, 2, 64, 64, "bf16")
    rows = 1 if strategy.batch_groups == 1 else 2
    layout = PackedLayout.from_lengths([128] * rows, [1] * rows)
    mesh = strategy.mesh(1 if strategy.exchange == "none" else 4, shape.H, shape.Hkv)
    return resolve(strategy, mesh, layout, shape).plans[CAUSAL]
