"""A peer whose stages lie: `fusion-peer` with one function replaced by another.

    python tests/support/lying_peer.py LIE <the command of a peer>

LIE is "fails" (every step from the fifth on raises), "nan" (from then on its norm is NaN, and it reports that it received
numbers that are not finite), "noise" (the same, but only at the fifth step), "shards" (it saves blobs without a state for all
stages but the first), or "lead-shard" (for the first).
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

FROM_STEP = 5


def install(lie: str) -> None:
    if lie in ("shards", "lead-shard"):
        save_no_state(leading=lie == "lead-shard")
    else:
        report_lies(lie)


def save_no_state(*, leading: bool) -> None:
    from fusion.runtime.training.snapshots.stage_files import StageFiles

    honest = StageFiles.save

    async def save(self: Any, version: Any, state: Any) -> Any:
        if (self._stage.index == 0) == leading:
            return await self.put(b"no state at all")
        return await honest(self, version, state)

    StageFiles.save = save  # type: ignore[method-assign]


def report_lies(lie: str) -> None:
    from fusion.runtime.training.compute.rad import Rad
    from fusion.runtime.training.step.faults import RECEIVED

    honest = Rad.step
    told = 0

    async def step(self: Any, attempt: Any, step: int, *, look: bool = False) -> Any:
        nonlocal told
        if step >= FROM_STEP and lie == "fails":
            raise RuntimeError("made up")
        ready = await honest(self, attempt, step, look=look)
        if step < FROM_STEP or (lie == "noise" and told):
            return ready
        told += 1
        return replace(ready, squared_norm=math.nan, not_finite=(RECEIVED,) if look else ())

    Rad.step = step  # type: ignore[method-assign]


def main() -> int:
    lie = sys.argv[1]
    sys.argv = ["fusion-peer", *sys.argv[sys.argv.index("fusion.cli.main") + 1 :]]
    install(lie)
    from fusion.cli.main import main as fusion_peer

    return fusion_peer()


if __name__ == "__main__":
    sys.exit(main())
