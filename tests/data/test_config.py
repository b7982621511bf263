"""The data group of a configuration: its schema, its presets and its refusals."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from data.config import DataConfig, MixPart, SourceConfig
from data.sources.kinds import SOURCES
from data.sources.table import OPENERS

PRESETS = sorted(Path("conf/data").glob("*.yaml"))


def test_the_defaults_are_valid() -> None:
    DataConfig().validate()
    assert OmegaConf.to_object(OmegaConf.structured(DataConfig)) == DataConfig()


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_every_preset_fits_the_schema(path: Path) -> None:
    preset = OmegaConf.load(path)
    preset.pop("defaults", None)
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DataConfig), preset))
    assert isinstance(config, DataConfig) and config.source == path.stem
    if config.source == "files":
        config.paths = ["x.txt"]  # what a preset cannot know
    if config.source in ("hub", "tokens"):
        config.path = "corpus"
    if config.source == "mix":
        config.sources = [MixPart()]
    config.validate()


def test_the_table_of_sources_is_whole() -> None:
    """Each source has a preset and, alone or as parts of a mixture, an opener; each key has a reader."""
    assert {path.stem for path in PRESETS} == {*SOURCES} == {*OPENERS, "mix"}
    keys = {key for kind in SOURCES.values() for key in kind.keys}
    assert keys == {field.name for field in fields(SourceConfig)} - {"source"} | {"sources"}
    assert all(set(kind.needs) <= set(kind.keys) for kind in SOURCES.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "web"}, r"data\.source='web' is unknown; choose one of stdlib, files, hub, tokens, synthetic, mix"),
        ({"packing": "greedy"}, r"data\.packing='greedy' is unknown; choose one of best_fit, stream, padded"),
        ({"mix": "books"}, r"data\.mix='books' is unknown; choose one of web, code"),
        ({"seq_len": 1}, r"data\.seq_len=1; a row needs at least 2 tokens"),
        ({"rows": 0}, r"data\.rows=0; give at least 1"),
        ({"lookahead": 0}, r"data\.lookahead=0"),
        ({"eval_rows": -3}, r"data\.eval_rows=-3"),
        ({"eval_fraction": 1.0}, r"data\.eval_fraction=1\.0"),
        ({"eval_fraction": -0.1}, r"data\.eval_fraction=-0\.1"),
        ({"eval_fraction": float("nan")}, r"data\.eval_fraction=nan"),
        ({"source": "files"}, r"data\.source=files needs data\.paths"),
        (
            {"paths": ["a.txt"]},
            r"data\.paths=\['a\.txt'\] is set, but data\.source=stdlib reads no paths; use data\.source=files",
        ),
        ({"text_key": ""}, r"data\.text_key is empty"),
        ({"source": "files", "paths": ["a"], "split": ""}, r"data\.split is empty"),
        ({"source": "hub"}, r"data\.source=hub needs data\.path, a data set's name or a folder"),
        ({"source": "tokens"}, r"data\.source=tokens needs data\.path, a folder that data\.prepare wrote"),
        ({"path": "x"}, r"data\.path=x is set, but data\.source=stdlib reads no path; use data\.source=hub or tokens"),
        ({"streaming": False}, r"data\.streaming=False is set, but data\.source=stdlib reads no streaming"),
        ({"source": "hub", "path": "x", "verify": "sizes"}, r"data\.verify=sizes is set, but data\.source=hub"),
        ({"source": "tokens", "path": "x", "verify": "no"}, r"data\.verify='no' is unknown; choose one of full, sizes"),
        ({"tokenizer": "manifest"}, r"data\.tokenizer=manifest is the tokenizer of source=tokens, and none is read"),
        ({"source": "synthetic", "tokenizer": "t.json"}, r"data\.tokenizer=t\.json cannot code source=synthetic"),
        ({"source": "mix"}, r"data\.source=mix needs data\.sources"),
        ({"sources": [MixPart()]}, r"data\.sources lists 1 sources, but data\.source=stdlib is one"),
        (
            {"source": "mix", "sources": [MixPart(weight=0.0)]},
            r"data\.sources\[0\]\.weight=0\.0 must be a finite number",
        ),
        ({"source": "mix", "sources": [MixPart(), MixPart("files")]}, r"data\.sources\[1\]\.source=files needs"),
        ({"source": "mix", "sources": [MixPart("mix")]}, r"data\.sources\[0\]\.source=mix would mix a mixture"),
        ({"source": "mix", "sources": [MixPart()] * 2}, r"data\.sources has 2 parts labelled 'stdlib'"),
        ({"source": "mix", "sources": [MixPart(label="a/b")]}, r"label 'a/b' names a metric; use letters"),
        ({"source": "mix", "sources": [MixPart(mix="code")]}, r"data\.sources\[0\]\.mix=code is set, but data\.sou"),
    ],
)
def test_bad_values_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**change).validate()


def test_every_field_says_its_meaning() -> None:
    lines = Path("data/config.py").read_text().splitlines()
    for field in [*fields(DataConfig), *fields(MixPart)]:
        (line,) = [text for text in lines if text.strip().startswith(f"{field.name}: ")]
        assert len(line.split("#")[1]) > 10
