"""The data group of a configuration: its schema, its presets and its refusals."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from data.config import DataConfig

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
        config.paths = ["x.txt"]  # the one key that a preset cannot know
    config.validate()


def test_every_source_has_a_preset() -> None:
    from data.sources import SOURCES

    assert {path.stem for path in PRESETS} == set(SOURCES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "web"}, r"data\.source='web' is unknown; choose one of stdlib, files, synthetic"),
        ({"packing": "greedy"}, r"data\.packing='greedy' is unknown; choose one of best_fit, stream, padded"),
        ({"mix": "books"}, r"data\.mix='books' is unknown; choose one of web, code"),
        ({"tokenizer": "bpe"}, r"data\.tokenizer='bpe' is unknown; choose one of byte"),
        ({"seq_len": 1}, r"data\.seq_len=1; a row needs at least 2 tokens"),
        ({"rows": 0}, r"data\.rows=0; give at least 1"),
        ({"lookahead": 0}, r"data\.lookahead=0"),
        ({"eval_rows": -3}, r"data\.eval_rows=-3"),
        ({"eval_fraction": 1.0}, r"data\.eval_fraction=1\.0"),
        ({"eval_fraction": -0.1}, r"data\.eval_fraction=-0\.1"),
        ({"eval_fraction": float("nan")}, r"data\.eval_fraction=nan"),
        ({"source": "files"}, r"data\.source=files needs data\.paths"),
        ({"paths": ["a.txt"]}, r"data\.paths=\['a\.txt'\] is set, but data\.source=stdlib reads no paths"),
        ({"text_key": ""}, r"data\.text_key is empty"),
    ],
)
def test_bad_values_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**change).validate()


def test_every_field_says_its_meaning() -> None:
    lines = Path("data/config.py").read_text().splitlines()
    for field in fields(DataConfig):
        (line,) = [text for text in lines if text.strip().startswith(f"{field.name}: ")]
        assert len(line.split("#")[1]) > 10
