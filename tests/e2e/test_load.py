"""Many clients at once over HTTP on two real peers, a stage each: every answer has the tokens that it has alone, whoever else
asks, vanishes or reads nothing, and nothing stays behind. The same with more clients and for longer:
`python tests/bench/serve_load.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import isfinite
from typing import Any

import pytest
from bench.serving.load import abused, overcommitted, steady, vanishing
from bench.serving.load_site import Site, open_site

pytestmark = pytest.mark.e2e

CLIENTS, SECONDS = 8, 1.5
LENT_SESSIONS, LONG_ANSWERS = 1.0, 8


def on_a_site(work: Callable[[Site], Awaitable[None]], lent_sessions: float | None = None) -> None:
    async def main() -> None:
        async with open_site(lent_sessions) as site:
            await work(site)

    asyncio.run(main())


def check_answers(found: dict[str, Any]) -> None:
    assert found["errors"] == [] and found["error_count"] == 0
    assert found["wrong"] == 0 and found["busy_without_retry"] == 0
    assert found["answers"] > 0 and isfinite(found["freed_seconds"])


def test_answers_are_right_whoever_else_asks_and_nothing_stays(traces: str) -> None:
    async def work(site: Site) -> None:
        check_answers(await steady(site, CLIENTS, SECONDS, settle_seconds=0.0))
        vanished = await vanishing(site, CLIENTS)
        assert vanished["errors"] == [] and vanished["started"] == CLIENTS
        assert vanished["sessions"] >= CLIENTS, "their answers were under way"
        assert isfinite(vanished["freed_seconds"])
        check_answers(await abused(site, CLIENTS, SECONDS))

    on_a_site(work)


@pytest.mark.slow
def test_more_answers_than_there_is_memory_for_are_given_all_the_same(traces: str) -> None:
    async def work(site: Site) -> None:
        found = await overcommitted(site, LONG_ANSWERS)
        check_answers(found)
        assert found["answers"] == LONG_ANSWERS

    on_a_site(work, LENT_SESSIONS)
