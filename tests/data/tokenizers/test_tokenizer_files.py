"""Tokenizers from files: framing, exact bytes, the publishers' patterns, and files that are none."""

import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from data.bigram import bigram_bits_per_byte
from data.config import DataConfig
from data.loader import PackedLoader
from data.tokenizers.rank_file import PATTERNS
from data.tokenizers.table import load_tokenizer
from data.tokenizers.tokenizer import Tokenizer
from tests.data.conftest import train, write_ranks

Bpe = Callable[[str], Path]


def load(bpe: Bpe, kind: str) -> Tokenizer:
    return load_tokenizer(str(bpe(kind)), {"json": None, "ranks": "gpt2"}[kind])


@pytest.mark.parametrize("kind", ["json", "ranks"])
@given(text=st.text(max_size=40))
def test_a_document_is_framed_and_its_bytes_are_counted(kind: str, bpe: Bpe, text: str) -> None:
    tokenizer = load(bpe, kind)
    ids = tokenizer.encode(text)
    raw = text.encode()
    assert ids.dtype == np.int32 and ids[0] == ids[-1] == 300
    assert tokenizer.decode(ids) == raw
    assert tokenizer.token_bytes is not None and int(tokenizer.token_bytes[ids].sum()) == len(raw)


@given(text=st.text(max_size=60))
def test_both_files_code_alike(bpe: Bpe, text: str) -> None:
    first, second = (load(bpe, kind) for kind in ("json", "ranks"))
    assert first.encode(text).tolist() == second.encode(text).tolist()


@pytest.mark.parametrize(
    "edit",
    [
        lambda raw: raw["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Whitespace"}),
        lambda raw: raw["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "WhitespaceSplit"}),
        lambda raw: raw["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Punctuation", "behavior": "Removed"}),
        lambda raw: raw["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
        lambda raw: raw["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
        lambda raw: raw.update(pre_tokenizer=None),
        lambda raw: raw["model"].update(end_of_word_suffix="w"),
        lambda raw: raw.update(normalizer={"type": "Lowercase"}),
        lambda raw: raw.update(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
        *(
            lambda raw, side=side: raw["added_tokens"].append(
                {"id": 301, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False,
                 "normalized": False, "special": False, side: True}
            )
            for side in ("lstrip", "rstrip")
        ),
    ],
)  # fmt: skip
def test_bytes_are_counted_only_where_every_id_has_a_fixed_text(bpe: Bpe, tmp_path: Path, edit: Any) -> None:
    raw = json.loads(bpe("json").read_bytes())
    assert load(bpe, "json").token_bytes is not None
    edit(raw)
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert load_tokenizer(str(tmp_path)).token_bytes is None


def test_a_file_at_which_the_library_panics_is_one_sentence(bpe: Bpe, tmp_path: Path) -> None:
    raw = json.loads(bpe("json").read_bytes())
    raw["model"]["continuing_subword_prefix"] = "##"
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"is no tokenizers JSON file \(") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dropout", [0.1, 0.5, 1.0])
def test_chance_that_a_file_asks_for_is_switched_off(bpe: Bpe, tmp_path: Path, dropout: float) -> None:
    raw = json.loads(bpe("json").read_bytes())
    raw["model"]["dropout"] = dropout
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer, plain = load_tokenizer(str(tmp_path)), load(bpe, "json")
    text = "def function(self, number): return number + 12345"
    assert {tuple(tokenizer.encode(text).tolist()) for _ in range(20)} == {tuple(plain.encode(text).tolist())}


@pytest.mark.parametrize(("alpha", "nbest_size"), [(0.3, 4), (0.9, 64)])
def test_sampling_of_segmentations_is_switched_off(tmp_path: Path, alpha: float, nbest_size: int) -> None:
    pieces = [("<unk>", 0.0), ("a", -1.0), ("b", -1.5), ("ab", -1.5), ("</s>", -9.0)]
    model = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0, alpha=alpha, nbest_size=nbest_size))
    model.add_special_tokens(["</s>"])
    raw = json.loads(model.to_str())
    raw["model"] |= {"alpha": alpha, "nbest_size": nbest_size}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = load_tokenizer(str(tmp_path))
    assert len({tuple(tokenizer.encode("ab" * 9).tolist()) for _ in range(20)}) == 1


@pytest.mark.parametrize("kind", ["json", "ranks"])
def test_special_tokens_spelled_in_a_text_are_text(kind: str, bpe: Bpe) -> None:
    tokenizer = load(bpe, kind)
    ids = tokenizer.encode("a<|endoftext|>b")
    assert 300 not in ids[1:-1].tolist() and tokenizer.decode(ids) == b"a<|endoftext|>b"


@pytest.mark.parametrize("kind", ["json", "ranks"])
def test_lone_surrogates_become_the_replacement_and_bad_utf8_is_named(kind: str, bpe: Bpe) -> None:
    tokenizer = load(bpe, kind)
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb".encode()
    with pytest.raises(ValueError, match=r"byte 1 is not UTF-8.*use data\.tokenizer=byte"):
        tokenizer.encode(b"a\xffb")


def test_identity_is_the_files_hash_and_what_frames_a_document(bpe: Bpe) -> None:
    path = bpe("ranks")
    assert load(bpe, "ranks").identity == {
        "kind": "tiktoken",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "pattern": "gpt2",
        "bos": 300,
        "eos": 300,
    }


def test_llama_documents_begin_with_their_own_token(tmp_path: Path, bpe: Bpe) -> None:
    path = tmp_path / "tokenizer.json"
    train(path, "llama3", ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    tokenizer = load_tokenizer(str(tmp_path))  # a checkpoint's folder
    assert tokenizer.encode("x").tolist()[::2] == [300, 301]
    assert load_tokenizer(str(path), eos_token="<|eot_id|>").encode("x")[-1] == 302
    ranks = load_tokenizer(str(bpe("ranks")), "llama3")
    assert ranks.encode("x").tolist()[::2] == [300, 301] and ranks.vocab_size == 300 + 256


@pytest.mark.parametrize(
    ("name", "published"), [("gpt2", "r50k_base"), ("cl100k", "cl100k_base"), ("o200k", "o200k_base")]
)
@given(text=st.text(st.sampled_from("aBcé雪 \n\r\t'sS'LLtd12349!?./_-\u00a0ǅ́"), max_size=40))
def test_patterns_cut_as_the_publishers_do(name: str, published: str, text: str) -> None:
    import tiktoken_ext.openai_public as public

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: {})
        theirs: dict[str, Any] = getattr(public, published)()
    assert regex.findall(PATTERNS[name].regex, text) == [m.group() for m in regex.finditer(theirs["pat_str"], text)]
    ranks = theirs["special_tokens"]["<|endoftext|>"] - PATTERNS[name].special["<|endoftext|>"]
    assert ranks == PATTERNS[name].ranks
    for token, i in PATTERNS[name].special.items():
        assert theirs["special_tokens"][token] == ranks + i


def _line(token: bytes, rank: int) -> str:
    return f"{base64.b64encode(token).decode()} {rank}"


BYTES = [_line(bytes([b]), b) for b in range(256)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["not a rank file"], r"gpt2\.tiktoken:1 is no line of a tiktoken rank file"),
        (["####", *BYTES], r":1 is no line"),
        ([*BYTES, "YWI= -1"], r"ranks must run from 0 without a gap, and 256 is missing"),
        ([*BYTES, _line(b"ab", 300)], r"its 257 ranks must run from 0 without a gap, and 256 is missing"),
        ([*BYTES, _line(b"a", 256)], r":257 ranks a token again that has rank 97"),
        ([_line(bytes([b]), b) for b in range(200)], r"no token for 56 of 256 bytes \(the first is 200\)"),
        ([], r"no token for 256 of 256 bytes"),
    ],
)
def test_a_rank_file_that_is_none_is_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    path = tmp_path / "gpt2.tiktoken"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(str(path))
    assert "\n" not in str(caught.value)


def test_a_rank_file_cut_short_is_refused_unless_its_pattern_is_named(tmp_path: Path, bpe: Bpe) -> None:
    path = tmp_path / "r50k_base.tiktoken"
    path.write_bytes(bpe("ranks").read_bytes())
    with pytest.raises(ValueError, match=r"has 300 ranks, and the published gpt2 has 50,256: it is cut short"):
        load_tokenizer(str(path))
    assert load_tokenizer(str(path), "gpt2").vocab_size == 301


def test_a_text_that_tiktoken_gives_up_on_is_named(bpe: Bpe) -> None:
    with pytest.raises(ValueError, match=r"tiktoken cannot cut this text of 1,000,001 characters"):
        load(bpe, "ranks").encode(" " * 1_000_000 + "a")


def test_names_and_settings_that_do_not_fit_are_refused(tmp_path: Path, bpe: Bpe) -> None:
    ranks, file = str(bpe("ranks")), str(bpe("json"))
    unknown = tmp_path / "tokenizer.model"
    unknown.write_bytes(bpe("ranks").read_bytes())
    (tmp_path / "bad.json").write_text("{}")
    for arguments, message in [
        (("bpe",), r"data\.tokenizer='bpe' is unknown.*choose one of byte"),
        (("byte", "gpt2"), r"data\.tokenizer_pattern=gpt2 is set, but data\.tokenizer=byte does not read it"),
        (("byte", None, None, "x"), r"data\.eos_token=x is set"),
        ((file, "gpt2"), r"data\.tokenizer_pattern=gpt2 is set, but .* brings its own pattern"),
        ((ranks, "gpt5"), r"data\.tokenizer_pattern='gpt5' is unknown; choose one of gpt2, cl100k"),
        ((str(unknown),), r"does not tell how .* is cut; set data\.tokenizer_pattern to one of gpt2"),
        ((str(tmp_path / "bad.json"),), r"bad\.json is no tokenizers JSON file"),
        ((file, None, None, "</s>"), r"data\.eos_token=</s> is no special token of .*\(it has: <\|endoftext\|>\)"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            load_tokenizer(*arguments)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    train(tmp_path / "none.json", "gpt2", ["<mine>"])
    with pytest.raises(ValueError, match=r"no known token that ends a document .*<mine>\); set data\.eos_token"):
        load_tokenizer(str(tmp_path / "none.json"))
    assert load_tokenizer(str(tmp_path / "none.json"), eos_token="<mine>").encode("a")[-1] == 300


def test_a_vocabulary_that_is_not_of_bytes_has_no_bits_per_byte(tmp_path: Path, bpe: Bpe) -> None:
    values = json.loads(bpe("json").read_text())
    values["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    values["decoder"] = None
    path = tmp_path / "words.json"
    path.write_text(json.dumps(values))
    assert load_tokenizer(str(path)).token_bytes is None


def test_a_loader_with_bpe_packs_every_token_and_counts_the_texts_bytes(tmp_path: Path, bpe: Bpe) -> None:
    texts = [f"def number{i}(self): return {i * 'it is the snow '}" for i in range(12)]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    config = DataConfig(
        source="files", paths=[str(tmp_path / "*.jsonl")], seq_len=400, rows=12, packing="padded",
        eval_fraction=0.0, tokenizer=str(bpe("json")),
    )  # fmt: skip
    loader = PackedLoader(config, 400, 0)
    batch = loader.batch(0)
    assert batch.predicted_bytes == sum(len(text.encode()) for text in texts)
    assert batch.label_tokens < batch.predicted_bytes  # a token is more than a byte
    assert 0 < bigram_bits_per_byte(loader, [batch]) < 8
    with pytest.raises(ValueError, match=r"tokenizer has 301 ids, model\.vocab_size=258"):
        PackedLoader(config, 258, 0)


def test_text_files_with_bpe_are_coded_whole_and_named_where_they_are_no_text(tmp_path: Path, bpe: Bpe) -> None:
    (tmp_path / "a.txt").write_text("it is the snow\n" * 30)
    config = DataConfig(
        source="files", paths=[str(tmp_path / "*.txt")], tokenizer=str(bpe("ranks")), tokenizer_pattern="gpt2",
        eval_fraction=0.0,
    )  # fmt: skip
    loader = PackedLoader(config, 400, 0)
    whole = loader.source.tokens(0)
    assert loader.tokenizer.decode(whole) == b"it is the snow\n" * 30 and loader.source.length(0) == whole.size
    assert loader.source.tokens(0, 3, 9).tolist() == whole[3:9].tolist()
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"b\.txt: byte 0 is not UTF-8"):
        PackedLoader(config, 400, 0)


def test_libraries_are_imported_only_when_chosen() -> None:
    code = (
        "import sys; from data.config import DataConfig; from data.loader import PackedLoader; import data.prepare\n"
        "PackedLoader(DataConfig(), 258, 0)\n"
        "print([m for m in ('datasets', 'tokenizers', 'tiktoken', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_another_file_than_the_hash_is_refused(bpe: Bpe) -> None:
    config = DataConfig(tokenizer=str(bpe("json")), tokenizer_sha256="00")
    with pytest.raises(ValueError, match=r"has the sha256 [0-9a-f]{64}, and data\.tokenizer_sha256=00: another file"):
        PackedLoader(config, 400, 0)


def test_write_ranks_is_read_back(bpe: Bpe, tmp_path: Path) -> None:
    tokenizer = train(tmp_path / "t.json", "qwen", ["<|endoftext|>"])
    write_ranks(tokenizer, tmp_path / "qwen.tiktoken")
    text = "abc 123456 snow's"
    assert load_tokenizer(str(tmp_path / "qwen.tiktoken"), "qwen").encode(text).tolist() == [
        300, *tokenizer.encode(text).ids, 300
    ]  # fmt: skip
