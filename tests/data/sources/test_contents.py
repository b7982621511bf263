"""A source is known by what its files hold: an edit of equal length is another corpus, and is noticed in mid-run."""

import json
import os
import shlex
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from data.config import DataConfig
from data.loader import PackedLoader
from data.prepare.command import parse, prepare
from data.sources import contents, hub
from data.sources.contents import WatchedFiles
from data.sources.table import OPENERS

TEXTS = [f"to be or not, in document {n}: many " + "x" * (n % 7) for n in range(60)]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(hub, "BLOCK", 8)  # so that some blocks are read after the edit
    datasets.disable_progress_bars()


def text_file(folder: Path) -> Path:
    for n, text in enumerate(TEXTS):
        (folder / f"{n:02d}.txt").write_text(text)
    return folder / "59.txt"


def json_lines(folder: Path) -> Path:
    path = folder / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def parquet(folder: Path) -> Path:
    path = folder / "x.parquet"
    # without compression, so that a text is edited in place; without the checksum of a page, so that it can be
    pq.write_table(
        pa.table({"text": TEXTS}), path, compression="NONE", use_dictionary=False, row_group_size=20,
        write_statistics=False,
    )  # fmt: skip
    return path


def files(folder: Path) -> DataConfig:
    return DataConfig(source="files", paths=[f"{folder}/*"])


def streamed(folder: Path) -> DataConfig:
    return DataConfig(source="hub", path=str(folder))


def whole(folder: Path) -> DataConfig:
    return DataConfig(source="hub", path=str(folder), streaming=False)


def tokens(verify: str) -> Callable[[Path], DataConfig]:
    def make(folder: Path) -> DataConfig:
        return DataConfig(source="tokens", path=str(folder), verify=verify)

    return make


def shards(folder: Path) -> Path:
    (folder.parent / "text").mkdir()
    source = json_lines(folder.parent / "text")
    command = f"--source files --paths {source} --tokenizer byte --workers 1 --out {folder}"
    prepare(parse(command.split()), Console(quiet=True))
    return folder / "shard-00000.tokens"


CASES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], DataConfig]]] = {
    "text": (text_file, files),
    "json lines": (json_lines, files),
    "parquet": (parquet, files),
    "hub, json lines": (json_lines, streamed),
    "hub, parquet": (parquet, streamed),
    "hub, whole": (json_lines, whole),
    "tokens": (shards, tokens("full")),
    "tokens by sizes": (shards, tokens("sizes")),
}


def load(config: DataConfig) -> PackedLoader:
    config.seq_len, config.rows, config.lookahead, config.eval_fraction = 64, 2, 4, 0.0
    return PackedLoader(config, 258, 0)


def edit(path: Path, back: bool = True) -> None:
    """`many` becomes `mony` everywhere: the same length, and the time set back as far as a program can."""
    before = path.stat()
    raw = path.read_bytes()
    wide = b"many".join([b""] * 2), b"\0".join(bytes([c]) for c in b"many")  # as text, and as ids of two bytes
    changed = raw.replace(wide[0], b"mony").replace(wide[1], b"\0".join(bytes([c]) for c in b"mony"))
    assert changed != raw and len(changed) == len(raw)
    path.write_bytes(changed)
    if back:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def read_all(loader: PackedLoader) -> None:
    while loader.epoch < 2:
        loader.batch(loader.step)


@pytest.mark.parametrize("case", [name for name in CASES if name != "tokens by sizes"])
def test_an_edit_of_equal_length_is_another_corpus(case: str, tmp_path: Path) -> None:
    write, configure = CASES[case]
    (tmp_path / "corpus").mkdir()
    path = write(tmp_path / "corpus")
    loader = load(configure(tmp_path / "corpus"))
    loader.batch(0)
    state = loader.state_dict()
    load(configure(tmp_path / "corpus")).load_state_dict(state)
    edit(path, back=case != "hub, whole")  # the library's own cache goes by the time
    with pytest.raises(ValueError, match=r"corpus was .*start anew with run\.resume=never|is damaged: its SHA-256"):
        load(configure(tmp_path / "corpus")).load_state_dict(state)


@pytest.mark.parametrize("case", [name for name in CASES if name != "hub, whole"])  # that is read once, at the start
def test_a_file_that_changes_in_mid_run_is_noticed_when_it_is_read(case: str, tmp_path: Path) -> None:
    write, configure = CASES[case]
    (tmp_path / "corpus").mkdir()
    path = write(tmp_path / "corpus")
    loader = load(configure(tmp_path / "corpus"))
    loader.batch(0)
    edit(path)
    with pytest.raises(
        ValueError, match=rf"{path.name} (has changed since the run began; restore|is damaged)"
    ) as found:
        read_all(loader)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("case", [name for name in CASES if name != "hub, whole"])
def test_a_file_that_was_touched_copied_over_or_moved_back_is_the_same(case: str, tmp_path: Path) -> None:
    write, configure = CASES[case]
    (tmp_path / "corpus").mkdir()
    path = write(tmp_path / "corpus")
    loader = load(configure(tmp_path / "corpus"))
    first = loader.fingerprint()
    raw = path.read_bytes()
    path.unlink()
    path.write_bytes(raw)
    os.utime(path, ns=(1, 1))
    read_all(loader)
    assert load(configure(tmp_path / "corpus")).fingerprint() == first


@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith("hub")])
def test_a_file_that_is_gone_is_one_sentence(case: str, tmp_path: Path) -> None:
    write, configure = CASES[case]
    (tmp_path / "corpus").mkdir()
    path = write(tmp_path / "corpus")
    loader = load(configure(tmp_path / "corpus"))
    path.unlink()
    with pytest.raises(ValueError, match=rf"{path.name} cannot be read \(No such file or directory\); restore it"):
        read_all(loader)


def test_a_file_that_was_just_written_may_change_without_another_time(tmp_path, monkeypatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("many")
    watched = WatchedFiles()
    number = watched.add(str(path), "a.txt")
    stamp = contents.stamp_of(path)
    path.write_text("mony")
    monkeypatch.setattr(contents, "stamp_of", lambda file: stamp)  # a clock that ticks slowly
    with pytest.raises(ValueError, match=r"a\.txt has changed since the run began"):
        watched.read(number, 0, 4)


def test_a_file_is_hashed_once_in_a_process(tmp_path, monkeypatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("many")
    monkeypatch.setattr(contents, "SETTLING", -1.0)
    counted: list[Any] = []
    real = contents._digest
    monkeypatch.setattr(contents, "_digest", lambda file: counted.append(file) or real(file))
    for _ in range(3):
        watched = WatchedFiles()
        number = watched.add(str(path), "a.txt")
        assert watched.read(number, 1, 3) == b"an"
    assert len(counted) == 1


@pytest.mark.parametrize("configure", [files, streamed])
def test_more_text_than_a_start_should_hash_is_refused_and_the_hint_prepares_it(
    configure: Callable[[Path], DataConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a corpus").mkdir()
    json_lines(tmp_path / "a corpus")
    monkeypatch.setattr(contents, "LARGEST", 1000)
    config = configure(tmp_path / "a corpus")
    with pytest.raises(ValueError, match=r"1 files of 0\.0 GB in all, .* up to 0\.0 GB; prepare it once") as found:
        load(config)
    words = shlex.split(str(found.value).split("python -m data.prepare ")[1].split(", and use")[0])
    options: Namespace = parse([str(tmp_path / "out") if word == "DIR" else word for word in words])
    options.workers = 1
    prepare(options, Console(quiet=True))
    load(DataConfig(source="tokens", path=str(tmp_path / "out"))).batch(0)


def test_every_source_of_files_has_a_case() -> None:
    assert {configure(Path()).source for _, configure in CASES.values()} == OPENERS.keys() - {"stdlib", "synthetic"}
