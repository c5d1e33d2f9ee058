from __future__ import annotations

import asyncio

from fusion.swarm.streams.p2pd_control import _Answering, _Waiting


def test_a_call_that_was_given_up_takes_no_answer() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        calls = _Waiting()
        calls["asked"], calls["given up"] = loop.create_future(), loop.create_future()
        calls["given up"].cancel()  # and its caller, who would take it away, has not had a turn yet
        assert [name for name in ("asked", "given up", "never asked") if name in calls] == ["asked"]
        assert calls.pop("given up", None) is not None

    asyncio.run(main())


def test_a_call_that_its_caller_took_back_is_not_kept() -> None:
    async def answered_and_taken_back() -> None:
        answering = _Answering()

        async def answer(call: int) -> None:
            answering.pop(call)  # as hivemind does at the end of an answer

        for call in range(3):
            answering[call] = asyncio.create_task(answer(call))
        answering[1].cancel()  # before it had its turn
        assert len(answering) == 3
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not answering

    asyncio.run(answered_and_taken_back())
