"""Plans made ahead, on a thread, while the previous step runs; kept by the layout's hash; the same on every rank."""

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import numpy as np

Key = TypeVar("Key")
Made = TypeVar("Made")
LIMIT = 256 << 20  # bytes of plans kept


class Ahead(Generic[Key, Made]):
    """Results of `make(key)`, asked for early by `prepare` and taken by `get`; the last `keep` stay, or fewer where
    they hold more than `limit` bytes. One that has gone is made again.

    Attributes:
        exposed_s: seconds that `get` has waited, since it was last set to 0.
    """

    def __init__(self, make: Callable[[Key], Made], keep: int = 64, limit: int = LIMIT) -> None:
        self._make, self._keep, self._limit = make, keep, limit
        self._sizes: dict[Key, int] = {}  # bytes of those that are made
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="planner")
        self._made: OrderedDict[Key, Future[Made]] = OrderedDict()
        self.exposed_s = 0.0

    def prepare(self, key: Key) -> None:
        """Begin to make `key`'s result, unless it is there or on its way."""
        if key in self._made:
            self._made.move_to_end(key)
            return
        self._made[key] = self._thread.submit(self._measured, key)
        while len(self._made) > self._keep or (sum(list(self._sizes.values())) > self._limit and len(self._made) > 1):
            oldest, _ = self._made.popitem(last=False)
            self._sizes.pop(oldest, None)

    def _measured(self, key: Key) -> Made:
        made = self._make(key)
        size = footprint(made)
        if key in self._made:
            self._sizes[key] = size
        return made

    def get(self, key: Key) -> Made:
        """The result, waited for if need be. Raises what `make` raised, each time it is asked for."""
        began = time.perf_counter()
        self.prepare(key)
        try:
            return self._made[key].result()
        finally:
            self.exposed_s += time.perf_counter() - began


def footprint(value: Any) -> int:
    """Bytes that plain data and the arrays in it hold, about; what is shared counts once."""
    seen: set[int] = set()
    waiting, total = [value], 0
    while waiting:
        one = waiting.pop()
        if id(one) in seen or one is None or isinstance(one, (bool, Enum, type)):
            continue
        seen.add(id(one))
        total += 64
        if isinstance(one, np.ndarray):
            total += one.nbytes
        elif isinstance(one, (str, bytes)):
            total += len(one)
        elif isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, (tuple, list, set, frozenset)):
            waiting += one
        elif is_dataclass(one):
            waiting += [getattr(one, field.name) for field in fields(one)]
    return total
