"""One record, of JSON lines, parquet or the hub, as a document's token ids: its text coded, or ids made beforehand.

Of a prompt and an answer, or of a chat, the ids of what is not to be predicted are marked (`data.sources.marks`).
"""

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.config import SourceConfig
from data.sources.marks import marked
from data.tokenizers.tokenizer import Tokenizer

TOKENS_KEY = "tokens"
TRAINED_ROLE = "assistant"


class Records:
    """Codes records with one tokenizer; `text_key` is tried first, then "tokens".

    Args:
        vocab_size: ids that the model knows; documents tokenised beforehand may hold no others.
        prompt_key: of text that comes before `text_key`'s and is not predicted; a record must have both.
        messages_key: of a chat, which a record must have instead of a text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        text_key: str,
        prompt_key: str | None = None,
        messages_key: str | None = None,
    ) -> None:
        self.tokenizer, self._vocab_size, self.text_key = tokenizer, vocab_size, text_key
        self.prompt_key, self.messages_key = prompt_key, messages_key

    @classmethod
    def of(cls, config: SourceConfig, tokenizer: Tokenizer, vocab_size: int) -> "Records":
        """By the keys of a source's configuration."""
        return cls(tokenizer, vocab_size, config.text_key, config.prompt_key, config.messages_key)

    @property
    def marks(self) -> bool:
        """Whether some ids are marked as not to be predicted."""
        return self.prompt_key is not None or self.messages_key is not None

    @property
    def needed(self) -> list[str]:
        """The keys that every record must have; none where it may have a text or ids."""
        if self.messages_key is not None:
            return [self.messages_key]
        return [] if self.prompt_key is None else [self.prompt_key, self.text_key]

    def ids(self, record: dict[str, Any], where: str) -> tuple[NDArray[np.int32], bool]:
        """The document's ids, and whether they were made from text here. ValueError names `where`."""
        if self.marks:
            return self._parts_ids(self._parts(record, where), where), True
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
        keys = self.needed or (self.text_key, TOKENS_KEY)
        return {key: record[key] for key in keys if key in record} or record

    def _parts(self, record: dict[str, Any], where: str) -> list[tuple[str, bool]]:
        """The texts of a document in order, each with whether it is to be predicted."""
        for key in self.needed:
            if key not in record:
                keys = ", ".join(map(repr, list(record)[:8])) or "none"
                which = "messages_key" if self.messages_key is not None else "prompt_key or data.text_key"
                raise ValueError(f"{where}: has no {key!r} (its keys: {keys}); set data.{which}")
        if self.messages_key is not None:
            return self._messages(record[self.messages_key], where)
        for key in self.needed:
            if not isinstance(record[key], str):
                raise ValueError(f"{where}: {key!r} holds {type(record[key]).__name__}, expected text")
        return [(record[key], key == self.text_key) for key in self.needed]

    def _messages(self, messages: Any, where: str) -> list[tuple[str, bool]]:
        """A chat as text: each message is a line with its role, its content, and the end of a line."""
        parts: list[tuple[str, bool]] = []
        if isinstance(messages, np.ndarray):
            messages = messages.tolist()
        for number, message in enumerate(messages if isinstance(messages, list) else [None]):
            role, content = (message.get(key) if isinstance(message, dict) else None for key in ("role", "content"))
            if not isinstance(role, str) or not isinstance(content, str):
                raise ValueError(
                    f"{where}: message {number} of {self.messages_key!r} must be {{'role': text, 'content': text}}"
                )
            parts += [(f"{role}\n", False), (f"{content}\n", role == TRAINED_ROLE)]
        if not any(is_trained for _, is_trained in parts):
            raise ValueError(
                f"{where}: {self.messages_key!r} has no message of the role {TRAINED_ROLE!r}, and nothing would be "
                "trained; leave the record out"
            )
        return parts

    def _parts_ids(self, parts: list[tuple[str, bool]], where: str) -> NDArray[np.int32]:
        """[begin, texts, end], each text coded on its own; the end is predicted where the last text is."""
        found: list[NDArray[np.int32]] = []
        for number, (text, is_trained) in enumerate(parts):
            ids = self.encode(text, where)  # [begin, text, end]
            ids = ids[min(number, 1) : None if number == len(parts) - 1 else -1]
            found.append(ids if is_trained else marked(ids))
        return np.concatenate(found)

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
        return self.columns(names, where)[-1]

    def columns(self, names: list[str], where: str) -> list[str]:
        """Of a table's columns, those that hold documents: one, or a prompt's and an answer's."""
        for key in self.needed:
            self._column([key], names, where)
        return self.needed or [self._column([self.text_key, TOKENS_KEY], names, where)]

    def _column(self, keys: list[str], names: list[str], where: str) -> str:
        for key in keys:
            if names.count(key) > 1:
                raise ValueError(f"{where} has {names.count(key)} columns {key!r}; rename all but one")
            if key in names:
                return key
        shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        which = "messages_key" if self.messages_key else "prompt_key or data.text_key" if self.marks else "text_key"
        raise ValueError(
            f"{where} has no column {' or '.join(map(repr, keys))}; its columns are {shown or 'none'}: set data.{which}"
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
