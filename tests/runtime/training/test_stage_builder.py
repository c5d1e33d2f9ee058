from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from fusion.runtime.training.stage_builder import StageBuilder
from fusion.runtime.training.step.checkpoint import Checkpoint
from fusion.swarm.directory.records import Digest
from fusion.swarm.errors import BlobError, QuotaExceeded, SwarmError
from fusion.swarm.transport import PeerId


@pytest.mark.parametrize(
    ("trouble", "tried"), [(BlobError("nobody has it"), [4, 0]), (QuotaExceeded("the disk is full"), [4])]
)
def test_whose_disk_is_full_does_not_begin_a_stage_anew(trouble: SwarmError, tried: list[int]) -> None:
    """All would have to go back to where it begins."""
    loads: list[int] = []

    async def load(checkpoint: Checkpoint, near: Mapping[int, PeerId]) -> None:
        loads.append(checkpoint.step)
        raise trouble

    nothing: Any = None
    stage = SimpleNamespace(stage=SimpleNamespace(index=1))
    parts: Any = SimpleNamespace(files=SimpleNamespace(load=load), near={}, plan=stage)
    with pytest.raises(type(trouble)):
        asyncio.run(StageBuilder(nothing, nothing).resume(parts, Checkpoint(step=4, digest=Digest("a" * 64))))
    assert loads == tried
