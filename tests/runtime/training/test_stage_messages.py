"""What waits at a stage for its turn."""

from __future__ import annotations

import asyncio

import pytest

from fusion.runtime.training.stage_messages import MOST_WAITING, Mailbox
from fusion.runtime.training.step import messages as m
from fusion.swarm.errors import StaleTerm


def test_a_stage_that_says_more_than_can_be_dealt_with_is_not_heard_further() -> None:
    async def main() -> None:
        mailbox, said = Mailbox(0), m.Shard(step=1, digest="a" * 64)
        for _ in range(MOST_WAITING):
            mailbox.receive(1, said)
        with pytest.raises(StaleTerm, match="1024 messages of stage 1 wait already"):
            mailbox.receive(1, said)
        mailbox.receive(2, said)  # the others are
        mailbox.put(said)
        assert await mailbox.get() == (1, said)
        mailbox.receive(1, said)

    asyncio.run(main())
