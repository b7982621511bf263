"""Every source gives its documents by index, and names the file and line of a broken one before training."""

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.config import DataConfig
from data.sources.documents import Source
from data.sources.files import listed_files
from data.sources.mixes import MIXES, sample_length
from data.sources.synthetic import SyntheticDocuments
from data.sources.table import OPENERS, open_source
from data.tokenizers.tokenizer import ByteTokenizer

tokenizer = ByteTokenizer()


def files(*paths: Path | str, vocab_size: int = 258, **settings: str) -> Source:
    config = DataConfig(source="files", paths=[str(p) for p in paths], **settings)  # type: ignore[arg-type]
    return open_source(config, tokenizer, vocab_size, 0)


def texts(source: Source) -> list[bytes]:
    return [tokenizer.decode(source.tokens(i)) for i in range(source.size or 0)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_bytes(b"first\r\n\xff\x00\x01 document")
    (tmp_path / "b.txt").write_bytes(b"x")
    rows = [{"text": "één"}, {"text": ""}, {"text": "line\nbreak"}]
    (tmp_path / "c.jsonl").write_text(json.dumps(rows[0]) + "\n\n" + "\n".join(json.dumps(r) for r in rows[1:]))
    return tmp_path


def test_files_hold_text_bytes_as_they_are_and_json_lines_decoded(corpus: Path) -> None:
    source = files(corpus / "*.txt", corpus / "c.jsonl")
    assert texts(source) == [b"first\r\n\xff\x00\x01 document", b"x", "één".encode(), b"", b"line\nbreak"]
    assert [source.name(i) for i in range(5)] == [
        f"{corpus}/a.txt",
        f"{corpus}/b.txt",
        f"{corpus}/c.jsonl:1",
        f"{corpus}/c.jsonl:3",
        f"{corpus}/c.jsonl:4",
    ]
    assert [source.length(i) for i in range(5)] == [len(source.tokens(i)) for i in range(5)] == [21, 3, 7, 2, 12]


def test_any_span_of_any_document_is_a_slice_of_the_whole(corpus: Path) -> None:
    config = DataConfig(source="synthetic", mix="web", seq_len=512)
    for source in (files(corpus / "*"), open_source(config, tokenizer, 258, 3)):
        for i in range(5):
            whole = source.tokens(i)
            assert len(whole) == source.length(i)
            for start, stop in ((0, 1), (1, 2), (0, len(whole)), (len(whole) - 1, len(whole)), (1, len(whole) - 1)):
                if start <= stop:
                    assert source.tokens(i, start, stop).tolist() == whole[start:stop].tolist()
            with pytest.raises(ValueError, match="are outside"):
                source.tokens(i, 0, len(whole) + 1)


def test_a_file_named_by_two_globs_is_read_once(corpus: Path) -> None:
    assert files(corpus / "a.txt", corpus / "*.txt").size == 2


def test_names_do_not_depend_on_the_spelling_of_a_path(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus.parent)
    spellings = (corpus, f"./{corpus.name}", f"{corpus.name}/../{corpus.name}", corpus.name)
    named = [[name for _, name in listed_files([f"{folder}/*.txt"])] for folder in spellings]
    assert named[0][0].startswith(f"{corpus.name}/") and named.count(named[0]) == 4
    monkeypatch.chdir("/")
    assert listed_files([f"{corpus}/*.txt"])[0][1] == f"{corpus}/".lstrip("/") + Path(named[0][0]).name


def test_relative_paths_still_work_after_a_change_of_folder(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus)
    source = files("b.txt")
    monkeypatch.chdir("/")
    assert source.name(0) == "b.txt" and texts(source) == [b"x"]


def test_tokenised_documents_pass_as_they_are_and_count_no_bytes(tmp_path: Path) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text('{"tokens": [1, 999, 3]}\n{"tokens": [0]}\n')
    source = files(path, vocab_size=1000)
    assert [source.tokens(i).tolist() for i in range(2)] == [[1, 999, 3], [0]]
    assert not source.counts_bytes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"bad\.jsonl:2: not a JSON object"),
        ("[1, 2]", r"bad\.jsonl:2: expected a JSON object, found list"),
        ('{"body": "x", "id": 3}', r"bad\.jsonl:2: has neither 'text' nor 'tokens' \(its keys: 'body', 'id'\)"),
        ("{}", r"bad\.jsonl:2: .*its keys: none"),
        ('{"text": null}', r"bad\.jsonl:2: 'text' holds NoneType"),
        ('{"tokens": []}', r"bad\.jsonl:2: 'tokens' must be a list of at least one integer"),
        ('{"tokens": [1, 2.5]}', r"bad\.jsonl:2: 'tokens' must be"),
        ('{"tokens": [true]}', r"bad\.jsonl:2: 'tokens' must be"),
        ('{"tokens": [3, -1]}', r"bad\.jsonl:2: token id -1 is outside the model's 258 ids"),
        ('{"tokens": [3, 258]}', r"bad\.jsonl:2: token id 258 is outside the model's 258 ids"),
    ],
)
def test_a_broken_line_is_named_when_the_source_opens(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        files(path)


def test_json_that_is_not_utf8_or_nested_without_end_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    for raw in (b'{"text": "\xff\xfe"}\n', b'{"text": ' + b"[" * 100_000 + b"}\n"):
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=r"bad\.jsonl:1: not a JSON object"):
            files(path)


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.txt' matches no file \(looked from "):
        files(tmp_path / "none.txt")
    with pytest.raises(ValueError, match=r"\*\.md' matches no file"):
        files(tmp_path / "*.md")
    with pytest.raises(ValueError, match=r"is a folder; name its files"):
        files(tmp_path)
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ValueError, match="the 1 files found hold no text"):
        files(tmp_path / "*.txt")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="the 1 files found hold no text"):
        files(tmp_path / "*.jsonl")


def test_files_of_another_format_are_refused_and_not_trained_on_as_one_text(tmp_path: Path) -> None:
    (tmp_path / "x.ndjson").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert files(tmp_path / "x.ndjson").size == 2
    for name in ("x.jsonl.gz", "x.json", "x.csv", "x.npy"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(ValueError, match=rf"{name}: files are read as JSON lines .* is none of them"):
            files(tmp_path / name)


def test_another_text_key(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"content": "abc"}\n')
    assert texts(files(path, text_key="content")) == [b"abc"]


@given(text=st.text(max_size=30))
def test_json_text_comes_back_whatever_it_holds(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("json") / "t.jsonl"
    path.write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "end"}) + "\n")
    assert texts(files(path)) == [text.encode("utf-8", "surrogatepass"), b"end"]


def test_a_file_that_changes_during_the_run_is_named(corpus: Path) -> None:
    source = files(corpus / "*")
    (corpus / "a.txt").write_bytes(b"shorter")
    with pytest.raises(ValueError, match=r"a\.txt has changed since the run began"):
        source.tokens(0)
    line = '{"text": "e"}'
    (corpus / "c.jsonl").write_text(line + " " * ((corpus / "c.jsonl").stat().st_size - len(line)))
    with pytest.raises(ValueError, match=r"c\.jsonl has changed"):
        source.tokens(2)


def test_fingerprints_tell_corpora_apart(corpus: Path) -> None:
    before = files(corpus / "*.txt").fingerprint()
    assert before == files(corpus / "a.txt", corpus / "b.txt").fingerprint()
    assert before != files(corpus / "a.txt").fingerprint()
    (corpus / "b.txt").write_bytes(b"xy")
    assert before != files(corpus / "*.txt").fingerprint()


def test_stdlib_is_python_source_without_its_tests() -> None:
    source = open_source(DataConfig(), tokenizer, 258, 0)
    names = [source.name(i) for i in range(source.size or 0)]
    assert names == sorted(names, key=lambda n: n.split("/")) and len(set(names)) == len(names) > 300
    assert "json/decoder.py" in names
    assert not any({"test", "idlelib", "site-packages"} & set(n.split("/")) for n in names)
    lengths = np.array([source.length(i) for i in range(len(names))])
    assert lengths.min() >= 3 and lengths.sum() > 5e6
    index = names.index("json/decoder.py")
    assert tokenizer.decode(source.tokens(index)) == Path(json.decoder.__file__).read_bytes()


def test_a_python_without_sources_says_what_to_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match=r"no \.py files under .*data\.source=synthetic"):
        open_source(DataConfig(), tokenizer, 258, 0)


@pytest.mark.parametrize("mix", MIXES)
def test_a_drawn_document_is_a_function_of_seed_mix_and_index(mix: str) -> None:
    first, second = SyntheticDocuments(mix, 4, 4096), SyntheticDocuments(mix, 4, 4096)
    later = second.tokens(70)  # asked for first here, last there
    for i in (0, 1, 69, 70):
        assert first.length(i) == sample_length(mix, 4, i, 4096) == len(first.tokens(i))
    assert first.tokens(70).tolist() == later.tolist()
    assert later[0] == 256 and (len(later) == 1 or later[-1] == 257) and later[1:-1].max(initial=0) < 256
    other = SyntheticDocuments(mix, 5, 4096)
    assert any(other.tokens(i).tolist() != first.tokens(i).tolist() for i in range(3))


def test_drawn_text_has_the_entropy_that_it_states() -> None:
    source = SyntheticDocuments("one_giant", 0, 131_072)
    assert source.entropy_bits < 3  # uniform bytes would be 8
    ids = source.tokens(0)[1:-1]
    table = np.bincount(ids[:-1].astype(np.int64) * 256 + ids[1:], minlength=65536).reshape(256, 256)
    assert (np.count_nonzero(table, axis=1) == 8).all()
    p = table / table.sum()
    conditional = -(p[p > 0] * np.log2((p / p.sum(1, keepdims=True))[p > 0])).sum()
    assert abs(conditional - source.entropy_bits) < 0.02


def test_one_token_documents_are_drawn() -> None:
    source = SyntheticDocuments("wlb", 0, 2048)
    source.length = lambda index: 1  # type: ignore[method-assign]
    assert source.tokens(0).tolist() == [256]


@pytest.mark.parametrize("name", OPENERS)
def test_every_source_keeps_the_protocol(name: str, source_keys: Callable[[str], dict[str, Any]]) -> None:
    source = open_source(DataConfig(source=name, **source_keys(name)), tokenizer, 258, 1)
    assert isinstance(source, Source)
    assert source.size is None or source.size > 0
    for i in range(3):
        ids = source.tokens(i)
        assert ids.dtype == np.int32 and ids.min() >= 0 and ids.max() < 258
        assert len(ids) == source.length(i) and source.name(i)
    assert len({source.name(i) for i in range(5)}) == 5
    assert int(source.fingerprint(), 16) >= 0 and isinstance(source.counts_bytes, bool)
