"""What to train on: the `data` group of a run's configuration."""

import math
from dataclasses import dataclass, field, fields

from data.packing import PACKINGS
from data.sources.kinds import SOURCES, readers
from data.sources.mixes import MIXES

MANIFEST = "manifest"  # as data.tokenizer: the tokenizer that a folder of tokens was prepared with


@dataclass
class SourceConfig:
    """Where documents come from. Plain types only, as this is part of a schema of structured configuration files."""

    source: str = "stdlib"  # a name in data.sources.kinds.SOURCES: stdlib, files, hub, tokens, synthetic, or mix
    paths: list[str] = field(default_factory=list)  # for files: globs of text, .jsonl and .parquet, up to 8.6 GB
    path: str | None = None  # for hub: a data set's name, or a folder; for tokens: what data.prepare wrote
    name: str | None = None  # for hub: the data set's configuration
    split: str = "train"  # for hub: the split to read; documents are held out of it by eval_fraction all the same
    streaming: bool = True  # for hub: read on as training goes; false: download whole, shuffle over all documents
    text_key: str = "text"  # for .jsonl, .parquet, hub: a document's text; "tokens" holds ids tokenised beforehand
    prompt_key: str | None = None  # for .jsonl, .parquet, hub: text before text_key's that is read and not predicted
    messages_key: str | None = None  # for .jsonl, .parquet, hub: a chat, [{role, content}]; the assistant's is trained
    verify: str = "full"  # for tokens, at start: full hashes every shard; sizes looks at the files' sizes alone
    mix: str = "web"  # for synthetic: the distribution of document lengths, a name in data.sources.mixes.MIXES

    def check_source(self, prefix: str = "data.") -> None:
        """Raise ValueError, in a sentence that names the key, for a value that cannot work or that nothing reads."""
        for key, table in (("source", SOURCES), ("mix", MIXES), ("verify", ("full", "sizes"))):
            if getattr(self, key) not in table:
                raise ValueError(f"{prefix}{key}={getattr(self, key)!r} is unknown; choose one of {', '.join(table)}")
        for key, what in SOURCES[self.source].needs.items():
            if not getattr(self, key, None):
                raise ValueError(f"{prefix}source={self.source} needs {prefix}{key}, {what}")
        if not self.text_key:
            raise ValueError(f"{prefix}text_key is empty; name the key that holds a document's text")
        if self.prompt_key is not None and self.messages_key is not None:
            raise ValueError(
                f"{prefix}prompt_key={self.prompt_key} and {prefix}messages_key={self.messages_key} are two forms of a "
                "document; give one of them"
            )
        if self.prompt_key == self.text_key:
            raise ValueError(
                f"{prefix}prompt_key and {prefix}text_key are both {self.text_key}; the first is read, the second "
                "predicted"
            )
        if not self.split:
            raise ValueError(f"{prefix}split is empty; name the split to read, such as train")
        for known in fields(SourceConfig):
            value, able = getattr(self, known.name), readers(known.name)
            default = [] if known.name == "paths" else known.default
            if able and value != default and self.source not in able:
                shown = list(value) if known.name == "paths" else value
                raise ValueError(
                    f"{prefix}{known.name}={shown} is set, but {prefix}source={self.source} reads no {known.name}; "
                    f"use {prefix}source={' or '.join(able)}, or leave {prefix}{known.name} out"
                )


@dataclass
class MixPart(SourceConfig):
    """One source of a mixture."""

    weight: float = 1.0  # its share of the tokens, relative to the other parts'
    label: str | None = None  # its name in messages and in data/tokens/<label>; null: the source's


@dataclass
class DataConfig(SourceConfig):
    """Documents, how they are packed into rows, and what is held out for evaluation."""

    sources: list[MixPart] = field(default_factory=list)  # for mix: the sources, each with the keys above and a weight
    seq_len: int = 1024  # tokens per packed row
    rows: int = 4  # packed rows per optimiser step, over all ranks and micro-batches
    packing: str = "best_fit"  # best_fit: whole documents; stream: cut at row ends; padded: one document a row
    lookahead: int = 256  # for best_fit: documents held back to choose from
    eval_fraction: float = 0.05  # share of the documents held out for evaluation, by hash of their name; 0: none
    eval_rows: int = 64  # packed rows per evaluation, the same ones each time
    tokenizer: str = "byte"  # byte, a tokenizer.json, a tiktoken rank file, or manifest: the one of data.path's tokens
    tokenizer_pattern: str | None = None  # for a rank file: gpt2, cl100k, o200k, llama3, qwen; null: by its name
    bos_token: str | None = None  # for a tokenizer file: the token that begins a document; null: the one known, or eos
    eos_token: str | None = None  # for a tokenizer file: the token that ends a document; null: the one known
    tokenizer_sha256: str | None = None  # hash of the tokenizer's file, written at start; given: another is refused

    def parts(self) -> list[SourceConfig]:
        """The sources to read: those of a mixture, else this one."""
        return list(self.sources) if self.source == "mix" else [self]

    def labels(self) -> list[str]:
        """The name of each of `parts()` in messages and metrics."""
        return [part.label or part.source if isinstance(part, MixPart) else part.source for part in self.parts()]

    def validate(self) -> None:
        """Raise ValueError, in a sentence that names the key, for a value that cannot work."""
        self.check_source()
        if self.packing not in PACKINGS:
            raise ValueError(f"data.packing={self.packing!r} is unknown; choose one of {', '.join(PACKINGS)}")
        if self.seq_len < 2:
            raise ValueError(f"data.seq_len={self.seq_len}; a row needs at least 2 tokens to predict one")
        for key in ("rows", "lookahead", "eval_rows"):
            if getattr(self, key) < 1:
                raise ValueError(f"data.{key}={getattr(self, key)}; give at least 1")
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"data.eval_fraction={self.eval_fraction}; give a share from 0 (no evaluation) to under 1")
        self._check_mix()
        self._check_tokenizer()

    def _check_mix(self) -> None:
        if self.source != "mix":
            if self.sources:
                raise ValueError(
                    f"data.sources lists {len(self.sources)} sources, but data.source={self.source} is one; use "
                    "data=mix or leave data.sources empty"
                )
            return
        for place, part in enumerate(self.sources):
            prefix = f"data.sources[{place}]."
            if part.source == "mix":
                raise ValueError(f"{prefix}source=mix would mix a mixture; list its sources themselves, weights shared")
            part.check_source(prefix)
            if not 0 < part.weight < math.inf:
                raise ValueError(f"{prefix}weight={part.weight} must be a finite number above 0; or leave the part out")
        labels = self.labels()
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ValueError(
                f"data.sources has {labels.count(twice)} parts labelled {twice!r}, whose counts would run together; "
                "give each a label"
            )
        bad = next((label for label in labels if not label.replace("-", "").replace("_", "").isalnum()), None)
        if bad is not None:
            raise ValueError(f"data.sources: label {bad!r} names a metric; use letters, digits, - and _")

    def _check_tokenizer(self) -> None:
        drawn = [part.source for part in self.parts() if part.source == "synthetic"]
        if drawn and self.tokenizer != "byte":
            raise ValueError(
                f"data.tokenizer={self.tokenizer} cannot code source=synthetic, whose documents are drawn as bytes; "
                "use data.tokenizer=byte or another source"
            )
        if self.tokenizer == MANIFEST and not any(part.source == "tokens" for part in self.parts()):
            raise ValueError(
                "data.tokenizer=manifest is the tokenizer of source=tokens, and none is read here; name a tokenizer"
            )
