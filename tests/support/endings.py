"""How commands that start real processes end: cleared up, also where they are asked by SIGTERM, as by a time limit."""

from __future__ import annotations

import signal


def end_as_if_interrupted() -> None:
    """From now on SIGTERM and SIGINT both raise KeyboardInterrupt, also where SIGINT was ignored when we began (`nohup`,
    `&` in a script)."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
