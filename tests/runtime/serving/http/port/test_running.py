"""Connections that are hung up on, and those that are not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from openai import DEFAULT_CONNECTION_LIMITS
from support.instant_loop import run

from fusion.runtime.serving.http.port.running import (
    IDLE_SECONDS,
    SILENT_SECONDS,
    UNREAD_SECONDS,
    _Connection,
    _watch,
)


def test_no_connection_ends_while_a_client_may_use_it_again() -> None:
    kept = DEFAULT_CONNECTION_LIMITS.keepalive_expiry
    assert kept is not None and kept + 1 < IDLE_SECONDS < SILENT_SECONDS


@pytest.mark.parametrize("catches_up", [True, False])
def test_who_reads_a_byte_now_and_then_is_hung_up_on_and_who_catches_up_is_not(catches_up: bool) -> None:
    async def main() -> None:
        left, aborted = 1 << 20, asyncio.Event()

        def size() -> int:
            nonlocal left
            left -= 1
            return left

        connection = _Connection.__new__(_Connection)
        flow = SimpleNamespace(write_paused=True, resume_writing=lambda: None)
        transport = SimpleNamespace(get_write_buffer_size=size, abort=aborted.set)
        connection.flow, connection.transport, connection._read = flow, transport, 0  # type: ignore[assignment]
        server: Any = SimpleNamespace(server_state=SimpleNamespace(connections={connection}))
        watching = asyncio.create_task(_watch(server))
        for _ in range(4):
            await asyncio.sleep(UNREAD_SECONDS / 2)
            if catches_up:
                connection.resume_writing()
        assert aborted.is_set() is not catches_up
        watching.cancel()

    run(main())
