"""The manifest of a folder of tokens: what was tokenised, how, and the size and hash of every file.

A shard is two files. `shard-00000.tokens` holds ids, little endian, uint16 where the vocabulary allows it, else uint32.
`shard-00000.index` holds, of its n documents, int64 ends (in tokens), uint64 hashes of the names (what the split into
train and eval reads), int64 ends of the names (in bytes), and the names in UTF-8. Where prompts or chats were prepared
there is `shard-00000.trained` too: a bit for each token, whether it is to be predicted.
"""

import dataclasses
import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.tokenizers.table import TOKENIZERS, load_tokenizer
from data.tokenizers.tokenizer import Tokenizer

VERSION = 1
MANIFEST_FILE = "manifest.json"
PROGRESS_FILE = "progress.json"  # beside the shards until the manifest is written
INPUT_FILE = "input.json"  # names, sizes and times of what was read: they differ between machines
DTYPES = {"uint16": 2, "uint32": 4}  # bytes of an id
INDEX_BYTES = 24  # of a document, before the names
_CHUNK = 1 << 20


@dataclass(frozen=True)
class ShardFile:
    """One file beside the manifest."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Shard:
    """A run of documents."""

    tokens_file: ShardFile
    index_file: ShardFile
    documents: int
    tokens: int
    max_id: int  # the largest id of the shard
    source: str  # the source that its documents came from
    trained_file: ShardFile | None = None  # which tokens are to be predicted; None: all

    def files(self) -> list[ShardFile]:
        """Two files or, with marks, three."""
        return [self.tokens_file, self.index_file, *([self.trained_file] if self.trained_file else [])]


@dataclass(frozen=True)
class Manifest:
    """manifest.json. `folder` is where it lies, and no part of it."""

    folder: Path
    tokenizer: dict[str, Any]  # Tokenizer.identity
    tokenizer_file: ShardFile | None  # the copy that lies here; None: a tokenizer without a file
    tokenizer_settings: dict[str, str | None]  # pattern, bos_token, eos_token
    vocab_size: int
    dtype: str
    counts_bytes: bool  # whether the ids are the tokenizer's own of a text
    source: dict[str, Any]  # what was read
    shard_tokens: int
    shards: tuple[Shard, ...]

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    def to_json(self) -> str:
        """The file's text: the same for the same tokens, wherever and however often it was written."""
        values = dataclasses.asdict(self)
        del values["folder"]
        values["shards"] = [plain_shard(shard) for shard in self.shards]
        whole = {"version": VERSION, "documents": self.documents, "tokens": self.tokens, **values}
        return json.dumps(whole, indent=1, sort_keys=True) + "\n"

    def files(self) -> list[ShardFile]:
        """Every file that the manifest vouches for."""
        own = [self.tokenizer_file] if self.tokenizer_file else []
        return own + [file for shard in self.shards for file in shard.files()]

    def path(self, file: ShardFile) -> Path:
        """Where the file lies. ValueError for a name that leads out of the folder."""
        return inside(self.folder, file.name)

    def open_tokenizer(self) -> Tokenizer:
        """The tokenizer that the tokens were made with. ValueError where its copy here is another."""
        if self.tokenizer_file is None:
            kind = self.tokenizer.get("kind")
            if not isinstance(kind, str) or kind not in TOKENIZERS:
                raise ValueError(
                    f"{self.folder}: the manifest names tokenizer {kind!r} and no file of it; prepare again"
                )
            return TOKENIZERS[kind]()
        try:
            tokenizer = load_tokenizer(str(self.path(self.tokenizer_file)), **self.tokenizer_settings)
        except ValueError as error:
            raise ValueError(
                f"{self.folder}: {self.tokenizer_file.name} cannot be used with the manifest's settings ({error}); "
                "restore it, or prepare the tokens again"
            ) from None
        if tokenizer.identity != self.tokenizer:
            raise ValueError(
                f"{self.folder}: {self.tokenizer_file.name} is not the tokenizer of the manifest; restore it, or "
                "prepare the tokens again"
            )
        return tokenizer

    def verify(self, hashes: bool) -> None:
        """Check that every file is there with its size and, with `hashes`, its SHA-256, on a few threads.

        Raises:
            ValueError: the first file that is missing, of another size or of other content.
        """
        for file in self.files():
            path = self.path(file)
            if not path.is_file():
                raise ValueError(f"{self.folder}: {file.name} is missing; prepare the tokens again")
            if path.stat().st_size != file.bytes:
                raise ValueError(
                    f"{self.folder}: {file.name} has {path.stat().st_size} bytes, the manifest says {file.bytes}; "
                    "restore it, or prepare the tokens again"
                )
        if hashes:
            largest = {shard.tokens_file: shard.max_id for shard in self.shards}
            with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
                for _ in pool.map(lambda file: self.verify_content(file, largest.get(file)), self.files()):
                    pass

    def verify_content(self, file: ShardFile, largest: int | None = None) -> None:
        """Check one file's SHA-256 and, of ids, that none is above `largest`. ValueError where it holds other ones."""
        sha256, found = hash_file(self.path(file), None if largest is None else self.dtype)
        if sha256 != file.sha256:
            raise ValueError(
                f"{self.folder}: {file.name} is damaged: its SHA-256 begins {sha256[:12]}, the manifest says "
                f"{file.sha256[:12]}; restore it, or prepare the tokens again"
            )
        if largest is not None and found > largest:
            raise ValueError(
                f"{self.folder}: {file.name} holds id {found}, and the manifest says none above {largest}; prepare the "
                "tokens again"
            )


def hash_file(path: Path, dtype: str | None = None) -> tuple[str, int]:
    """SHA-256 of a file, read in pieces; and the largest of its numbers of `dtype`, 0 without one."""
    digest, largest = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            if dtype is not None:
                largest = max(largest, int(np.frombuffer(chunk, f"<{dtype[0]}{DTYPES[dtype]}").max()))
    return digest.hexdigest(), largest


def inside(folder: Path, name: str) -> Path:
    """The file `name` of `folder`. ValueError for a path, and for a link that leads out of the folder."""
    plain = re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name) is not None
    path = folder / name if plain else folder
    if not plain or path.resolve().parent != folder.resolve():
        raise ValueError(f"{folder}: the manifest names {name!r}, which is no file of this folder; it may not leave it")
    return path


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of `folder`, its figures checked against each other; the files are not looked at.

    Raises:
        ValueError: no manifest, one of another version, or one that does not hold together.
    """
    root = Path(folder).expanduser()
    path = root / MANIFEST_FILE
    if not path.is_file():
        begun = (root / PROGRESS_FILE).exists()
        hint = "its preparation has not ended: run data.prepare again" if begun else "write one with data.prepare"
        raise ValueError(f"data.path={folder} holds no {MANIFEST_FILE}; {hint}")
    try:
        values = json.loads(path.read_bytes())
        version = values.pop("version")
    except (ValueError, AttributeError, KeyError, TypeError):
        raise ValueError(f"{path} is no manifest of tokens; prepare them again") from None
    if version != VERSION:
        raise ValueError(f"{path} has version {version!r}, and {VERSION} is read here; prepare the tokens again")
    try:
        _check_types(values, MANIFEST_KINDS)
        for key, value in values["tokenizer_settings"].items():
            _check_types(value, SETTING_KINDS[key], f"tokenizer_settings.{key}")
        documents, tokens = values.pop("documents"), values.pop("tokens")
        manifest = from_values(root, values)
        _check(manifest, documents, tokens)
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} does not hold together ({reason}); prepare the tokens again") from None
    return manifest


# What stands in the file, by key: a type, a list of one kind, or an object of kinds; None with what may also be null;
# a key that ends in ? may be missing.
FILE_KINDS: dict[str, Any] = {"name": str, "bytes": int, "sha256": str}
SHARD_KINDS: dict[str, Any] = {
    "tokens_file": FILE_KINDS, "index_file": FILE_KINDS, "documents": int, "tokens": int, "max_id": int, "source": str,
    "trained_file?": FILE_KINDS,
}  # fmt: skip
MANIFEST_KINDS: dict[str, Any] = {
    "documents": int, "tokens": int, "tokenizer": dict, "tokenizer_file": (FILE_KINDS, None),
    "tokenizer_settings": dict,
    "vocab_size": int, "dtype": str, "counts_bytes": bool, "source": dict, "shard_tokens": int, "shards": [SHARD_KINDS],
}  # fmt: skip


SETTING_KINDS = {"pattern": (str, None), "bos_token": (str, None), "eos_token": (str, None)}


def _check_types(value: Any, kind: Any, where: str = "") -> None:
    """Raise TypeError, naming the field, where `value` is not of `kind`."""
    if isinstance(kind, tuple):
        if value is not None:
            _check_types(value, kind[0], where)
        return
    wanted = type(kind) if isinstance(kind, (dict, list)) else kind
    if type(value) is not wanted:
        shown = repr(value) if len(repr(value)) < 40 else type(value).__name__
        raise TypeError(f"{where} is {shown}, expected {wanted.__name__}")
    if isinstance(kind, list):
        for place, each in enumerate(value):
            _check_types(each, kind[0], f"{where}[{place}]")
    if isinstance(kind, dict):
        kind = {key.rstrip("?"): inner for key, inner in kind.items() if key.rstrip("?") in value or key[-1] != "?"}
        if differing := sorted(value.keys() ^ kind.keys()):
            raise TypeError(f"{where or 'the manifest'} has no {differing[0]!r}, or should have none")
        for key, inner in kind.items():
            _check_types(value[key], inner, f"{where}.{key}".lstrip("."))
    if kind is int and not 0 <= value < 1 << 62:
        raise TypeError(f"{where} is {value}, out of range")


def from_values(folder: Path, values: dict[str, Any]) -> Manifest:
    """A manifest from its JSON object. KeyError and TypeError for one of another form."""
    shards = tuple(shard_from(each) for each in values["shards"])
    copy = values["tokenizer_file"]
    return Manifest(folder, **{**values, "shards": shards, "tokenizer_file": _file(copy) if copy else None})


def shard_from(values: dict[str, Any]) -> Shard:
    """A shard from its JSON object. KeyError and TypeError for one of another form."""
    files = {key: _file(values[key]) for key in ("tokens_file", "index_file", "trained_file") if values.get(key)}
    return Shard(**{**values, **files})


def plain_shard(shard: Shard) -> dict[str, Any]:
    """A shard as its JSON object, without the file that it does not have."""
    values = dataclasses.asdict(shard)
    return {key: value for key, value in values.items() if key != "trained_file" or value is not None}


def _file(values: dict[str, Any]) -> ShardFile:
    file = ShardFile(**values)
    if not (isinstance(file.name, str) and isinstance(file.sha256, str) and type(file.bytes) is int):
        raise TypeError(f"{file} is no file's name, size and hash")
    return file


def _check(manifest: Manifest, documents: int, tokens: int) -> None:
    if manifest.dtype not in DTYPES or type(manifest.vocab_size) is not int or not isinstance(manifest.tokenizer, dict):
        raise TypeError(f"dtype={manifest.dtype!r}, vocab_size={manifest.vocab_size!r}")
    files = manifest.files()
    for file in files:
        manifest.path(file)
    if len({file.name for file in files}) < len(files):
        raise TypeError("it names a file twice")
    for shard in manifest.shards:
        whole = shard.tokens_file.bytes == shard.tokens * DTYPES[manifest.dtype]
        if not whole or shard.documents < 1 or shard.index_file.bytes < INDEX_BYTES * shard.documents:
            raise TypeError(f"the sizes of {shard.tokens_file.name} and its index do not fit its documents and tokens")
        if shard.trained_file is not None and shard.trained_file.bytes != -(-shard.tokens // 8):
            raise TypeError(f"{shard.trained_file.name} does not hold a bit for each of {shard.tokens} tokens")
        if not 0 <= shard.max_id < manifest.vocab_size:
            raise TypeError(f"{shard.tokens_file.name} holds id {shard.max_id} of {manifest.vocab_size} ids")
    if (manifest.documents, manifest.tokens) != (documents, tokens) or not documents:
        raise TypeError(f"{documents} documents of {tokens} tokens, its shards hold {manifest.documents}")
