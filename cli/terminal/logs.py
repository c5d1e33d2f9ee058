"""Log lines on stderr, one line each, whatever other peers put into them and however often they make us write one."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

from cachetools import LRUCache

from fusion.swarm.printable import printable

BURST = 20  # lines of one kind (of one place in the code) at once
SECONDS_PER_LINE = 3.0  # after that
KINDS = 1024  # places in the code that are counted


def configure_logging(debug: bool) -> None:
    """Warnings, and with `debug` everything of ours."""
    if not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(Harmless("%(asctime)s %(levelname).1s %(message)s"))
        if not debug:
            handler.addFilter(RateLimit())
        logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("fusion").setLevel(logging.DEBUG if debug else logging.WARNING)


class Harmless(logging.Formatter):
    """What is not printable is replaced; line breaks stay only where a traceback has them."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), "\n" if record.exc_info else "")


class RateLimit(logging.Filter):
    """Of the lines that one place in the code writes, BURST at once and then one every SECONDS_PER_LINE: a stranger who
    is refused ten thousand times must not fill a disk. The next line that goes out says how many did not."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # (allowance, when it was that, lines left out since) of (file, line)
        self._kinds: LRUCache[tuple[str, int], tuple[float, float, int]] = LRUCache(KINDS)

    def filter(self, record: logging.LogRecord) -> bool:
        now, kind = self._clock(), (record.pathname, record.lineno)
        allowance, since, left_out = self._kinds.get(kind, (float(BURST), now, 0))
        allowance = min(float(BURST), allowance + (now - since) / SECONDS_PER_LINE)
        if allowance < 1:
            self._kinds[kind] = allowance, now, left_out + 1
            return False
        self._kinds[kind] = allowance - 1, now, 0
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more lines like this left out)", ()
        return True
