"""Bytes to ids and back, whole and by span."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.tokenizers.table import TOKENIZERS
from data.tokenizers.tokenizer import ByteTokenizer

tokenizer = ByteTokenizer()


@given(st.binary(max_size=40))
def test_a_document_is_bos_its_bytes_and_eos(raw: bytes) -> None:
    ids = tokenizer.encode(raw)
    assert ids.tolist() == [256, *raw, 257]
    assert len(ids) == tokenizer.length(len(raw))
    assert tokenizer.decode(ids) == raw


@given(st.text(max_size=20))
def test_text_is_coded_as_utf8(text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text.encode("utf-8", "surrogatepass")


@given(st.binary(max_size=12), st.data())
def test_a_span_is_a_slice_of_the_whole_and_reads_no_other_bytes(raw: bytes, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(raw) + 2))
    stop = data.draw(st.integers(start, len(raw) + 2))
    read: list[int] = []

    def reader(low: int, high: int) -> bytes:
        read.extend(range(low, high))
        return raw[low:high]

    assert tokenizer.encode_span(reader, len(raw), start, stop).tolist() == [256, *raw, 257][start:stop]
    assert read == [i - 1 for i in range(start, stop) if 1 <= i <= len(raw)]


def test_bad_spans_and_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens 0:6 are outside a document of 5 tokens"):
        tokenizer.encode_span(lambda low, high: b"abc"[low:high], 3, 0, 6)
    for bad in (-1, 258):
        with pytest.raises(ValueError, match=f"token id {bad} is outside"):
            tokenizer.decode(np.array([5, bad]))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_tokenizer_stays_inside_its_vocabulary(name: str) -> None:
    each = TOKENIZERS[name]()
    ids = each.encode(bytes(range(256)))
    assert ids.min() >= 0 and ids.max() < each.vocab_size
    assert each.decode(ids) == bytes(range(256))
