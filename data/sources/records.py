"""One record, of JSON lines, parquet or the hub, as a document's token ids: its text coded, or ids made beforehand."""

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.tokenizers.tokenizer import Tokenizer

TOKENS_KEY = "tokens"


class Records:
    """Codes records with one tokenizer; `text_key` is tried first, then "tokens".

    Args:
        vocab_size: ids that the model knows; documents tokenised beforehand may hold no others.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, text_key: str) -> None:
        self.tokenizer, self._vocab_size, self.text_key = tokenizer, vocab_size, text_key

    def ids(self, record: dict[str, Any], where: str) -> tuple[NDArray[np.int32], bool]:
        """The document's ids, and whether they were made from text here. ValueError names `where`."""
        if self.text_key in record:
            text = record[self.text_key]
            if not isinstance(text, str):
                raise ValueError(f"{where}: {self.text_key!r} holds {type(text).__name__}, expected text")
            return self.encode(text, where), True
        if TOKENS_KEY in record:
            return self._check_ids(record[TOKENS_KEY], where), False
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        raise ValueError(
            f"{where}: has neither {self.text_key!r} nor {TOKENS_KEY!r} (its keys: {keys}); set data.text_key"
        )

    def kept(self, record: dict[str, Any]) -> dict[str, Any]:
        """What `ids` reads of a record; all of one that it will refuse, so that the refusal can list its keys."""
        return {key: record[key] for key in (self.text_key, TOKENS_KEY) if key in record} or record

    def json_ids(self, raw: bytes, where: str) -> tuple[NDArray[np.int32], bool]:
        """`ids` of one JSON line."""
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, nesting without end
            raise ValueError(f"{where}: not a JSON object ({error})") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where}: expected a JSON object, found {type(record).__name__}")
        return self.ids(record, where)

    def encode(self, text: bytes | str, where: str) -> NDArray[np.int32]:
        """The ids of a whole text. ValueError names `where`."""
        try:
            return self.tokenizer.encode(text)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    def column(self, names: list[str], where: str) -> str:
        """Of a table's columns, the one that holds documents. ValueError lists those that are there."""
        for key in (self.text_key, TOKENS_KEY):
            if names.count(key) > 1:
                raise ValueError(f"{where} has {names.count(key)} columns {key!r}; rename all but one")
            if key in names:
                return key
        shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        raise ValueError(
            f"{where} has no column {self.text_key!r} or {TOKENS_KEY!r}; its columns are {shown or 'none'}: set "
            "data.text_key"
        )

    def _check_ids(self, ids: Any, where: str) -> NDArray[np.int32]:
        array = np.asarray(ids) if isinstance(ids, (list, np.ndarray)) else np.empty(0)
        of_integers = isinstance(ids, np.ndarray) or (isinstance(ids, list) and all(type(i) is int for i in ids))
        if not array.size or not of_integers or array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"{where}: {TOKENS_KEY!r} must be a list of at least one integer")
        for bad in (int(array.min()), int(array.max())):
            if not 0 <= bad < self._vocab_size:
                raise ValueError(
                    f"{where}: token id {bad} is outside the model's {self._vocab_size} ids; "
                    "raise model.vocab_size or tokenise the text again"
                )
        return array.astype(np.int32)
