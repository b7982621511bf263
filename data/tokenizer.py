"""Text to token ids. The byte tokenizer needs no vocabulary file and codes any bytes."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@runtime_checkable
class Tokenizer(Protocol):
    """What the sources ask of a tokenizer: the count of a document's tokens, and any span of them."""

    vocab_size: int
    byte_ids: int  # ids below this stand for exactly one byte of text each

    def length(self, num_bytes: int) -> int: ...

    def encode(self, text: bytes | str) -> NDArray[np.int32]: ...

    def encode_span(
        self, read: Callable[[int, int], bytes], num_bytes: int, start: int, stop: int
    ) -> NDArray[np.int32]: ...

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> bytes: ...


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 begins a document (bos), 257 ends it (eos).

    A document of n bytes has n + 2 tokens, [bos, bytes..., eos], and n of its n + 1 predicted tokens are bytes.
    """

    bos = 256
    eos = 257
    vocab_size = 258
    byte_ids = 256

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
        array = np.asarray(ids, np.int64)
        bad = array[(array < 0) | (array >= self.vocab_size)]
        if bad.size:
            raise ValueError(f"token id {bad[0]} is outside the tokenizer's {self.vocab_size} ids")
        return array[array < self.byte_ids].astype(np.uint8).tobytes()


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"byte": ByteTokenizer}
