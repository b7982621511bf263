"""Text to token ids. The byte tokenizer needs no vocabulary file and codes any bytes; others are read from a file.

Every tokenizer frames a document in the same way: [begin, text..., end], so that each token of the text is predicted.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@runtime_checkable
class Tokenizer(Protocol):
    """What the sources ask of a tokenizer.

    `token_bytes`: int32 [vocab_size], the bytes of text that each id stands for (0 for begin and end); None where an
    id has no fixed text, so that bits per byte cannot be told. `identity`: JSON-able, equal for tokenizers that code
    alike; holds the hash of the file.
    """

    vocab_size: int
    token_bytes: NDArray[np.int32] | None

    @property
    def identity(self) -> dict[str, Any]: ...

    def encode(self, text: bytes | str) -> NDArray[np.int32]: ...

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> bytes: ...


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 begins a document (bos), 257 ends it (eos).

    A document of n bytes has n + 2 tokens, [bos, bytes..., eos], and n of its n + 1 predicted tokens are bytes.
    """

    bos = 256
    eos = 257
    vocab_size = 258
    byte_ids = 256  # ids below this are one byte of text each

    def __init__(self) -> None:
        self.token_bytes: NDArray[np.int32] | None = (np.arange(self.vocab_size) < self.byte_ids).astype(np.int32)

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": "byte"}

    def length(self, num_bytes: int) -> int:
        """Tokens of a document of `num_bytes` bytes."""
        return num_bytes + 2

    def encode(self, text: bytes | str) -> NDArray[np.int32]:
        """int32 [bytes + 2]: [bos, bytes..., eos]. A str is coded as UTF-8, lone surrogates as they are."""
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        return self.encode_span(lambda start, stop: raw[start:stop], len(raw), 0, len(raw) + 2)

    def encode_span(
        self, read: Callable[[int, int], bytes], num_bytes: int, start: int, stop: int
    ) -> NDArray[np.int32]:
        """int32 [stop - start]: tokens `start` to `stop` of a document of `num_bytes` bytes, the rest left unread.

        Args:
            read: gives bytes i to j of the document for (i, j).

        Raises:
            ValueError: a span outside the document's num_bytes + 2 tokens.
        """
        if not 0 <= start <= stop <= num_bytes + 2:
            raise ValueError(f"tokens {start}:{stop} are outside a document of {num_bytes + 2} tokens")
        out = np.empty(stop - start, np.int32)
        low, high = max(start - 1, 0), min(stop - 1, num_bytes)
        if low < high:
            out[low + 1 - start : high + 1 - start] = np.frombuffer(read(low, high), np.uint8)
        if start == 0 < stop:
            out[0] = self.bos
        if start < stop == num_bytes + 2:
            out[-1] = self.eos
        return out

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> bytes:
        """The bytes that `ids` stand for; bos and eos stand for none. ValueError for an id outside the vocabulary."""
        array = check_ids(ids, self.vocab_size)
        return array[array < self.byte_ids].astype(np.uint8).tobytes()


def check_ids(ids: Sequence[int] | NDArray[np.integer], vocab_size: int) -> NDArray[np.int64]:
    """`ids` as int64. ValueError for one outside the vocabulary."""
    array = np.asarray(ids, np.int64)
    bad = array[(array < 0) | (array >= vocab_size)]
    if bad.size:
        raise ValueError(f"token id {bad[0]} is outside the tokenizer's {vocab_size} ids")
    return array


def identity_text(tokenizer: Tokenizer) -> str:
    """The tokenizer's identity in one line, for fingerprints and messages."""
    return json.dumps(tokenizer.identity, sort_keys=True)


EOS_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[SEP]")
BOS_TOKENS = ("<|begin_of_text|>", "<s>", "<bos>", "<｜begin▁of▁sentence｜>", "[CLS]")


def frame_ids(special: dict[str, int], where: str, bos_token: str | None, eos_token: str | None) -> tuple[int, int]:
    """Ids that begin and end a document, of the special tokens {text: id}.

    A vocabulary without a token for the beginning, as GPT-2's and Qwen's, begins a document with the one that ends it:
    the separator between documents that these models were trained with.

    Raises:
        ValueError: a token that is not there, or no known token for the end.
    """
    shown = ", ".join(list(special)[:8]) or "none"
    for key, token in (("bos_token", bos_token), ("eos_token", eos_token)):
        if token is not None and token not in special:
            raise ValueError(f"data.{key}={token} is no special token of {where} (it has: {shown})")
    eos = eos_token or next((token for token in EOS_TOKENS if token in special), None)
    if eos is None:
        raise ValueError(
            f"{where} has no known token that ends a document (its special tokens: {shown}); set data.eos_token"
        )
    bos = bos_token or next((token for token in BOS_TOKENS if token in special), eos)
    return special[bos], special[eos]


def as_unicode(text: bytes | str) -> str:
    """Text for tokenizers of characters: bytes must be UTF-8; lone surrogates, which UTF-8 lacks, become U+FFFD.

    Raises:
        ValueError: bytes that are not UTF-8; says where.
    """
    if isinstance(text, str):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"byte {error.start} is not UTF-8, which this tokenizer needs; convert the text or use data.tokenizer=byte"
        ) from None
