"""A peer that can be killed at an exact instant: `fusion-peer start` with traps at the points that the sweeps name.

    python tests/sweeps/armed.py start --home HOME ...

While it runs, a file HOME/arm.json sets one trap: {"phase", "count", "side", "delay", "victim"}. At the `count`-th time that
the phase is reached, `side` ("before" or "after") of its call, and `delay` seconds later, the process `victim` (0: this one)
is killed with SIGKILL. The last line that is printed is {"event": "fired"}. An empty phase removes the trap.

    fp bp        the forward, the backward pass of a microbatch
    ready        a stage sends `ready` to the lead; at the lead: it receives one
    commit       the lead sends `commit` to the k-th stage; at the others: the update of the weights
    snapshot     a shard is written; a copy is fetched from the neighbour
    recovery     the gradients of the running step are dropped
    takeover     a stage begins here

With FUSION_SWEEP_READ_SECONDS in its environment the disk is slow: reading a microbatch takes at least so long.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.02
FILE = "arm.json"
READ_SECONDS = "FUSION_SWEEP_READ_SECONDS"


class Trap:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set: dict[str, Any] = {}

    def arm(self, order: dict[str, Any]) -> None:
        with self._lock:
            self._set = order

    def at(self, phase: str, side: str) -> None:
        """Report that the process has reached this point."""
        with self._lock:
            order = self._set
            if order.get("phase") != phase or order.get("side") != side:
                return
            order["count"] -= 1
            if order["count"] > 0:
                return
            self._set = {}
        if order["delay"] > 0:
            timer = threading.Timer(order["delay"], self._fire, (order,))
            timer.daemon = True
            timer.start()
        else:
            self._fire(order)

    def _fire(self, order: dict[str, Any]) -> None:
        victim = order["victim"] or os.getpid()
        line = {
            "event": "fired",
            "at": time.time(),
            "phase": order["phase"],
            "id": order["id"],
            "victim": victim,
        }
        os.write(1, b"\n" + json.dumps(line).encode() + b"\n")
        os.kill(victim, signal.SIGKILL)

    def watch(self, home: Path) -> None:
        path = home / FILE
        while True:
            time.sleep(POLL_SECONDS)
            try:
                order = json.loads(path.read_bytes())
            except (OSError, ValueError):
                continue
            self.arm(order)
            path.unlink(missing_ok=True)


TRAP = Trap()


def wrap(owner: Any, name: str, phase: str, when: Callable[..., bool] = lambda *_, **__: True) -> None:
    """Report to the trap before and after each call of `owner.name` for which `when` is true."""
    inner = getattr(owner, name)
    if inspect.iscoroutinefunction(inner):

        @functools.wraps(inner)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            if not when(*args, **kwargs):
                return await inner(*args, **kwargs)
            TRAP.at(phase, "before")
            try:
                return await inner(*args, **kwargs)
            finally:
                TRAP.at(phase, "after")

        setattr(owner, name, awaited)
        return

    @functools.wraps(inner)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not when(*args, **kwargs):
            return inner(*args, **kwargs)
        TRAP.at(phase, "before")
        try:
            return inner(*args, **kwargs)
        finally:
            TRAP.at(phase, "after")

    setattr(owner, name, called)


def install() -> None:
    from fusion.runtime.planes.torch_plane import TorchTrainingStage
    from fusion.runtime.training.lead.lead import Lead
    from fusion.runtime.training.service import TrainingService
    from fusion.runtime.training.snapshots.stage_files import StageFiles
    from fusion.runtime.training.step import messages as m
    from fusion.swarm.streams.striping import StripedStream

    wrap(TorchTrainingStage, "forward", "fp")
    wrap(TorchTrainingStage, "backward", "bp")
    wrap(TorchTrainingStage, "apply", "commit")
    wrap(TorchTrainingStage, "discard", "recovery")
    wrap(StripedStream, "send", "ready", lambda _, kind, *__, **___: kind == "ready")
    wrap(StripedStream, "send", "commit-sent", lambda _, kind, *__, **___: kind == "commit")
    wrap(Lead, "receive", "ready", lambda _, __, message: isinstance(message, m.Ready))
    wrap(StageFiles, "save", "snapshot")
    wrap(StageFiles, "replicate", "snapshot")
    wrap(TrainingService, "host", "takeover")


def slow_disk(seconds: float) -> None:
    from fusion.runtime.training.data.batches import Batches

    inner = Batches.read

    @functools.wraps(inner)
    def read(batches: Batches, indices: list[int]) -> Any:
        time.sleep(seconds)
        return inner(batches, indices)

    Batches.read = read  # type: ignore[method-assign]


def main() -> int:
    home = Path(sys.argv[sys.argv.index("--home") + 1])
    install()
    slow_disk(float(os.environ.get(READ_SECONDS, 0.0)))
    threading.Thread(target=TRAP.watch, args=(home,), name="trap", daemon=True).start()
    from fusion.cli.main import main as fusion_peer

    return fusion_peer()


if __name__ == "__main__":
    sys.exit(main())
