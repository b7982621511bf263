"""Plans made ahead, on a thread, while the previous step runs; kept by the layout's hash; the same on every rank."""

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Key = TypeVar("Key")
Made = TypeVar("Made")


class Ahead(Generic[Key, Made]):
    """Results of `make(key)`, asked for early by `prepare` and taken by `get`; the last `keep` stay.

    Attributes:
        exposed_s: seconds that `get` has waited, since it was last set to 0.
    """

    def __init__(self, make: Callable[[Key], Made], keep: int = 64) -> None:
        self._make, self._keep = make, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="planner")
        self._made: OrderedDict[Key, Future[Made]] = OrderedDict()
        self.exposed_s = 0.0

    def prepare(self, key: Key) -> None:
        """Begin to make `key`'s result, unless it is there or on its way."""
        if key in self._made:
            self._made.move_to_end(key)
            return
        self._made[key] = self._thread.submit(self._make, key)
        while len(self._made) > self._keep:
            self._made.popitem(last=False)

    def get(self, key: Key) -> Made:
        """The result, waited for if need be. Raises what `make` raised, each time it is asked for."""
        began = time.perf_counter()
        self.prepare(key)
        try:
            return self._made[key].result()
        finally:
            self.exposed_s += time.perf_counter() - began
