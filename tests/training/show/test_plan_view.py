"""run=plan and run=explain: numbers that are the plan's, pictures of what runs, refusals that a run would make."""

import dataclasses
import io
import math
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from kernels.mask_spec import CAUSAL, MaskSpec
from parallel.auto import resolve
from parallel.plan.ir import AttentionShape
from parallel.plan.layout import PackedLayout
from parallel.plan.plan import Plan
from parallel.plan.visibility import Visibility
from parallel.price.cluster import Cluster, load_cluster
from parallel.price.predict import predict_plan, walk
from parallel.proof.verify import verify
from parallel.sharding import SHARDINGS
from parallel.strategy import EXCHANGES, Strategy, load_strategy, preset_names
from tests.masks import allowed
from training.config import Config, ConfigError, Task
from training.show.coverage_figure import MASKED, PADDING, coverage_of, draw_coverage, members, sample_tokens
from training.show.explain import combinations, refusal, show_refusals, support_table
from training.show.plan_listing import list_steps
from training.show.plan_style import rank_colours, short
from training.show.plan_view import first_layout, rank_lines, show_plan, size
from training.show.timeline_figure import draw_timeline

MIXED = PackedLayout.from_lengths([21, 1, 9, 2, 14], rows=[2, 3], row_length=27)  # 54 tokens, 7 of them padding


def planned(
    name: str,
    ranks: int = 4,
    layout: PackedLayout = MIXED,
    mask: MaskSpec = CAUSAL,
    node_size: int = 2,
    **axes: object,
) -> Plan:
    strategy = load_strategy(name, node_size=node_size, **axes)
    shape = AttentionShape(8, 2, 16, 16, "bf16")
    mesh = strategy.mesh(1 if name == "local" else ranks, shape.H, shape.Hkv)
    return resolve(strategy, mesh, layout, shape, (mask,)).plans[mask]


# the coverage map


@pytest.mark.parametrize("mask", [CAUSAL, MaskSpec(window=5, prefix=7, first=2), MaskSpec(chunk=6)], ids=str)
@pytest.mark.parametrize("name", preset_names())
def test_map_shows_each_allowed_pair_once_and_nothing_else(name: str, mask: MaskSpec):
    plan = planned(name, mask=mask)
    sight = Visibility(MIXED, plan.mask)
    padding, seen = MIXED.is_padding(), allowed(mask, MIXED)
    maps = coverage_of(plan)
    assert [m.heads[0] for m in maps] == [0, *(m.heads[1] for m in maps[:-1])] and maps[-1].heads[1] == plan.shape.H
    pairs = np.zeros(plan.size)
    for cover in maps:
        assert ((cover.rank >= 0) == seen).all() and ((cover.round >= 0) == seen).all()
        assert ((cover.rank == PADDING) == (padding[:, None] | padding[None, :])).all()
        share = (cover.heads[1] - cover.heads[0]) / plan.shape.H
        pairs += share * np.bincount(cover.rank[seen], minlength=plan.size)
    assert np.allclose(pairs, plan.work) and seen.sum() == sight.work(sight.documents)


def test_map_of_a_long_sequence_is_a_sample_of_it():
    """Cells ask about one pair each: 1M striped tokens still show every rank, in turn."""
    layout = PackedLayout.from_lengths([900_000, 100_000, 48_576])
    plan = planned("striped_ring", 8, layout)
    (cover,) = coverage_of(plan, 128)
    assert cover.owner.tolist() == (cover.sample % 8).tolist() == [n % 8 for n in range(128)]
    document = np.searchsorted(layout.stops, cover.sample, side="right")
    rows, columns = np.nonzero(cover.rank >= 0)
    assert (document[rows] == document[columns]).all() and (rows >= columns).all()
    assert (cover.rank[rows, columns] == cover.owner[rows]).all()  # a ring computes where the queries are
    assert (cover.rank[np.arange(128), np.arange(128)] >= 0).all() and (cover.rank == MASKED).any()


def test_helper_shows_who_helps():
    plan = planned("distflash", 8, PackedLayout.from_lengths([64]))
    (cover,) = coverage_of(plan)
    helped = (cover.rank != cover.owner[:, None]) & (cover.rank >= 0)
    assert set(cover.owner[np.nonzero(helped)[0]].tolist()) == {5, 6, 7} and set(cover.rank[helped].tolist()) == {
        0,
        1,
        2,
    }


def test_sampling_and_membership():
    assert sample_tokens(5, 8).tolist() == [0, 1, 2, 3, 4] and sample_tokens(0, 8).tolist() == []
    assert sample_tokens(64, 4).tolist() == [0, 17, 34, 51]
    tokens = load_strategy("striped_ring").shard(MIXED, Strategy(exchange="ring").mesh(3, 1, 1)).sets[1]
    assert members(tokens, np.arange(54)).tolist() == tokens.expand().tolist()


def test_nothing_to_draw_is_refused():
    plan = planned("ring", layout=PackedLayout.from_lengths([], rows=[0]))
    with pytest.raises(ValueError, match="0 tokens"):
        coverage_of(plan)
    half = dataclasses.replace(planned("ring"), forward=(None,) * 4)
    for refuse in (lambda: coverage_of(half), lambda: rank_lines(half, (0, 1, 2, 3))):
        with pytest.raises(ValueError, match="0 of 4 ranks; plan all"):
            refuse()


# the clock and the table


def free_but(flops: float, rate: float) -> Cluster:
    """A cluster in which only attention and bytes on links take time."""
    return dataclasses.replace(
        load_cluster("h100_8"), forward_flops=flops, backward_flops=flops, short_rows=0.0, launch_s=0.0,
        copy_bytes_s=math.inf, intra_bytes_s=rate, intra_latency_s=0.0, inter_bytes_s=rate / 10, inter_latency_s=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("name", preset_names())
def test_bars_add_up(name: str):
    """Computing is the plan's work at the cluster's rate; a lane does one thing at a time."""
    plan, cluster = planned(name), free_but(1e9, 1e8)
    total = 0.0
    for direction, products in (("forward", 2), ("backward", 5)):
        bars = walk(plan, cluster, direction)
        busy = [sum(b.stop - b.start for b in bars if b.rank == r and b.what == "attention") for r in range(plan.size)]
        assert busy == pytest.approx(plan.work * plan.shape.H * products * 2 * 16 / cluster.forward_flops)
        for rank in range(plan.size):
            for lane in {b.lane for b in bars}:
                mine = sorted((b.start, b.stop) for b in bars if b.rank == rank and b.lane == lane)
                assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(mine))
        assert {b.what for b in bars} <= {"attention", "wait", "intra", "inter"}
        total += max((b.stop for b in bars if b.lane == "compute"), default=0.0)
    assert total == pytest.approx(predict_plan(plan, cluster).total_s)


def test_a_transfer_hides_behind_a_block():
    """A causal ring on two ranks: fast links make rank 1 wait never, slow ones for what is left of the transfer."""
    plan = planned("ring", 2, PackedLayout.from_lengths([32]))
    own = 16 * 17 / 2 * 8 * 2 * 32  # FLOPs of a rank's own triangle, 8 heads of 16 + 16
    sent = 16 * 2 * 32 * 2  # bytes of 16 tokens' keys and values, 2 heads, bf16
    for rate, waits in ((1e9, 0.0), (1.0, sent / 1.0 - own / 1e3)):
        bars = walk(plan, free_but(1e3, rate), "forward")
        found = sum(b.stop - b.start for b in bars if b.rank == 1 and b.what == "wait")
        assert found == pytest.approx(max(waits, 0.0))


@pytest.mark.parametrize("name", preset_names())
def test_table_says_what_the_plan_says(name: str):
    plan = planned(name)
    lines = rank_lines(plan, tuple(range(plan.size)))
    assert [line.tokens for line in lines] == [tokens.count for tokens in plan.placement.sets]
    assert [line.work for line in lines] == plan.work.tolist()
    total = sum(plan.bytes.values())
    for link, near in (("intra", True), ("inter", False)):
        pairs = [(a, b) for a in range(plan.size) for b in range(plan.size) if a != b and (a // 2 == b // 2) is near]
        wanted = sum(int(total[a, b]) for a, b in pairs)  # pyright: ignore[reportIndexIssue]
        assert sum(line.sent[link] for line in lines) == sum(line.received[link] for line in lines) == wanted
    assert max(line.rounds[0] for line in lines) == plan.rounds["forward"]
    assert [line.peak for line in lines] == [plan.peak_buffer_bytes(rank) for rank in range(plan.size)]


def test_links_are_those_of_world_ranks():
    """The second of two replicas of two ranks, three ranks a node: its ranks 2 and 3 sit on different nodes."""
    strategy = load_strategy("ring", dp=2, node_size=3)
    shape = AttentionShape(8, 2, 16, 16)
    plan = strategy.plan(strategy.shard(PackedLayout.from_lengths([32]), strategy.mesh(4, 8, 2)), shape, MaskSpec())
    first, second = rank_lines(plan, (0, 1)), rank_lines(plan, (2, 3))
    assert first[0].sent["inter"] == 0 and first[0].sent["intra"] == second[0].sent["inter"] > 0


def test_steps_in_words():
    words = list_steps(planned("ring", 2, PackedLayout.from_lengths([8])), 1, "forward")
    assert words == [
        "post batch 0 on cp",
        "    receive from rank 0: kv [0:4] of heads 0 to 1 into kv1",
        "attend q [4:8] over kv [4:8] into acc",
        "wait for batch 0 on cp",
        "attend q [4:8] over kv1 [0:4] into acc",
        "free kv1",
    ]
    for name in preset_names():
        for direction in ("forward", "backward"):
            assert list_steps(planned(name), 0, direction)
    with pytest.raises(ValueError, match="no sideways steps"):
        list_steps(planned("ring"), 0, "sideways")


def test_words_for_sizes():
    assert [size(n) for n in (0, 640, 1536, 3 << 20)] == ["0", "640 B", "1.5 KiB", "3.0 MiB"]
    assert [short(n) for n in (1000, 4096, 1 << 17, 3 << 19)] == ["1,000", "4K", "128K", "1.5M"]
    for ranks in (1, 8, 64):
        assert len({tuple(c) for c in rank_colours(ranks)}) == ranks


# the commands


def test_run_plan_writes_figures_and_says_where(make_config: Callable[..., Config], tmp_path: Path):
    """A window and none make two plans; the same plan makes the same bytes."""
    config = make_config(
        run={"task": Task.plan},
        model={"window": [16, None]},
        strategy=vars(load_strategy("usp", cp_inner=2)),
    )
    config.nproc = 4
    stream = io.StringIO()
    outcome = show_plan(config, Console(file=stream, width=150))
    text = stream.getvalue()
    drawn = sorted(outcome.folder.glob("*"))
    assert [p.suffix for p in drawn] == [".png", ".svg"] * 4 and all(str(p) in text for p in drawn)
    assert "window 16 (1 of 2 layers)" in text and "verified" in text and "cp_outer 2 x cp_inner 2" in text
    assert f"{config.data.rows} rows of 96 tokens" in text
    before = {p: p.read_bytes() for p in drawn}
    show_plan(config, Console(file=io.StringIO()))
    assert {p: p.read_bytes() for p in drawn} == before


def test_run_plan_takes_documents_from_the_command_line(make_config: Callable[..., Config]):
    config = make_config(run={"task": Task.plan, "lengths": [40, 8]})
    config.validate()
    assert first_layout(config, config.check_ranks(1)) == PackedLayout.from_lengths([40, 8])
    for changes in ({"lengths": [40, 8]}, {"task": Task.plan, "lengths": [40, 0]}, {"task": Task.plan, "lengths": []}):
        with pytest.raises(ConfigError, match=r"run\.lengths="):
            make_config(run=changes).validate()


def test_commands_start_no_rank_and_end_well(tmp_path: Path):
    root = Path(__file__).resolve().parents[3]
    for arguments, wanted in (
        (["run=plan", "strategy=ring", "nproc=2", "run.lengths=[9,3]", f"run.dir={tmp_path}/here"], "hash"),
        (["run=explain", "nproc=2"], "double_ring"),
    ):
        done = subprocess.run(
            [sys.executable, str(root / "train.py"), *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0 and wanted in done.stdout, done.stderr
    assert len(list((tmp_path / "here").glob("ring-*.svg"))) == 2


def test_planning_loads_no_torch_before_the_data():
    root = Path(__file__).resolve().parents[3]
    shown = "training.show.plan_view, training.show.explain"
    code = f"import sys, {shown}; print([m for m in ('torch', 'triton') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_explain_refuses_what_a_run_refuses(make_config: Callable[..., Config]):
    """7 query heads on 1 key head, 4 rows: what is said to run is planned and verified."""
    config = make_config(model={"heads": 7, "kv_heads": 1})
    found = list(combinations(config, 8))
    assert {each.strategy for each in found} == {"local (yours)", *preset_names()}
    verdicts = {each[:2]: each.refused for each in found}
    assert verdicts["ring", "1x8x1"] is None and verdicts["local (yours)", "as given"] is not None  # 4 rows, dp 8
    assert "cp_inner=8 ranks cannot share 7 query heads" in str(verdicts["ulysses", "1x1x8"])
    assert "data.rows=4 do not split over dp=8" in str(verdicts["ring", "8x1x1"])
    for name, split, refused in found[1:]:
        if name == "auto":
            continue
        dp, outer, inner = map(int, split.split("x"))
        strategy = load_strategy(name, dp=dp, cp_outer=outer, cp_inner=inner)
        assert refusal(config, strategy, 8) == refused
        if refused is None:
            mesh = strategy.mesh(8, 7, 1)
            layout = PackedLayout.from_lengths([30] * (4 // dp), [1] * (4 // dp))
            verify(resolve(strategy, mesh, layout, AttentionShape(7, 1, 8, 8)).plans[MaskSpec()])
    stream = io.StringIO()
    show_refusals(config, Console(file=stream, width=150))
    shown, reasons = stream.getvalue().split("\n(1) ")
    assert all(name in shown for name in preset_names()) and "cannot share" not in shown
    flat = " ".join(reasons.split())
    for sentence in ("do not split over dp=8", "needs an exchange inside the group", "cannot share 7 query heads"):
        assert flat.count(sentence) == 1  # each refusal once


def test_support_table_is_true():
    """Every combination that it says runs is planned and verified on 2 x 2 or 4 ranks."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in support_table().splitlines()[2:]]
    assert len(rows) == 3 * len(EXCHANGES)
    for exchange, inner, *cells, why in rows:
        assert bool(why) == ("-" in cells)
        for sharding, cell in zip(SHARDINGS, cells):
            strategy = Strategy(sharding=sharding, exchange=exchange, inner_exchange=inner or None)
            if cell == "-":
                with pytest.raises(ValueError):
                    strategy.validate()
                continue
            strategy = dataclasses.replace(strategy, dp=1, **({"cp_outer": 2, "cp_inner": 2} if inner else {}))
            shape = AttentionShape(4, 2, 8, 8)
            verify(strategy.plan(strategy.shard(MIXED, strategy.mesh(4, 4, 2)), shape, MaskSpec()))


@pytest.mark.parametrize("name", ["usp", "basp", "distflash"])
def test_figures_are_drawn(name: str):
    plan = planned(name, 4)
    for figure in (draw_coverage(plan), draw_timeline(plan, tuple(range(plan.size)), load_cluster("h100_64"))):
        figure.draw_without_rendering()
        assert figure.get_suptitle().startswith(f"{name}: ")
        words = " ".join(text.get_text() for legend in figure.legends for text in legend.get_texts())
        assert "rank" in words


def test_timeline_of_many_ranks_shows_some():
    clocked = draw_timeline(planned("zigzag_ring", 16), tuple(range(16)), load_cluster("h100_64"))
    assert "8 of 16 ranks" in clocked.get_suptitle().replace("\n", " ")
    assert "conf/cluster/h100_64.yaml" in clocked.axes[1].get_xlabel()
