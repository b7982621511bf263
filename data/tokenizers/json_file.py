"""A tokenizer from a `tokenizers` JSON file, such as the tokenizer.json beside a Hugging Face checkpoint."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.tokenizers.tokenizer import as_unicode, check_ids, frame_ids

KEEPING = ("ByteLevel", "Split", "Digits", "Punctuation")  # pre-tokenizers that leave no text out, if told not to


class JsonTokenizer:
    """[bos, text..., eos] with the file's own vocabulary and splitting.

    What its post-processor would add is left out, as every document is framed alike here; a special token that is
    spelled out in a text is text, and ends no document. Padding, truncation and chance (BPE dropout) that the file asks
    for are switched off.
    Bits per byte need a vocabulary of bytes (byte-level BPE: GPT-2, Llama 3, Qwen) and count the bytes after the file's
    Unicode normalisation, where it has one.

    Raises:
        ValueError: a file that is no tokenizer, or one whose document tokens are not known.
    """

    def __init__(self, path: Path, bos_token: str | None = None, eos_token: str | None = None) -> None:
        import tokenizers  # only where it is chosen

        raw = path.read_bytes()
        self._sha256 = hashlib.sha256(raw).hexdigest()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
        except BaseException as error:  # the library raises bare Exception, and panics, which are none
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"{path} is no tokenizers JSON file ({str(error).splitlines()[0]})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        for chance in ("dropout", "alpha", "nbest_size"):  # of BPE, of Unigram: a text would be coded anew each time
            if getattr(self._tokenizer.model, chance, None) is not None:
                setattr(self._tokenizer.model, chance, None)
        self.path = path
        self._added = {i: token for i, token in self._tokenizer.get_added_tokens_decoder().items()}
        special = {token.content: i for i, token in self._added.items() if token.special}
        self.bos, self.eos = frame_ids(special, str(path), bos_token, eos_token)
        self._vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocab.values()) + 1
        self._pieces = self._byte_pieces(json.loads(raw))
        self.token_bytes: NDArray[np.int32] | None = None
        if self._pieces is not None:
            self.token_bytes = np.array([len(piece) for piece in self._pieces], np.int32)

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": "tokenizers", "sha256": self._sha256, "bos": self.bos, "eos": self.eos}

    def encode(self, text: bytes | str) -> NDArray[np.int32]:
        """int32 [tokens]: [bos, text..., eos]. ValueError for bytes that are not UTF-8."""
        ids = self._tokenizer.encode(as_unicode(text), add_special_tokens=False).ids
        return np.array([self.bos, *ids, self.eos], np.int32)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> bytes:
        """The bytes that `ids` stand for; special tokens stand for none. ValueError for an unknown id."""
        array = check_ids(ids, self.vocab_size)
        if self._pieces is not None:
            return b"".join(self._pieces[i] for i in array.tolist())
        return self._tokenizer.decode(array.tolist(), skip_special_tokens=True).encode("utf-8")

    def _byte_pieces(self, description: dict[str, Any]) -> list[bytes] | None:
        """The bytes of each id; None where the vocabulary is not one of bytes that covers any text."""
        alphabet, model = byte_alphabet(), description["model"]
        cutters = _flat(description.get("pre_tokenizer"))
        splitter = levels = [part for part in cutters if part.get("type") == "ByteLevel"]
        # text that no id stands for: left out at cuts, marked at the ends of words, or taken in by an added token
        dropped = any(p.get("type") not in KEEPING or p.get("behavior") == "Removed" for p in cutters)
        marked = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        added = description.get("added_tokens") or []
        stripped = any((token.get("lstrip") or token.get("rstrip")) and not token.get("special") for token in added)
        if dropped or marked or stripped:
            return None
        normal = all(p.get("type") in ("NFC", "NFD", "NFKC", "NFKD") for p in _flat(description.get("normalizer")))
        if not levels or not normal or any(part.get("add_prefix_space") for part in splitter):
            return None
        if any(character not in self._vocab for character in alphabet):
            return None
        pieces = [b""] * self.vocab_size
        for token, i in self._vocab.items():
            if i in self._added:
                pieces[i] = b"" if self._added[i].special else token.encode("utf-8")
            elif any(character not in alphabet for character in token):
                return None
            else:
                pieces[i] = bytes(alphabet[character] for character in token)
        return pieces


def byte_alphabet() -> dict[str, int]:
    """The byte that each of the 256 characters of a byte-level vocabulary stands for (GPT-2's convention).

    Printable characters of Latin-1 stand for themselves, the other 68 bytes in order for U+0100 and up.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _flat(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A component of the file, or those of its sequence."""
    if not part:
        return []
    for key in ("pretokenizers", "decoders", "normalizers"):
        if key in part:
            return [inner for each in part[key] for inner in _flat(each)]
    return [part]
