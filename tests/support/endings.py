"""How commands that start real processes end: cleared up, also where they are asked by SIGTERM, as by a time limit."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable


def end_as_if_interrupted() -> None:
    """From now on SIGTERM is SIGINT, and that interrupts (asyncio cancels what it runs, elsewhere it is KeyboardInterrupt),
    also where it was ignored when we began (`nohup`, `&` in a script)."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))


def interruptible(main: Callable[[], int]) -> int:
    """What `main` returns; 130, and one line instead of a traceback, where it is interrupted or asked to end."""
    end_as_if_interrupted()
    try:
        return main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
