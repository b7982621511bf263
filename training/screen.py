"""A look at the command line before Hydra runs: every mistake in it becomes one sentence that names the key."""

import dataclasses
import difflib
import re
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from training.config import Config

ConfigStore.instance().store(name="schema", node=Config)
# the mark of what model=hf leaves open, see training/adopt.py; OmegaConf looks it up when it merges lists
OmegaConf.register_new_resolver("checkpoint", lambda key: None, replace=True)

CONF = Path(__file__).resolve().parent.parent / "conf"


def config_groups() -> dict[str, list[str]]:
    """Each folder of conf/ and the names that can be chosen there."""
    found = {p.name: sorted(f.stem for f in p.glob("*.yaml")) for p in sorted(CONF.iterdir()) if p.is_dir()}
    return {group: names for group, names in found.items() if names}


def screen_overrides(arguments: list[str]) -> None:
    """Raise ValueError, one sentence, for overrides that Hydra would refuse or, like `model=null`, take without a word.

    Args:
        arguments: the command line after the program's name. Hydra's own flags (-m, --cfg, ...) are left to Hydra, and
            so are the combinations of a sweep, which it composes before the first job.
    """
    overrides = []
    for argument in arguments:
        if re.match(r"--[\w.]+\.[\w.]+=", argument):
            raise ValueError(f"{argument}: overrides take no dashes; write {argument.lstrip('-')}.")
        if not argument.startswith("-") and ("=" in argument or argument.startswith("~")):
            _screen_one(argument)
            overrides.append(argument)
    if not any(a in ("-m", "--multirun", "-h", "--help", "--hydra-help") for a in arguments):
        _compose(overrides)


def _screen_one(argument: str) -> None:
    groups = config_groups()
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        key, _, value = argument.partition("=")
        raise ValueError(
            f"{argument}: the value of {key} cannot be read; quote one that holds a comma, a space, an equals sign or "
            f"a hash: '{key}=\"{value}\"'."
        ) from error
    key = override.key_or_group
    if key in groups and (override.is_delete() or override.value() is None):
        raise ValueError(f"{argument}: {key} cannot be null or left out; choose one of {', '.join(groups[key])}.")
    if override.is_delete() and "." in key:
        raise ValueError(f"{argument}: {key} cannot be left out; set it, as in {key}=null.")


def _compose(overrides: list[str]) -> None:
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("config", overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_sentence(error)) from error
    refuse_added_keys(OmegaConf.to_container(composed))


def refuse_added_keys(values: Any, schema: type = Config, prefix: str = "") -> None:
    """Raise ValueError for a key that the schema lacks: `+key=value` gets in, and nothing would read it."""
    fields = {field.name: field.type for field in dataclasses.fields(schema)}
    for key, value in values.items():
        if key not in fields:
            raise ValueError(
                f"{prefix}{key}: no such key{_did_you_mean(str(key), list(fields))}; nothing would read it."
            )
        inner = fields[key]
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            refuse_added_keys(value, inner, f"{prefix}{key}.")


def _did_you_mean(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=3) or [name for name in known if name.startswith(f"{key}_")]
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _sentence(error: Exception) -> str:
    """The exception's first paragraph, the full key in front, and the nearest names when a key is unknown."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = str(cause).split("Config search path")[0]
    lines = [line.strip() for line in text.splitlines()]
    full_key = next((line.split(": ", 1)[1] for line in lines if line.startswith("full_key: ")), None)
    words = [line for line in lines if line and not re.match(r"(full_key|reference_type|object_type)", line)]
    sentence = " ".join(words)
    if full_key is None:
        return sentence
    known = list(getattr(getattr(cause, "object_type", None), "__dataclass_fields__", {}))
    hint = _did_you_mean(full_key.rsplit(".", 1)[-1], known) if "Key '" in sentence else ""
    return f"{full_key}: {sentence}{hint}"
