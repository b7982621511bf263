"""The sources that `data.source` names: what each is, which keys it reads. The configuration, data.prepare and the docs
go by this table; what opens a source is in `data/sources/table.py`."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SourceKind:
    """One source.

    Attributes:
        what: the source in a line.
        keys: the keys of `data` that it alone of the sources, or with few others, reads; those that do not read a key
            refuse it, as nothing that a user sets is ignored.
        needs: keys that must be given, each with words for what to give.
        prepared: whether `data.prepare` tokenises it beforehand.
    """

    what: str
    keys: tuple[str, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)
    prepared: bool = False


SOURCES: dict[str, SourceKind] = {
    "stdlib": SourceKind("the .py files of Python's standard library", prepared=True),
    "files": SourceKind(
        "text, .jsonl and .parquet of your own",
        ("paths", "text_key", "prompt_key", "messages_key"),
        {"paths": "globs, for example ['corpus/**/*.txt']"},
        prepared=True,
    ),
    "hub": SourceKind(
        "a Hugging Face data set, by name or from a folder",
        ("path", "name", "split", "streaming", "text_key", "prompt_key", "messages_key"),
        {"path": "a data set's name or a folder"},
        prepared=True,
    ),
    "tokens": SourceKind(
        "shards that data.prepare wrote", ("path", "verify"), {"path": "a folder that data.prepare wrote"}
    ),
    "synthetic": SourceKind("documents drawn from a mix of lengths", ("mix",)),
    "mix": SourceKind(
        "several sources by weight", ("sources",), {"sources": "for example [{source: stdlib, weight: 0.3}, ...]"}
    ),
}


def readers(key: str) -> list[str]:
    """The sources that read `key`; none for a key that is no source's own."""
    return [name for name, kind in SOURCES.items() if key in kind.keys]
