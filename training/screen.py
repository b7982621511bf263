"""A look at the command line before Hydra runs: every mistake in it becomes one sentence that names the key."""

import dataclasses
import difflib
import re
import shlex
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from training.config import Config

ConfigStore.instance().store(name="schema", node=Config)
# the mark of what model=hf leaves open, see training/adopt.py; OmegaConf looks it up when it merges lists
OmegaConf.register_new_resolver("checkpoint", lambda key: None, replace=True)

# Hydra's options: whether they take a value
FLAGS = {
    "-h": "", "--help": "", "--hydra-help": "", "--version": "", "-c": "value", "--cfg": "value", "--resolve": "",
    "-p": "value", "--package": "value", "-r": "", "--run": "", "-m": "", "--multirun": "", "-sc": "",
    "--shell-completion": "", "-cp": "value", "--config-path": "value", "-cn": "value", "--config-name": "value",
    "-cd": "value", "--config-dir": "value", "--experimental-rerun": "value", "-i": "maybe", "--info": "maybe",
}  # fmt: skip
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
MOST_COMPOSED = 32  # further values of one swept key that are looked at before the first job
CONF = Path(__file__).resolve().parent.parent / "conf"


def config_groups() -> dict[str, list[str]]:
    """Each folder of conf/ and the names that can be chosen there."""
    found = {p.name: sorted(f.stem for f in p.glob("*.yaml")) for p in sorted(CONF.iterdir()) if p.is_dir()}
    return {group: names for group, names in found.items() if names}


def screen_overrides(arguments: list[str]) -> bool:
    """Raise ValueError, one sentence, for what Hydra would refuse in its words or, like `model=null`, take silently.

    Args:
        arguments: the command line after the program's name. Of a sweep (-m), each value of each key is composed once,
            with the first values of the others, so that a mistake shows before the first job.

    Returns:
        Whether they ask for a sweep.
    """
    flags, words = _split(arguments)
    sweep = bool(flags & {"-m", "--multirun"})
    parsed = [_screen_one(word, sweep) for word in words]
    if flags & {"-h", "--help", "--hydra-help", "--version", "--shell-completion", "-sc"}:
        return False
    choices = [_values(word, override) for word, override in zip(words, parsed)]
    first = [values[0] for values in choices if values]
    composed = _compose(first)
    for values in choices:
        for other in values[1 : MOST_COMPOSED + 1]:
            _compose([other if word == values[0] else word for word in first])
    if "--resolve" in flags and composed.model.path is None and is_left_open(composed.model, "heads"):
        raise ValueError(
            "--resolve: model=hf takes the model's sizes from model.path at the start; leave --resolve out."
        )
    return sweep


def _split(arguments: list[str]) -> tuple[set[str], list[str]]:
    """The flags, each in full, and the overrides."""
    flags: set[str] = set()
    words: list[str] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        if argument.startswith("-") and argument != "-":
            if re.match(r"-+[\w.]+=", argument) and argument.split("=")[0] not in FLAGS:
                raise ValueError(f"{argument}: overrides take no dashes; write {argument.lstrip('-')}.")
            name = argument.split("=")[0]
            whole = [name] if name in FLAGS else [flag for flag in FLAGS if len(name) > 2 and flag.startswith(name)]
            if not whole:
                keys = re.match(r"-+([\w.]+)$", argument)
                typed = f"{keys[1]}={left[0]}" if keys and left else "key=value"
                raise ValueError(
                    f"{argument} is no option (--help lists them); a key is set without dashes, as {typed}."
                )
            if whole[0] in ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"):
                raise ValueError(
                    f"{argument}: there is one configuration, conf/config.yaml; choose among its groups instead, as in "
                    "model=gpt2, or set single keys."
                )
            flags.add(whole[0])
            takes = FLAGS[whole[0]]
            if "=" not in argument and left and (takes == "value" or (takes == "maybe" and left[0] in INFO)):
                left.pop(0)
        elif "=" in argument or argument.startswith("~"):
            words.append(argument)
        else:
            following = left[0] if left and "=" not in left[0] and not left[0].startswith("-") else "VALUE"
            raise ValueError(f"{argument}: a key is set with an equals sign; write {typed_as(argument, following)}.")
    return flags, words


def _screen_one(argument: str, sweep: bool) -> Override:
    groups = config_groups()
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        key, _, value = argument.partition("=")
        bare = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
        if not (takes_text(key) or is_list(key)):
            raise ValueError(f"{argument}: the value of {key} cannot be read; give one number or name.") from error
        raise ValueError(
            f"{argument}: the value of {key} cannot be read; quote one that holds a comma, a space, an equals sign or "
            f"a hash: {typed_as(key, bare)}"
        ) from error
    key = override.key_or_group
    if key in groups and (override.is_delete() or override.value() is None):
        raise ValueError(f"{argument}: {key} cannot be null or left out; choose one of {', '.join(groups[key])}.")
    if override.is_delete() and "." in key:
        raise ValueError(f"{argument}: {key} cannot be left out; set it, as in {key}=null.")
    value = argument.partition("=")[2]
    if override.is_sweep_override():
        if not sweep:
            one = f", or write one value: {typed_as(key, value)}" if takes_text(key) or is_list(key) else "."
            raise ValueError(f"{argument}: several values are a sweep; add -m to run one after the other{one}")
        return override
    if not override.is_delete() and is_list(key) and isinstance(override.value(), (str, int, float, QuotedString)):
        text = override.value()
        plain = text.text if isinstance(text, QuotedString) else str(text)
        if not plain.startswith("${"):
            raise ValueError(f"{argument}: {key} is a list; write {typed_as(key, plain)}")
    return override


def _values(word: str, override: Override) -> list[str]:
    """The overrides that a word of a sweep stands for; none where they are not known before Hydra runs (a glob)."""
    if not override.is_sweep_override():
        return [word]
    try:
        return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    except HydraException:
        return []


def _compose(overrides: list[str]) -> DictConfig:
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("config", overrides=overrides)
        refuse_added_keys(OmegaConf.to_container(composed))
        _resolve(composed, composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_sentence(error)) from error
    return composed


def _resolve(node: Any, root: DictConfig) -> None:
    """Follow every ${...}, but for those that a checkpoint fills in."""
    waits = is_left_open(root.model, "heads")
    keys: Any = node if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        if waits and node is root.model and OmegaConf.is_interpolation(node, key):
            continue
        if not OmegaConf.is_missing(node, key) and isinstance(value := node[key], (DictConfig, ListConfig)):
            _resolve(value, root)


def is_left_open(model: DictConfig, key: str) -> bool:
    """Whether a key holds the mark of conf/model/hf.yaml, which a checkpoint fills in; a user's ${...} is none."""
    plain: Any = OmegaConf.to_container(model, resolve=False)
    return plain.get(key) == f"${{checkpoint:{key}}}"


def typed(composed: DictConfig) -> Config:
    """The configuration as plain data. ValueError, one sentence, for a value of another type."""
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ValueError(_sentence(error)) from error
    assert isinstance(config, Config)
    return config


def _kinds(key: str) -> tuple[Any, ...]:
    """The types that the schema takes at `key`; none where there is no such key."""
    kind: Any = Config
    for name in key.lstrip("+").split("."):
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            return ()
        kind = get_type_hints(kind).get(name)
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def is_list(key: str) -> bool:
    """Whether the schema has a list at `key`."""
    return any(get_origin(kind) is list for kind in _kinds(key))


def takes_text(key: str) -> bool:
    """Whether the schema has a text at `key`."""
    return str in _kinds(key)


def typed_as(key: str, value: str) -> str:
    """`key=value` as it is to be typed in a shell, quoted where that is needed; a list's entries one by one."""
    if is_list(key):
        inside = value[1:-1] if value.startswith("[") and value.endswith("]") else value
        parts = [part.strip() for part in re.findall(r"""(?:"[^"]*"|'[^']*'|\[[^\]]*\]|[^,])+""", inside)]
        word = f"{key}=[{','.join(_entry(part) for part in parts)}]"
    else:
        word = f"{key}={_entry(value)}"
    return shlex.quote(word) if re.search(r"[^\w.,:=/+@%-]", word) else word


def _entry(text: str) -> str:
    """A value that Hydra reads as this text (or number)."""
    bare = text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
    if re.fullmatch(r"[\w./@%+*?-]+", bare, re.ASCII):
        return bare
    escaped = bare.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


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
