from __future__ import annotations

import asyncio

from fusion.swarm.streams.p2pd_control import _Waiting


def test_a_call_that_was_given_up_takes_no_answer() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        calls = _Waiting()
        calls["asked"], calls["given up"] = loop.create_future(), loop.create_future()
        calls["given up"].cancel()  # and its caller, who would take it away, has not had a turn yet
        assert [name for name in ("asked", "given up", "never asked") if name in calls] == ["asked"]
        assert calls.pop("given up", None) is not None

    asyncio.run(main())
