"""What a user who leaves a job that trains is told of it."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace
from typing import Any

import pytest

from fusion.cli import train
from fusion.cli.terminal.output import Output


@pytest.mark.parametrize(("held", "said"), [(False, "the job may not go on"), (True, "the job goes on")])
def test_who_leaves_hears_whether_the_job_goes_on(
    held: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def until_held(*_: object) -> None:
        if not held:
            await asyncio.Event().wait()

    async def follow(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(train, "until_held", until_held)
    monkeypatch.setattr(train, "follow", follow)
    prepared: Any = SimpleNamespace(job="ab" * 32)
    context: Any = None
    stderr = io.StringIO()

    async def main() -> None:
        watching = asyncio.create_task(train._watch(context, prepared, Output(stderr=stderr)))
        for _ in range(5):
            await asyncio.sleep(0)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching

    asyncio.run(main())
    assert stderr.getvalue().startswith(said)
