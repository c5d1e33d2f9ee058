"""Two peers measure a slow link between them that is not the same both ways, and see it cut while they use it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from box import kernel
from box.network import Box
from box.spec import Host, Link, NetworkSpec
from support.stolen import MOST_STOLEN, Stolen

REASON = kernel.unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.skipif(bool(REASON), reason=REASON)]
CHILD = Path(__file__).parents[1] / "support" / "links_child.py"
NETWORK = NetworkSpec(
    hosts=(Host(name="a", up_mbps=20), Host(name="b", up_mbps=8)), default=Link(rate_mbps=200, delay_ms=10)
)
SECONDS = 60.0  # in which other machines leave us our cores


class Child:
    """A process with links on a host of the box; `told` is the last that it printed of them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None and process.stdin is not None
        self.told: dict[str, Any] = {}
        self._process = process
        self.address = process.stdout.readline().strip()
        self.peer = self.address.rpartition("/")[2]
        threading.Thread(target=self._listen, daemon=True).start()

    def say(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()

    def to(self, other: Child) -> float:
        return float(self.told.get("to", {}).get(other.peer, 0.0))

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with suppress(ValueError):  # closed under us: that is the end
            for line in self._process.stdout:
                self.told = json.loads(line)


@contextmanager
def child(box: Box, host: str, place: Path) -> Iterator[Child]:
    place.mkdir()
    command = [sys.executable, str(CHILD), str(place), box.listen(host)]
    pipe = subprocess.PIPE
    with box.run(host, command, stdin=pipe, stdout=pipe, text=True) as process:
        yield Child(process)
        assert process.stdin is not None
        process.stdin.close()


def until(holds: Callable[[], bool], what: Callable[[], object]) -> None:
    left = SECONDS
    while not holds():
        assert left > 0, what()
        others, began = Stolen(), time.monotonic()
        time.sleep(0.5)
        if others.share() <= MOST_STOLEN:
            left -= time.monotonic() - began


def test_a_link_and_the_lines_at_its_ends_are_measured_and_a_cut_is_noticed(tmp_path: Path) -> None:
    with Box(NETWORK) as box, ExitStack() as stack:
        a, b = (stack.enter_context(child(box, host, tmp_path / host)) for host in ("a", "b"))
        b.say(f"join {a.address}")
        a.say(f"meet {b.peer}")

        def right() -> bool:
            found = (a.to(b) / 20, b.to(a) / 8, a.told.get("up", 0) / 20, b.told.get("up", 0) / 8,
                     a.told.get("down", 0) / 8, b.told.get("down", 0) / 20)  # fmt: skip
            return all(0.8 <= share <= 1.2 for share in found)

        until(right, lambda: (a.told, b.told))
        a.say(f"send {b.peer}")
        box.set_link("a", "b", rate_mbps=2)

        def noticed() -> bool:
            return max(a.to(b), a.told["up"], b.told["down"]) < 5 and b.to(a) > 6

        until(noticed, lambda: (a.told, b.told))
