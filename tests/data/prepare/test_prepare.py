"""data.prepare: the same manifest however often it is killed and whoever works; what is read back and refused."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from data.config import DataConfig
from data.loader import PackedLoader
from data.prepare.command import parse, prepare
from data.prepare.shard_writer import held_folder
from data.sources.manifest import Manifest
from data.split import split_documents


def run(out: Path, *arguments: str, workers: int = 1, tokenizer: str = "byte", shard_tokens: int = 3000) -> Manifest:
    rest = ("--tokenizer", tokenizer, "--workers", str(workers), "--shard-tokens", str(shard_tokens))
    return prepare(parse([*arguments, "--out", str(out), *rest]), Console(quiet=True))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, JSON lines with blank lines and ids, and parquet of several row groups; some longer than a shard."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    for i in range(7):
        (folder / f"{i}.txt").write_text("text " * rng.randrange(1, 300) + chr(0xE9))
    lines = [json.dumps({"text": f"line {i} " * rng.randrange(0, 200)}) for i in range(40)]
    (folder / "a.jsonl").write_text("\n\n".join(lines) + "\n")
    (folder / "long.jsonl").write_text(json.dumps({"text": "x" * 9000}) + "\n")
    table = pa.table({"id": list(range(50)), "text": [f"row {i} " * (i % 60) for i in range(50)]})
    pq.write_table(table, folder / "t.parquet", row_group_size=16)
    return folder


def paths(corpus: Path) -> tuple[str, ...]:
    return ("--source", "files", "--paths", *(str(corpus / f"*.{kind}") for kind in ("txt", "jsonl", "parquet")))


def test_tokens_hold_the_documents_of_the_source_and_the_same_are_held_out(corpus: Path, tmp_path: Path) -> None:
    manifest = run(tmp_path / "out", *paths(corpus))
    assert len(manifest.shards) > 5 and manifest.dtype == "uint16" and manifest.documents == 98
    settings: dict[str, Any] = {"seq_len": 64, "rows": 3, "eval_fraction": 0.3}
    config = DataConfig(source="files", paths=list(paths(corpus)[3:]), **settings)
    shards = DataConfig(source="tokens", path=str(tmp_path / "out"), tokenizer="manifest", **settings)
    for split in ("train", "eval"):
        first, second = (PackedLoader(c, 258, 0, split) for c in (config, shards))
        assert first.source.size == second.source.size == 98
        for i in range(98):
            assert first.source.name(i) == second.source.name(i)
            assert first.source.tokens(i).tolist() == second.source.tokens(i).tolist()
        for step in range(4):
            one, two = first.batch(step), second.batch(step)
            assert one.tokens.tolist() == two.tokens.tolist() and one.predicted_bytes == two.predicted_bytes
            assert [d.name for d in one.documents] == [d.name for d in two.documents]


def test_the_same_bytes_whatever_the_workers(corpus: Path, tmp_path: Path) -> None:
    run(tmp_path / "one", *paths(corpus))
    run(tmp_path / "three", *paths(corpus), workers=3)
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "three")


def test_a_run_that_stops_anywhere_goes_on_to_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    """Every write, flush, rename and removal in turn is the last thing that a process does."""
    run(tmp_path / "whole", *paths(corpus), shard_tokens=9000)
    whole = snapshot(tmp_path / "whole")
    stops = 0

    class Killed(BaseException):
        pass

    for point in range(0, 400, 3):
        out = tmp_path / f"cut{point}"
        left = [point]

        def tick(call: Callable[..., Any], left: list[int] = left) -> Callable[..., Any]:
            def ticking(*arguments: Any, **options: Any) -> Any:
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
                return call(*arguments, **options)

            return ticking

        with pytest.MonkeyPatch.context() as patch:
            for name in ("fsync", "replace"):
                patch.setattr(os, name, tick(getattr(os, name)))
            patch.setattr(Path, "unlink", tick(Path.unlink))
            try:
                run(out, *paths(corpus), shard_tokens=9000)
                break
            except Killed:
                stops += 1
        if (out / "manifest.json").exists():
            assert (out / "manifest.json").read_bytes() == whole["manifest.json"]
        run(out, *paths(corpus), shard_tokens=9000)
        assert snapshot(out) == whole
        shutil.rmtree(out)
    else:
        pytest.fail("no run came to its end")
    assert stops > 10


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.deep)])
def test_a_killed_process_on_the_standard_library_resumes_to_the_same_manifest(tmp_path: Path, workers: int) -> None:
    rng = random.Random(workers)
    options = ["--source", "stdlib", "--tokenizer", "byte", "--shard-tokens", "400000"]
    command = [sys.executable, "-m", "data.prepare", *options, "--workers", str(workers), "--out"]
    whole = prepare(parse([*options, "--workers", "1", "--out", str(tmp_path / "whole")]), Console(quiet=True))
    out, kills = tmp_path / "killed", 0
    for _ in range(3 if workers == 1 else 12):
        process = subprocess.Popen([*command, str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wanted = rng.randrange(1, 5) + len(list(out.glob("*.index")))  # kill while shards appear, at a random moment
        while process.poll() is None and len(list(out.glob("*.index"))) < wanted:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.02)
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert kills
    subprocess.run([*command, str(out)], check=True, stdout=subprocess.DEVNULL)
    assert (out / "manifest.json").read_text() == whole.to_json()
    assert snapshot(out) == snapshot(tmp_path / "whole")


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_workers_end_with_a_killed_process(tmp_path: Path) -> None:
    fifo = tmp_path / "slow.jsonl"
    fifo.write_text(json.dumps({"text": "a b" * 400_000}) + "\n")
    with fifo.open("a") as file:
        file.writelines(json.dumps({"text": "a b " * 200_000}) + "\n" for _ in range(40))
    command = [sys.executable, "-m", "data.prepare", "--source", "files", "--paths", str(fifo), "--tokenizer", "byte"]
    process = subprocess.Popen([*command, "--workers", "2", "--out", str(tmp_path / "out")], stderr=subprocess.DEVNULL)

    def children() -> list[int]:
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        return [int(pid) for pid in listed.read_text().split()] if listed.exists() else []

    while process.poll() is None and len(children()) < 3:  # two workers and multiprocessing's tracker
        time.sleep(0.01)
    left = children()
    process.kill()
    process.wait()
    until = time.monotonic() + 60
    while any(_runs(pid) for pid in left) and time.monotonic() < until:
        time.sleep(0.05)
    assert left and not any(_runs(pid) for pid in left)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_bpe_tokens_carry_their_tokenizer(corpus: Path, tmp_path: Path, bpe: Callable[[str], Path]) -> None:
    for kind in ("json", "ranks"):
        copy = tmp_path / bpe(kind).name
        shutil.copy(bpe(kind), copy)
        out = tmp_path / f"out-{kind}"
        pattern = () if kind == "json" else ("--tokenizer-pattern", "gpt2")
        run(out, *paths(corpus), *pattern, tokenizer=str(copy), workers=2 if kind == "json" else 1)
        copy.unlink()
        config = DataConfig(source="tokens", path=str(out), tokenizer="manifest", seq_len=64, rows=3, eval_fraction=0.2)
        loader = PackedLoader(config, 400, 0)
        batch = loader.batch(0)
        text = loader.tokenizer.decode(batch.labels[batch.labels >= 0].numpy())
        assert batch.predicted_bytes == len(text) > 0
        with pytest.raises(ValueError, match=r"was prepared with the tokenizer .*; use data\.tokenizer=manifest"):
            PackedLoader(DataConfig(source="tokens", path=str(out), tokenizer="byte"), 400, 0)
        with pytest.raises(ValueError, match=r"tokenizer has 301 ids, model\.vocab_size=258"):
            PackedLoader(config, 258, 0)


def test_ids_made_beforehand_are_kept_and_count_no_bytes(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"tokens": [1, 2, 3]}\n{"text": "ab"}\n')
    manifest = run(tmp_path / "out", "--source", "files", "--paths", str(tmp_path / "x.jsonl"))
    assert not manifest.counts_bytes
    (tmp_path / "x.jsonl").write_text('{"tokens": [1, 258]}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl:1: token id 258 is outside the model's 258 ids"):
        run(tmp_path / "other", "--source", "files", "--paths", str(tmp_path / "x.jsonl"))


def test_what_cannot_be_prepared_is_refused_in_a_sentence(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(out, *paths(corpus))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    (tmp_path / "mine" / "thesis.pdf.part").write_text("x")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    bad = ("--source", "files", "--paths", str(tmp_path / "bad.jsonl"))
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: run(out, *paths(corpus), shard_tokens=5), r"prepared with another shard_tokens \(3000; now 5\)"),
        (lambda: run(out, *paths(corpus)[:4]), r"holds tokens prepared with another source"),
        (lambda: run(tmp_path / "mine", *paths(corpus)), r"holds thesis\.pdf\.part, which data\.prepare did not"),
        (lambda: run(tmp_path / "a", *bad), r"bad\.jsonl:2: 'text' holds int, expected text"),
        (lambda: run(tmp_path / "b", *bad, workers=2), r"bad\.jsonl:2: 'text' holds int, expected text"),
        (lambda: run(tmp_path / "c", *bad, workers=0), r"--workers 0; give at least 1"),
        (lambda: run(tmp_path / "d", "--source", "files"), r"--source=files needs --paths"),
        (
            lambda: run(tmp_path / "in", "--source", "hub", "--path", str(tmp_path)),
            r"lies in --path .*give one outside",
        ),
        (lambda: run(tmp_path / "e", "--source", "stdlib", "--path", "x"), r"--path=x is set, but --source=stdlib"),
        (lambda: run(tmp_path / "f", *paths(corpus), tokenizer="gpt9"), r"data\.tokenizer='gpt9' is unknown"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert sorted(p.name for p in (tmp_path / "mine").iterdir() if p.name != "writing.lock") == [
        "thesis.pdf.part",
        "thesis.txt",
    ]
    assert run(out, *paths(corpus)).documents == 98  # complete already
    with held_folder(out), pytest.raises(ValueError, match=r"another data\.prepare is writing in"):
        run(out, *paths(corpus))


def test_an_input_that_changes_between_kill_and_resumption_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    source = ("--source", "files", "--paths", str(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match="holds int"):
        run(tmp_path / "out", *source)
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n')
    with pytest.raises(ValueError, match=r"was begun with another source"):
        run(tmp_path / "out", *source)


def test_an_input_that_changes_afterwards_is_not_complete_already(tmp_path: Path) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "out"
    source = ("--source", "files", "--paths", str(text))
    text.write_text("aaaa")
    wanted = run(out, *source)
    assert run(out, *source) == wanted
    text.write_text("cccc")
    with pytest.raises(ValueError, match=r"a\.txt has changed since .*out was prepared \(1 files"):
        run(out, *source)
    (out / "input.json").unlink()  # carried from elsewhere
    assert run(out, *source) == wanted


def test_a_hub_folder_that_changes_is_noticed(tmp_path: Path) -> None:
    folder, source = tmp_path / "hub", ("--source", "hub", "--path", str(tmp_path / "hub"))
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "aaaa"}\n')
    assert run(tmp_path / "out", *source).documents == 1
    assert run(tmp_path / "out", *source).documents == 1  # complete already
    (folder / "a.jsonl").write_text('{"text": "cccc"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl has changed since"):
        run(tmp_path / "out", *source)
    (folder / "b.jsonl").write_text('{"text": "b"}\n')
    with pytest.raises(ValueError, match="prepared with another source"):
        run(tmp_path / "out", *source)


def test_a_record_of_progress_that_is_none_is_named(corpus: Path, tmp_path: Path) -> None:
    for text in ("{}", "[]", "{"):
        (tmp_path / "progress.json").write_text(text)
        with pytest.raises(ValueError, match=r"progress\.json is no record of a preparation"):
            run(tmp_path, *paths(corpus))


def test_a_whole_shard_that_was_lost_is_named_before_more_are_written(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "x" * 2000})] * 600 + ['{"text": 3}']  # the last in a unit of its own
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = ("--source", "files", "--paths", str(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match="holds int"):
        run(tmp_path / "out", *source, shard_tokens=300_000)
    (tmp_path / "out" / "shard-00000.tokens").unlink()
    with pytest.raises(ValueError, match=r"shard-00000\.tokens has 0 bytes, and had [\d,]+ when it was written"):
        run(tmp_path / "out", *source, shard_tokens=300_000)


def test_the_split_reads_hashes_of_names(corpus: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", *paths(corpus))
    config = DataConfig(source="tokens", path=str(tmp_path / "out"), tokenizer="manifest")
    source = PackedLoader(config, 258, 0).source
    train, held_out = split_documents(source, 0.3)  # type: ignore[arg-type]
    assert sorted([*train, *held_out]) == list(range(98)) and held_out.size
    assert np.array_equal(source.lengths(), [source.length(i) for i in range(98)])  # type: ignore[attr-defined]


def test_the_command_is_quiet_off_a_terminal_and_fails_in_a_sentence(corpus: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "data.prepare", *paths(corpus), "--tokenizer", "byte", "--workers", "1", "--out"]
    done = subprocess.run([*command, str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1 and not done.stderr
    assert "98 documents" in done.stdout
    again = subprocess.run([*command, str(tmp_path / "out"), "--shard-tokens", "9"], capture_output=True, text=True)
    assert again.returncode == 1 and again.stderr.startswith("error: ") and "\n" not in again.stderr.strip()
