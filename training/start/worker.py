"""A rank that `training.start.supervise` started: its orders come on stdin, what became of it goes back over a pipe.

The parent holds the other end of stdin for as long as it lives. When that end closes, even by SIGKILL, the rank ends.
"""

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import pickle
import signal
import sys
import threading
import traceback

from training.outcome import PeerLost


def main() -> None:
    """Read (configuration, place, the user's command line) from stdin, train, report to the descriptor in argv[1]."""
    report = os.fdopen(int(sys.argv[1]), "w")
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)  # the parent asks a rank that hangs where it stands
    config, place, sys.argv = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux: also where this process is stopped
    logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.WARNING if place.rank else logging.INFO)
    try:
        from training.start.rank import run_rank  # loads torch

        outcome = run_rank(config, place)
        message = {"done": True, "step": outcome.step, "stopped_by": outcome.stopped_by, "folder": str(outcome.folder)}
    except BaseException as error:
        message = {
            "done": False,
            "kind": type(error).__name__,
            "text": str(error),
            "traceback": "".join(traceback.format_exception(error)),
            "refusal": isinstance(error, (ValueError, ArithmeticError, OSError)),
            "peer": isinstance(error, PeerLost),
        }
    print(json.dumps(message), file=report, flush=True)
    # an orderly end, so that W&B writes its last bytes; should it hang, the parent does not wait for long
    sys.exit(0 if message["done"] else 1)


def _end_with_parent() -> None:
    os.read(0, 1)  # unbuffered: a thread in sys.stdin would be in the way of an orderly end
    os._exit(1)


if __name__ == "__main__":
    main()
