"""`python train.py --help`: commands, presets, and every key by section with its unit and meaning."""

import textwrap
from collections.abc import Sequence

from training.screen import config_groups
from training.show.keys import ABOUT, keys_of

WIDTH, INDENT = 118, 34
HELP = ("-h", "--help")


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for help."""
    return any(argument in HELP for argument in arguments)


def help_text(commands: str) -> str:
    """Everything that can be given on the command line; `commands` are examples."""
    lines = [commands.strip(), "", "Presets (GROUP=NAME chooses one):"]
    for group, names in config_groups().items():
        if group != "cluster":  # strategy.planner.cluster names those
            lines += _wrapped(f"  {group}", ", ".join(names))
    for section, about in ABOUT.items():
        lines += ["", f"{section or 'Top level'}: {about}"]
        for key in keys_of(section):
            lines += _wrapped(f"  {key.name}", key.meaning + _aside(key.default, key.unit, key.choices))
    lines += ["", "KEY=VALUE sets a key. --cfg job prints the composed configuration; -m runs a sweep (KEY=A,B,C)."]
    return "\n".join(lines)


def _aside(default: str | None, unit: str, choices: Sequence[str]) -> str:
    parts = [unit if unit not in ("", "1") else "", " | ".join(choices)]
    parts.append("the preset gives it" if default is None else f"default {default or 'empty'}")
    return f" [{'; '.join(part for part in parts if part)}]"


def _wrapped(name: str, text: str) -> list[str]:
    """`name` in a column of its own and `text` beside it."""
    rows = textwrap.wrap(text, WIDTH - INDENT, break_long_words=False, break_on_hyphens=False)
    if len(name) >= INDENT:
        return [name, *(" " * INDENT + row for row in rows)]
    return [f"{name:<{INDENT}}{rows[0]}", *(" " * INDENT + row for row in rows[1:])]
