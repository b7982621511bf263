"""SIGINT and SIGTERM as a request: finish the step, save, leave."""

import signal
import threading
from types import FrameType


class StopRequest:
    """A context manager; `reason` names the first signal received. A second signal interrupts at once."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._previous: dict[int, signal._HANDLER] = {}

    @property
    def number(self) -> int:
        """The signal's number; 0 while there was none."""
        return signal.Signals[self.reason].value if self.reason else 0

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name
