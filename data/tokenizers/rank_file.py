"""A tokenizer from a tiktoken rank file: lines of a base64 token and its rank, and nothing of how text is cut.

The pattern that cuts the text and the special tokens are facts of each model, listed here by the encoding's name. They
are those that the publishers state: OpenAI's tiktoken (gpt2, cl100k, o200k), Meta's Llama 3 and Alibaba's Qwen.
"""

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.tokenizers.tokenizer import as_unicode, check_ids, frame_ids


@dataclass(frozen=True)
class Pattern:
    """How text is cut before it is merged; ranks in the published file; special tokens as ids after the last rank; and
    parts of the names of files."""

    regex: str
    ranks: int
    special: dict[str, int]
    files: tuple[str, ...]


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
_HEAD = r"[^\r\n\p{L}\p{N}]?"

PATTERNS: dict[str, Pattern] = {
    "gpt2": Pattern(
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        50_256,
        {"<|endoftext|>": 0},
        ("gpt2", "r50k"),
    ),
    "cl100k": Pattern(
        _WORDS + r"\p{N}{1,3}" + _SIGNS + r"\s++$|" + _SPACE,
        100_256,
        {"<|endoftext|>": 1, "<|fim_prefix|>": 2, "<|fim_middle|>": 3, "<|fim_suffix|>": 4, "<|endofprompt|>": 20},
        ("cl100k",),
    ),
    "o200k": Pattern(
        f"{_HEAD}{_UPPER}*{_LOWER}+{_TAIL}{_HEAD}{_UPPER}+{_LOWER}*{_TAIL}"
        + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        199_998,
        {"<|endoftext|>": 1, "<|endofprompt|>": 20},
        ("o200k",),
    ),
    "llama3": Pattern(
        _WORDS + r"\p{N}{1,3}" + _SIGNS + _SPACE,
        128_000,
        {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|eot_id|>": 9, "<|reserved_special_token_247|>": 255},
        ("llama3", "llama-3", "llama_3"),
    ),
    "qwen": Pattern(
        _WORDS + r"\p{N}" + _SIGNS + _SPACE,
        151_643,
        {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2},
        ("qwen",),
    ),
}


class RankTokenizer:
    """[bos, text..., eos] with byte pair merges in the order of a rank file.

    A special token that is spelled out in a text is text, and ends no document. `vocab_size` is one more than the
    largest special id, as the models' own embeddings count them.

    Raises:
        ValueError: a file that is no rank file (names the line), whose pattern is not known, or that goes by the name
            of a published one and has not as many ranks.
    """

    def __init__(
        self, path: Path, pattern: str | None = None, bos_token: str | None = None, eos_token: str | None = None
    ) -> None:
        import tiktoken  # only where it is chosen

        self._pattern = _pattern_of(path, pattern)
        raw = path.read_bytes()
        self._sha256 = hashlib.sha256(raw).hexdigest()
        ranks = read_ranks(raw, str(path))
        rules = PATTERNS[self._pattern]
        if pattern is None and len(ranks) != rules.ranks:  # its special tokens would lie elsewhere
            raise ValueError(
                f"{path} has {len(ranks):,} ranks, and the published {self._pattern} has {rules.ranks:,}: it is cut "
                f"short, or another; if it is whole, set data.tokenizer_pattern={self._pattern}"
            )
        special = {token: len(ranks) + offset for token, offset in rules.special.items()}
        self.path = path
        self.bos, self.eos = frame_ids(special, str(path), bos_token, eos_token)
        self.vocab_size = max(special.values()) + 1
        self._encoding = tiktoken.Encoding(
            path.name, pat_str=rules.regex, mergeable_ranks=ranks, special_tokens=special
        )
        self._pieces = [*sorted(ranks, key=ranks.__getitem__), *[b""] * (self.vocab_size - len(ranks))]
        self.token_bytes: NDArray[np.int32] | None = np.array([len(piece) for piece in self._pieces], np.int32)

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "kind": "tiktoken",
            "sha256": self._sha256,
            "pattern": self._pattern,
            "bos": self.bos,
            "eos": self.eos,
        }

    def encode(self, text: bytes | str) -> NDArray[np.int32]:
        """int32 [tokens]: [bos, text..., eos]. ValueError for bytes that are not UTF-8, and for a text that tiktoken
        gives up on (a run of some hundred thousand spaces)."""
        try:
            ids = self._encoding.encode_ordinary(as_unicode(text))
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # tiktoken's, which is no Exception
                raise
            raise ValueError(
                f"tiktoken cannot cut this text of {len(text):,} characters, perhaps for a long run of spaces; "
                "shorten it"
            ) from None
        return np.array([self.bos, *ids, self.eos], np.int32)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> bytes:
        """The bytes that `ids` stand for; special tokens stand for none. ValueError for an unknown id."""
        return b"".join(self._pieces[i] for i in check_ids(ids, self.vocab_size).tolist())


def _pattern_of(path: Path, pattern: str | None) -> str:
    choices = ", ".join(PATTERNS)
    if pattern is not None:
        if pattern not in PATTERNS:
            raise ValueError(f"data.tokenizer_pattern={pattern!r} is unknown; choose one of {choices}")
        return pattern
    found = [name for name, rules in PATTERNS.items() if any(part in path.name.lower() for part in rules.files)]
    if len(found) != 1:
        raise ValueError(
            f"the name of {path} does not tell how a rank file's text is cut; set data.tokenizer_pattern to one of "
            f"{choices}"
        )
    return found[0]


def _parse(line: bytes) -> tuple[bytes, int]:
    """A line's token and rank; an empty token for a line of another form."""
    try:
        token, rank = line.split()
        return base64.b64decode(token, validate=True), int(rank)
    except (binascii.Error, ValueError):
        return b"", 0


def read_ranks(raw: bytes, where: str) -> dict[bytes, int]:
    """{token: rank} of a rank file's bytes.

    Raises:
        ValueError: a line that is not 'base64 rank', a token or a rank twice, a gap, or a byte without a token.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        token, rank = _parse(line)
        if not token:
            shown = line[:40].decode("utf-8", "replace")
            raise ValueError(f"{where}:{number} is no line of a tiktoken rank file, 'base64 rank': {shown!r}")
        if token in ranks:
            raise ValueError(f"{where}:{number} ranks a token again that has rank {ranks[token]}; mend the file")
        ranks[token] = rank
    missing = sorted(set(range(len(ranks))) - set(ranks.values()))
    if missing:
        raise ValueError(f"{where}: its {len(ranks)} ranks must run from 0 without a gap, and {missing[0]} is missing")
    lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if lacking:
        raise ValueError(
            f"{where} has no token for {len(lacking)} of 256 bytes (the first is {lacking[0]}), so it cannot code any "
            "text; give a whole rank file"
        )
    return ranks
