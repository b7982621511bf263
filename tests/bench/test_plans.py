"""The planner leaderboard, its peers, and the exact optimum."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from bench.exact import planned, received, solve, value
from bench.plans.__main__ import entries, main, measure
from bench.plans.packs import bounds, packs
from bench.plans.peers import PEERS
from data.sources.mixes import MIXES
from parallel.plan.layout import PackedLayout
from parallel.price.cluster import load_cluster
from parallel.price.needs import Needs

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = Path(__file__).parent / "exact_plans.json"

BATCHES = [(8, 131_072, mix) for mix in MIXES] + [
    pytest.param(64, 1_048_576, mix, marks=[] if mix == "wlb" else pytest.mark.deep) for mix in MIXES
]


@pytest.mark.parametrize("name", PEERS)
def test_peers_deal_every_token_once_and_equally(name: str):
    layout = PackedLayout.from_lengths([700, 20, 300, 4], row_length=1024)
    sets = PEERS[name](layout, 8)
    assert [tokens.count for tokens in sets] == [128] * 8
    assert sorted(np.concatenate([tokens.expand() for tokens in sets]).tolist()) == list(range(1024))


def test_peers_balance_as_they_claim():
    """Mean imbalance of 20 packs: dealing by work beats the plain order, and small blocks beat large ones."""
    totals = {name: 0.0 for name in PEERS}
    for lengths in packs("wlb", 131_072, 20):
        layout = PackedLayout.from_lengths(lengths)
        for name, peer in PEERS.items():
            work = Needs.of(layout, peer(layout, 8)).work
            totals[name] += work.max() / work.mean() / 20
    assert totals["block_round_robin"] < 1.01 < totals["min_heap"] < 1.05 < totals["zigzag"]
    assert totals["per_document"] < 1.01


def test_peers_refuse_what_does_not_divide():
    with pytest.raises(ValueError, match="100 tokens do not divide by 8"):
        PEERS["min_heap"](PackedLayout.from_lengths([100]), 8)


@pytest.mark.parametrize("mix", MIXES)
def test_packs_are_full_and_follow_one_another(mix: str):
    some = list(packs(mix, 10_000, 3))
    assert all(sum(pack) == 10_000 for pack in some)
    assert list(packs(mix, 10_000, 2)) == some[:2]


def test_bounds_hold_for_every_plan():
    """No placement, peer's or planned, has a rank below the bound."""
    for lengths in packs("code", 131_072, 5):
        layout = PackedLayout.from_lengths(lengths)
        worst, total = bounds(lengths, 8)
        for peer in PEERS.values():
            share = Needs.of(layout, peer(layout, 8)).received / (131_072 * 7 / 8)
            assert share.max() >= worst - 1e-9
            assert share.mean() >= total - 1e-9
    assert bounds([64], 4) == (1.0, 0.75 * 0 + (3 * 16 + 16 * 3) / (4 * 48))


@pytest.mark.parametrize(("ranks", "tokens", "mix"), BATCHES)
def test_planned_time_beats_every_peer(ranks: int, tokens: int, mix: str):
    cluster = load_cluster("h100_8" if ranks == 8 else "h100_64")
    lengths = next(iter(packs(mix, tokens, 1)))
    seconds = {}
    for entry in entries(cluster.name):
        planner = entry.strategy.planner if entry.strategy else None
        if entry.strategy is None or (entry.name == "flashcp_hsap" and planner and planner.objective == "time"):
            seconds[entry.name] = measure(entry, lengths, ranks, cluster)["total_ms"]
    assert min(seconds, key=lambda name: seconds[name]) == "flashcp_hsap", seconds


def brute_force(lengths: list[int], ranks: int, limit: float) -> float | None:
    """The least `value` over all plans, or None where none keeps the limit. For about ten cells."""
    cells, best = sum(lengths), None
    for owner in product(range(ranks), repeat=cells):
        if any(owner.count(rank) * ranks != cells for rank in range(ranks)):
            continue
        keys, work = received(lengths, owner, ranks)
        if max(work) <= limit and (best is None or value(keys) < best):
            best = value(keys)
    return best


def test_solver_equals_brute_force():
    pytest.importorskip("scipy")
    random = np.random.default_rng(0)
    for case in range(20):
        ranks = 2 + case % 2
        cells = 8 if ranks == 2 else 9
        cuts = np.sort(random.choice(np.arange(1, cells), int(random.integers(1, 4)), replace=False))
        lengths = np.diff(cuts, prepend=0, append=cells).tolist()
        limit = float(random.uniform(1.0, 1.3)) * sum(n * (n + 1) / 2 for n in lengths) / ranks
        best, proven = solve(lengths, ranks, limit)
        assert proven
        expected = brute_force(lengths, ranks, limit)
        assert best == (None if expected is None else pytest.approx(expected))


def test_received_counts_cells_before_the_end():
    keys, work = received([4, 2], [0, 1, 1, 0, 0, 1], 2)
    assert (keys, work) == ([2, 1 + 1], [1 + 4 + 1, 2 + 3 + 2])
    assert value(keys) == 4.0


@pytest.mark.deep
def test_planner_is_near_the_optimum():
    """Deep plans of all kept cases, at the imbalance to which the optimum was solved: cells within 5% in all."""
    kept = json.loads(FIXTURE.read_text())
    mine = best = 0.0
    for case in kept["cases"]:
        found, most = planned(case["lengths"], kept["ranks"])
        assert most <= case["limit"]
        assert found >= case["optimum"] - 1e-9
        mine, best = mine + found, best + case["optimum"]
    assert mine <= 1.05 * best


def test_command_prints_rows_and_writes_a_page(tmp_path: Path):
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "bench.plans", "--json", "--tokens", "8192", "--ranks", "4", "--packs", "1"]
    command += ["--mixes", "web", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"mix", "preset", "imbalance", "worst_bytes_ratio", "attn_ms", "plan_ms", "bound_total"} <= set(lines[0])
    assert {line["preset"] for line in lines} >= {*PEERS, "flashcp", "flashcp_hsap"}
    assert (tmp_path / "plans.csv").read_text().count("\n") == len(lines) + 1
    assert (tmp_path / "plans.png").stat().st_size > 1000


def test_lengths_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Any lengths, also such as do not divide by the ranks; what is no length is named."""
    batch = tmp_path / "batch.txt"
    batch.write_text("700\n20\n303\n")
    command = ["plans", "--json", "--lengths", str(batch), "--ranks", "4"]
    monkeypatch.setattr(sys, "argv", command)
    main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["mix"] for row in rows} == {"batch"} and {row["tokens"] for row in rows} == {1023}
    assert {row["preset"] for row in rows} >= {*PEERS, "flashcp_hsap"}
    for text, word in (("12\nmany\n", "'many'"), ("0\n", "'0'"), ("", "empty")):
        batch.write_text(text)
        with pytest.raises(SystemExit, match=word):
            main()
