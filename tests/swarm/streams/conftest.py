from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import uvloop
from support.p2p_pair import Ends, two

from fusion.swarm.transport import Stream


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose path leaves room for UNIX sockets, as pytest's own often does not."""
    with tempfile.TemporaryDirectory(prefix="p2p-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    """Two peers, the first connected to the second, for tests that end neither."""

    async def nothing(stream: Stream) -> None:
        raise AssertionError(f"nobody speaks {stream.protocol}")

    with (
        tempfile.TemporaryDirectory(prefix="p2p-") as path,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        stack = AsyncExitStack()
        yield Ends(runner, *runner.run(stack.enter_async_context(two(Path(path), "/fusion/none/1", nothing))))
        runner.run(stack.aclose())
