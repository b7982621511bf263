"""How the sources of `data/sources/kinds.py` are opened, and the tokenizer that codes their documents."""

from collections.abc import Callable

from data.config import MANIFEST, DataConfig, SourceConfig
from data.sources.documents import Source
from data.sources.files import from_paths, from_stdlib
from data.sources.hub import from_hub
from data.sources.manifest import read_manifest
from data.sources.mixture import Mixture
from data.sources.shards import from_shards
from data.sources.synthetic import from_mix
from data.tokenizers.table import load_tokenizer
from data.tokenizers.tokenizer import Tokenizer

# By name; `mix` is several of them at once.
OPENERS: dict[str, Callable[[SourceConfig, Tokenizer, int, int, int], Source]] = {
    "stdlib": from_stdlib,
    "files": from_paths,
    "hub": from_hub,
    "tokens": from_shards,
    "synthetic": from_mix,
}


def open_source(
    config: DataConfig, tokenizer: Tokenizer, vocab_size: int, seed: int, shared: Source | None = None
) -> Source:
    """The source that `config` names, checked whole where it has an end: a broken document is reported here.

    Args:
        vocab_size: ids the model knows; documents tokenised beforehand may hold no others.
        seed: of the drawn documents; sources of real text ignore it, as their order is the loader's.
        shared: the same source, opened for the other split; it is used again if it has an end.

    Raises:
        ValueError: no documents, or one that is broken; the sentence names the file and line.
    """
    known = shared.sources if isinstance(shared, Mixture) else [shared] * len(config.parts())
    opened = [
        old if old is not None and old.size is not None
        else OPENERS[part.source](part, tokenizer, vocab_size, seed, config.seq_len)
        for part, old in zip(config.parts(), known, strict=True)
    ]  # fmt: skip
    if config.source != "mix":
        return opened[0]
    return Mixture(config.labels(), [part.weight for part in config.sources], opened)


def open_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer that `config` names; `manifest` is the copy that lies with the tokens.

    Raises:
        ValueError: a file that is not there or no tokenizer, or one whose hash is not `config.tokenizer_sha256`.
    """
    if config.tokenizer == MANIFEST:
        folder = next(part.path for part in config.parts() if part.source == "tokens")
        for key in ("tokenizer_pattern", "bos_token", "eos_token"):
            if getattr(config, key) is not None:
                raise ValueError(
                    f"data.{key}={getattr(config, key)} is set, but data.tokenizer=manifest brings its own; leave it "
                    "out"
                )
        assert folder is not None
        tokenizer = read_manifest(folder).open_tokenizer()
    else:
        tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_pattern, config.bos_token, config.eos_token)
    found = tokenizer.identity.get("sha256")
    if config.tokenizer_sha256 not in (None, found):
        raise ValueError(
            f"data.tokenizer={config.tokenizer} has the sha256 {found}, and data.tokenizer_sha256="
            f"{config.tokenizer_sha256}: another file; restore it, or leave data.tokenizer_sha256 out"
        )
    return tokenizer
