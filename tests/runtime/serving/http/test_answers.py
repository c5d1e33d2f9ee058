"""Answers side by side end as their reader does, whatever else happens to them meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, cast

import pytest

from fusion.runtime.serving.answers.gateway import Gateway
from fusion.runtime.serving.http import answers
from fusion.runtime.serving.http.errors import Busy
from fusion.runtime.serving.http.metrics import Metrics
from fusion.runtime.serving.requests.request import GenerateRequest, Piece
from fusion.swarm.transport import PeerId
from fusion.swarm.turns import Turn

ASKED = GenerateRequest(prompt_ids=(1,))


class _Gateway:
    """Answers without an end; an answer that is closed takes until `go` for it."""

    def __init__(self) -> None:
        self.places: list[Turn] = []
        self.given, self.left = 0, 0
        self.closing, self.go = asyncio.Event(), asyncio.Event()

    def admit(self, *_: object) -> Turn:
        self.places.append(asyncio.get_running_loop().create_future())
        return self.places[-1]

    def touch(self, turn: Turn) -> None:
        self.given += 1

    def release(self, turn: Turn, *, completed: bool) -> None:
        self.left += 1

    async def generate(self, *_: object, **__: object) -> AsyncGenerator[Piece, None]:
        try:
            while True:
                await asyncio.sleep(0)
                yield Piece(index=0, id=1, text="a")
        finally:
            self.closing.set()
            while not self.go.is_set():
                with suppress(asyncio.CancelledError):
                    await self.go.wait()


def of(gateway: _Gateway) -> AsyncGenerator[answers.Part]:
    return answers.parts(cast(Gateway, gateway), [ASKED], PeerId("http/one"), Metrics())


async def until_nothing_more_is_taken(gateway: _Gateway) -> None:
    before = -1
    while before != gateway.given:
        before = gateway.given
        for _ in range(10):
            await asyncio.sleep(0)


def run(case: Any) -> None:
    asyncio.run(asyncio.wait_for(case, 20))


def test_an_answer_that_gives_way_while_its_slow_reader_leaves_has_ended() -> None:
    async def main() -> None:
        gateway = _Gateway()
        parts = of(gateway)
        await anext(parts)
        await until_nothing_more_is_taken(gateway)
        leaving = asyncio.create_task(parts.aclose())
        await gateway.closing.wait()
        gateway.places[0].set_result(None)
        await asyncio.sleep(0)
        gateway.go.set()
        await leaving
        assert gateway.left == 1

    run(main())


def test_a_slow_reader_is_told_after_what_waits_for_it_that_its_answer_gave_way() -> None:
    async def main() -> None:
        gateway = _Gateway()
        gateway.go.set()
        parts = of(gateway)
        await anext(parts)
        await until_nothing_more_is_taken(gateway)
        assert gateway.given <= answers.WAITING_PARTS + 2
        gateway.places[0].set_result(None)
        read = 1
        with pytest.raises(Busy):
            async for _ in parts:
                read += 1
        assert read >= answers.WAITING_PARTS and gateway.left == 1

    run(main())
