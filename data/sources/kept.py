"""Things kept for when they are asked for again, up to a number of bytes: the least lately used goes first."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

OVERHEAD = 200  # bytes that a thing costs beside what it counts itself


class Kept(Generic[Key, Value]):
    """Values by key, of `limit` bytes in all; the newest stays even where it alone is larger.

    Args:
        limit: bytes.
        dropped: called with the key and value of what goes.
    """

    def __init__(self, limit: int, dropped: Callable[[Key, Value], None] | None = None) -> None:
        self.limit, self.bytes = limit, 0
        self._dropped = dropped
        self._held: OrderedDict[Key, tuple[Value, int]] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._held)

    def get(self, key: Key, make: Callable[[], tuple[Value, int]]) -> Value:
        """The value of `key`; where it is not kept, what `make()` gives, with its bytes."""
        if key not in self._held:
            value, size = make()
            self._held[key] = value, size + OVERHEAD
            self.bytes += size + OVERHEAD
        self._held.move_to_end(key)
        self._trim()
        return self._held[key][0]

    def grow(self, key: Key, more: int) -> None:
        """The value of `key` has come to hold `more` bytes."""
        value, size = self._held[key]
        self._held[key] = value, size + more
        self.bytes += more
        self._held.move_to_end(key)
        self._trim()

    def _trim(self) -> None:
        while self.bytes > self.limit and len(self._held) > 1:
            key, (value, size) = self._held.popitem(last=False)
            self.bytes -= size
            if self._dropped is not None:
                self._dropped(key, value)
