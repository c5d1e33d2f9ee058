"""Measures round trips and goodput between two hosts of a box, with `flow.py` on both."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from box.network import Box

FLOW = (sys.executable, "-IS", str(Path(__file__).with_name("flow.py")))
ROUND_TRIPS = 30


@contextmanager
def server(box: Box, host: str) -> Iterator[str]:
    """The port at which `host` runs the server of `flow.py`."""
    pipe = subprocess.PIPE
    with box.run(host, [*FLOW, "serve", box.address(host)], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def rtt_ms(box: Box, source: str, target: str, count: int = ROUND_TRIPS) -> float:
    """The median round trip of one byte over an open TCP connection, in milliseconds."""
    with server(box, target) as port:
        said = _output(box, source, "rtt", box.address(target), port, str(count))
    return 1e3 * float(statistics.median(json.loads(said)))


def goodput_mbps(box: Box, pairs: Sequence[tuple[str, str]], seconds: float) -> float:
    """The total goodput of TCP connections, one for each pair and all at once, in megabits a second. They send for so many
    seconds; the time is that from the first byte to the last at the receivers, slow start included."""
    with ExitStack() as stack:
        ports = {target: stack.enter_context(server(box, target)) for target in {b for _, b in pairs}}
        senders = [
            box.run(
                source,
                [*FLOW, "send", box.address(target), ports[target], str(seconds)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for source, target in pairs
        ]
        said = [json.loads(sender.communicate()[0]) for sender in senders]
    # One machine, one clock.
    seconds = max(float(each["ended"]) for each in said) - min(float(each["began"]) for each in said)
    return 8e-6 * sum(int(each["bytes"]) for each in said) / seconds


def _output(box: Box, host: str, *arguments: str) -> str:
    with box.run(host, [*FLOW, *arguments], stdout=subprocess.PIPE, text=True) as process:
        return str(process.communicate()[0])
