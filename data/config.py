"""What to train on: the `data` group of a run's configuration."""

from dataclasses import dataclass, field


@dataclass
class DataConfig:
    """Documents, how they are packed into rows, and what is held out for evaluation.

    Plain types only, so that it also serves as a schema of structured configuration files.
    """

    source: str = "stdlib"  # stdlib: Python's own .py files; files: text or JSON lines; synthetic: drawn documents
    paths: list[str] = field(default_factory=list)  # for files: globs of .txt (a document a file), .jsonl (one a line)
    text_key: str = "text"  # for .jsonl: the key of a document's text; "tokens" holds documents tokenised beforehand
    mix: str = "web"  # for synthetic: the distribution of document lengths, a name in data.mixes.MIXES
    seq_len: int = 1024  # tokens per packed row
    rows: int = 4  # packed rows per optimiser step, over all ranks and micro-batches
    packing: str = "best_fit"  # best_fit: whole documents; stream: cut at row ends; padded: one document a row
    lookahead: int = 256  # for best_fit: documents held back to choose from
    eval_fraction: float = 0.05  # share of the documents held out for evaluation, by hash of their name; 0: none
    eval_rows: int = 64  # packed rows per evaluation, the same ones each time
    tokenizer: str = "byte"  # a name in data.tokenizer.TOKENIZERS

    def validate(self) -> None:
        """Raise ValueError, in a sentence that names the key, for a value that cannot work."""
        # Imported here: the tables import this module.
        from data.mixes import MIXES
        from data.packing import PACKINGS
        from data.sources import SOURCES
        from data.tokenizer import TOKENIZERS

        for key, table in (("source", SOURCES), ("packing", PACKINGS), ("tokenizer", TOKENIZERS), ("mix", MIXES)):
            if getattr(self, key) not in table:
                raise ValueError(f"data.{key}={getattr(self, key)!r} is unknown; choose one of {', '.join(table)}")
        if self.seq_len < 2:
            raise ValueError(f"data.seq_len={self.seq_len}; a row needs at least 2 tokens to predict one")
        for key in ("rows", "lookahead", "eval_rows"):
            if getattr(self, key) < 1:
                raise ValueError(f"data.{key}={getattr(self, key)}; give at least 1")
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"data.eval_fraction={self.eval_fraction}; give a share from 0 (no evaluation) to under 1")
        if self.source == "files" and not self.paths:
            raise ValueError("data.source=files needs data.paths, for example data.paths=['corpus/**/*.txt']")
        if self.source != "files" and self.paths:
            raise ValueError(
                f"data.paths={list(self.paths)} is set, but data.source={self.source} reads no paths; "
                "use data.source=files or leave data.paths empty"
            )
        if not self.text_key:
            raise ValueError("data.text_key is empty; name the key that holds a document's text")
        for key, default, source in (("mix", "web", "synthetic"), ("text_key", "text", "files")):
            if getattr(self, key) != default and self.source != source:
                raise ValueError(
                    f"data.{key}={getattr(self, key)} is set, but data.source={self.source} does not read it; "
                    f"use data.source={source} or leave data.{key} out"
                )
