"""A look at the command line before Hydra: the mistakes whose own messages name nothing."""

from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

CONF = Path(__file__).resolve().parent.parent / "conf"


def config_groups() -> dict[str, list[str]]:
    """Each folder of conf/ and the names that can be chosen there."""
    return {p.name: sorted(f.stem for f in p.glob("*.yaml")) for p in sorted(CONF.iterdir()) if p.is_dir()}


def screen_overrides(arguments: list[str]) -> None:
    """Raise ValueError, one sentence, for an override that Hydra would refuse without saying why or accept wrongly."""
    groups = config_groups()
    parser = OverridesParser.create()
    for argument in arguments:
        if argument.startswith("--") and "=" in argument and "." in argument.split("=")[0]:
            raise ValueError(f"{argument}: overrides take no dashes; write {argument.lstrip('-')}.")
        if argument.startswith("-") or "=" not in argument:
            continue
        try:
            override = parser.parse_override(argument)
        except OverrideParseException as error:
            key, value = argument.split("=", 1)
            raise ValueError(
                f"{argument}: the value of {key} cannot be read; quote a value that holds a comma, a space, an equals "
                f"sign or a hash: '{key}=\"{value}\"'."
            ) from error
        key = override.key_or_group
        if key in groups and not override.is_delete() and override.value() is None:
            raise ValueError(f"{argument}: {key} cannot be null; choose one of {', '.join(groups[key])}.")
        if key in groups and override.is_delete():
            raise ValueError(f"{argument}: {key} cannot be left out; choose one of {', '.join(groups[key])}.")
