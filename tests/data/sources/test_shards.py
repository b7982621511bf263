"""Token shards: damage and traversal are caught at start; reading maps, and keeps memory flat."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from data.config import DataConfig
from data.loader import PackedLoader
from data.sources.documents import name_hash


@pytest.fixture
def folder(tmp_path: Path, source_keys: Callable[[str], dict[str, Any]]) -> Path:
    return Path(shutil.copytree(source_keys("tokens")["path"], tmp_path / "tokens"))


def load(folder: Path, vocab_size: int = 258, **settings: Any) -> PackedLoader:
    shape: dict[str, Any] = {"seq_len": 32, "rows": 2, "eval_fraction": 0.0, **settings}
    config = DataConfig(source="tokens", path=str(folder), tokenizer="manifest", **shape)
    return PackedLoader(config, vocab_size, 0)


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


def test_many_shards_and_files_need_few_descriptors(tmp_path: Path) -> None:
    """More of either than files may be open: all documents are read, in an order that jumps between them."""
    lines = [json.dumps({"text": f"document {i}"}) for i in range(90)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    for i in range(90):
        pq.write_table(pa.table({"text": [f"document {i}"]}), tmp_path / f"{i:02}.parquet")
    code = (
        "import resource, sys\n"
        "from data.config import DataConfig; from data.loader import PackedLoader\n"
        "from data.prepare.command import parse, prepare\n"
        "from rich.console import Console\n"
        "folder = sys.argv[1]\n"
        "options = ['--source', 'files', '--paths', folder + '/x.jsonl', '--tokenizer', 'byte', '--workers', '1']\n"
        "prepare(parse([*options, '--shard-tokens', '1', '--out', folder + '/out']), Console(quiet=True))\n"
        "tokens = dict(source='tokens', path=folder + '/out', tokenizer='manifest')\n"
        "files = dict(source='files', paths=[folder + '/*.parquet'])\n"
        "PackedLoader(DataConfig(eval_fraction=0.0, **files), 258, 0)  # loads the libraries\n"
        "for keys, limit in ((files, 80), (tokens, 160)):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, 160))\n"
        "    source = PackedLoader(DataConfig(eval_fraction=0.0, **keys), 258, 0).source\n"
        "    for i in range(90):\n"
        "        at = 37 * i % 90\n"
        "        assert bytes(source.tokens(at)[1:-1].tolist()).decode() == f'document {at}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["shard-00000.tokens", "shard-00000.index"])
@pytest.mark.parametrize("place", [0, 100, -1])
def test_a_flipped_bit_is_caught_at_start(folder: Path, name: str, place: int) -> None:
    raw = bytearray((folder / name).read_bytes())
    raw[place] ^= 1
    (folder / name).write_bytes(raw)
    with pytest.raises(ValueError, match=rf"{name} is damaged: its SHA-256 begins [0-9a-f]{{12}}, the manifest says"):
        load(folder)


def test_sizes_are_checked_whatever_verify_says(folder: Path) -> None:
    path = folder / "shard-00000.tokens"
    raw = path.read_bytes()
    path.write_bytes(raw[:-2])
    for verify in ("full", "sizes"):
        with pytest.raises(ValueError, match=rf"tokens has {len(raw) - 2} bytes, the manifest says {len(raw)}"):
            load(folder, verify=verify)
    path.unlink()
    with pytest.raises(ValueError, match=r"shard-00000\.tokens is missing"):
        load(folder, verify="sizes")


def test_an_id_beyond_the_manifests_largest_is_caught_when_read_where_hashes_are_not_checked(folder: Path) -> None:
    path = folder / "shard-00000.tokens"
    path.write_bytes(np.full(path.stat().st_size // 2, 60000, "<u2").tobytes())
    with pytest.raises(ValueError, match=r"holds an id above its largest, 257: it is damaged"):
        load(folder, verify="sizes").batch(0)


@pytest.mark.parametrize("name", ["../shard-00000.tokens", "/etc/passwd", "a/b", "..", ".", "", ".hidden", "x\n"])
def test_names_that_leave_the_folder_are_refused(folder: Path, name: str) -> None:
    shutil.copy(folder / "shard-00000.tokens", folder.parent / "shard-00000.tokens")
    change(folder, lambda values: values["shards"][0]["tokens_file"].update(name=name))
    with pytest.raises(ValueError, match=r"the manifest names .*, which is no file of this folder"):
        load(folder)


def test_links_that_leave_the_folder_are_refused(folder: Path) -> None:
    for name in ("shard-00000.tokens", "shard-00000.index"):
        moved = folder.parent / name
        (folder / name).rename(moved)
        (folder / name).symlink_to(moved)
        with pytest.raises(ValueError, match=rf"the manifest names '{name}', which is no file of this folder"):
            load(folder)
        (folder / name).unlink()
        moved.rename(folder / name)
    assert load(folder).batch(0).label_tokens


def test_tokens_beyond_the_vocabulary_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer has 258 ids, model\.vocab_size=200"):
        load(folder, 200)
    path = folder / "shard-00000.tokens"
    ids = np.frombuffer(path.read_bytes(), "<u2").copy()
    ids[3] = 400
    path.write_bytes(ids.tobytes())
    digest = hashlib.sha256(ids.tobytes()).hexdigest()
    change(folder, lambda values: values["shards"][0]["tokens_file"].update(sha256=digest))
    with pytest.raises(ValueError, match=r"shard-00000\.tokens holds id 400, and the manifest says none above 257"):
        load(folder)
    change(folder, lambda values: values["shards"][0].update(max_id=400))
    with pytest.raises(ValueError, match="holds id 400 of 258 ids"):
        load(folder)
    change(folder, lambda values: values.update(vocab_size=500))
    with pytest.raises(ValueError, match=r"holds token id 400, outside the model's 258 ids; raise model\.vocab_size"):
        load(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda v: v.update(version=2), r"manifest\.json has version 2, and 1 is read here"),
        (lambda v: v.pop("version"), r"manifest\.json is no manifest of tokens"),
        (lambda v: v.pop("dtype"), r"does not hold together"),
        (lambda v: v.update(dtype="int64"), r"does not hold together .*dtype='int64'"),
        (lambda v: v.update(documents=3), r"does not hold together \(3 documents"),
        (lambda v: v.update(shards=[]), r"does not hold together"),
        (lambda v: v.update(shards=3), r"does not hold together"),
        (lambda v: v["shards"][0].update(extra=1), r"does not hold together"),
        (lambda v: v["shards"][0].update(tokens=5), r"sizes of shard-00000\.tokens and its index do not fit"),
        (lambda v: v["shards"][0]["index_file"].update(bytes=3), r"sizes of shard-00000\.tokens and its index"),
        (lambda v: v["shards"][0]["tokens_file"].update(bytes="3"), r"does not hold together"),
        (lambda v: v["shards"][0].update(index_file=v["shards"][0]["tokens_file"]), r"it names a file twice"),
        (lambda v: v["tokenizer"].update(kind="other"), r"names tokenizer 'other' and no file of it"),
    ],
)
def test_a_manifest_that_does_not_hold_together_is_one_sentence(
    folder: Path, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    change(folder, edit)
    with pytest.raises(ValueError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_manifest_says_what_to_do(folder: Path, tmp_path: Path) -> None:
    (folder / "manifest.json").write_text("not json")
    with pytest.raises(ValueError, match="is no manifest of tokens"):
        load(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"holds no manifest\.json; write one with data\.prepare"):
        load(folder)
    (folder / "progress.json").write_text("{}")
    with pytest.raises(ValueError, match=r"its preparation has not ended: run data\.prepare again"):
        load(folder)


def test_boundaries_that_do_not_fit_are_refused(folder: Path) -> None:
    path = folder / "shard-00000.index"
    raw = bytearray(path.read_bytes())
    raw[:8], raw[8:16] = raw[8:16], raw[:8]
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"document boundaries in shard-00000\.index do not fit its shard"):
        load(folder, verify="sizes")


def test_no_read_copies_more_than_was_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = load(folder, verify="sizes").source
    copied: list[tuple[int, int]] = []
    real = np.frombuffer

    def counted(buffer: Any, dtype: Any, count: int, offset: int) -> Any:
        copied.append((count, offset))
        return real(buffer, dtype, count, offset)

    monkeypatch.setattr(np, "frombuffer", counted)
    assert source.tokens(0, 1, 5).size == 4 and source.tokens(1, 2, 3).size == 1
    assert copied == [(4, 2), (1, 2 * (source.length(0) + 2))]


READER = """
import sys
import numpy as np
from data.sources import shards
from data.sources.manifest import read_manifest

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

if sys.argv[2] == "keep":
    shards.mmap.MADV_DONTNEED = shards.mmap.MADV_NORMAL  # pages are never given back
before = resident()
manifest = read_manifest(sys.argv[1])
manifest.verify(hashes=True)
source = shards.TokenShards(manifest)
total, most = 0, resident()
for n, i in enumerate(np.random.default_rng(0).permutation(source.size).tolist()):
    total += source.tokens(i).size
    if n % 100 == 0:
        most = max(most, resident())
print(most - before, total)
"""


def write_corpus(folder: Path, shards: int, documents: int, length: int) -> None:
    """Shards of equal documents, written as data.prepare writes them, but without a text."""
    folder.mkdir()
    listed = []
    for s in range(shards):
        ids = (np.arange(documents * length) % 251).astype("<u2").tobytes()
        names = [f"d{s}:{i}" for i in range(documents)]
        ends = np.arange(1, documents + 1) * length
        name_ends = np.cumsum([len(name) for name in names])
        hashes = np.array([name_hash(name) for name in names], "<u8")
        index = ends.astype("<i8").tobytes() + hashes.tobytes() + name_ends.astype("<i8").tobytes()
        files = {}
        for kind, raw in (("tokens", ids), ("index", index + "".join(names).encode())):
            (folder / f"shard-{s:05d}.{kind}").write_bytes(raw)
            digest = hashlib.sha256(raw).hexdigest()
            files[f"{kind}_file"] = {"name": f"shard-{s:05d}.{kind}", "bytes": len(raw), "sha256": digest}
        listed.append({**files, "documents": documents, "tokens": documents * length, "max_id": 250, "source": "files"})
    manifest = {
        "version": 1, "documents": shards * documents, "tokens": shards * documents * length, "dtype": "uint16",
        "tokenizer": {"kind": "byte"}, "tokenizer_file": None, "tokenizer_settings": {}, "vocab_size": 258,
        "counts_bytes": True, "source": {}, "shard_tokens": documents * length, "shards": listed,
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))


def grown(folder: Path, how: str, tokens: int) -> float:
    """Megabytes by which a process grows while it verifies a folder and reads all documents in random order."""
    command = [sys.executable, "-c", READER, str(folder), how]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": "."})
    size, total = map(int, done.stdout.split())
    assert total == tokens
    return size / 1e6


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize(("shards", "documents"), [(2, 6000), pytest.param(8, 32000, marks=pytest.mark.deep)])
def test_memory_stays_flat(tmp_path: Path, shards: int, documents: int) -> None:
    """48 MB (deep: 1 GB) are read; the process holds a part, and all of them if pages are never given back."""
    tokens = shards * documents * 2000
    write_corpus(tmp_path / "big", shards, documents, 2000)
    flat, kept = (grown(tmp_path / "big", how, tokens) for how in ("give back", "keep"))
    print(f"grew by {flat:.0f} MB while {tokens * 2 / 1e6:.0f} MB were read, by {kept:.0f} MB where pages are kept")
    assert kept > tokens * 2 / 1e6 * 0.9
    assert flat < 40


def places(value: Any, at: tuple = ()) -> list[tuple]:
    """The path to everything in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(found for key, each in inner for found in places(each, (*at, key)))][0 if at else 1 :]


WRONG = [None, True, -1, 3, 1.5, 1 << 70, "", "word", [], [3], {}, {"a": 1}]


def test_every_field_of_a_manifest_with_every_wrong_value_is_one_sentence_or_changes_nothing(folder: Path) -> None:
    path = folder / "manifest.json"
    whole = json.loads(path.read_text())
    usual, tried = load(folder, verify="sizes").batch(0).tokens, 0
    for place in places(whole):
        for wrong in WRONG:
            values = json.loads(json.dumps(whole))
            inner = values
            for key in place[:-1]:
                inner = inner[key]
            if type(inner[place[-1]]) is type(wrong) and inner[place[-1]] == wrong:
                continue
            inner[place[-1]] = wrong
            path.write_text(json.dumps(values))
            tried += 1
            try:
                found = load(folder, verify="sizes").batch(0).tokens
            except ValueError as error:
                named = str(folder) in str(error) or "shard-00000" in str(error)
                assert named and "\n" not in str(error), (place, wrong, error)
            else:
                assert torch.equal(found, usual), (place, wrong)
    assert tried > 200


@pytest.mark.parametrize("edit", [lambda v: v.pop("source"), lambda v: v["shards"][0].pop("max_id"),
                                  lambda v: v["shards"][0]["index_file"].pop("sha256"),
                                  lambda v: v["tokenizer_settings"].update(other="x")])  # fmt: skip
def test_a_manifest_that_lacks_a_field_is_one_sentence(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    change(folder, edit)
    with pytest.raises(ValueError, match=r"manifest\.json does not hold together") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_ids_beyond_the_tokenizer_are_refused_though_the_model_knows_them(folder: Path) -> None:
    change(folder, lambda values: (values.update(vocab_size=500), values["shards"][0].update(max_id=400)))
    with pytest.raises(ValueError, match=r"holds token id 400, and its tokenizer has 258 ids"):
        load(folder, 500)
