"""Makes commands that start real processes clean up when they end, also by SIGTERM, as from a time limit."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable


def end_as_if_interrupted() -> None:
    """Treat SIGTERM as SIGINT from now on: asyncio cancels its main task, other code gets KeyboardInterrupt. This holds also
    if SIGINT was ignored when the process started (`nohup`, `&` in a script)."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))


def interruptible(main: Callable[[], int]) -> int:
    """Run `main` and return its result. If it is interrupted or terminated: 130, and one line instead of a traceback."""
    end_as_if_interrupted()
    try:
        return main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
