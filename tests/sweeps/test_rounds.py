from __future__ import annotations

import asyncio
from collections.abc import Iterable

from sweeps.rounds import ROUNDS_PER_KILL, Row, summary, until_killed


def row(*, killed: bool = True, identical: bool = True, stall: float = 0.1) -> Row:
    return {"killed": killed, "identical": identical, "stall_seconds": [stall]}


def played(kills: int, rows: Iterable[Row]) -> list[Row]:
    async def scenario() -> list[Row]:
        left = iter(rows)

        async def one_round() -> Row:
            return next(left)

        return [row async for row in until_killed(kills, one_round)]

    return asyncio.run(scenario())


def test_rounds_that_kill_nobody_are_made_up_for() -> None:
    rows = [row(), row(killed=False, stall=9.0), row(killed=False), row(), row()]
    assert played(2, rows) == rows[:4]
    found = summary(rows[:4], 2)
    assert (found["ok"], found["kills"], found["rounds_without_kill"], found["identical"]) == (True, 2, 2, 2)
    assert found["stall_max_seconds"] == 0.1, "a round without a kill says nothing about stalls"


def test_the_rounds_end_where_nobody_can_be_killed() -> None:
    rows = played(2, [row(killed=False)] * 100)
    assert len(rows) == 2 * ROUNDS_PER_KILL
    assert not summary(rows, 2)["ok"]


def test_another_answer_is_never_ok() -> None:
    assert not summary([row(), row(identical=False)], 2)["ok"]
    assert not summary([row(), row(), row(killed=False, identical=False)], 2)["ok"]


def test_no_kills_asked_for() -> None:
    assert played(0, []) == []
    assert summary([], 0) == {
        "ok": True, "kills": 0, "rounds_without_kill": 0, "identical": 0,
        "stall_p50_seconds": None, "stall_p95_seconds": None, "stall_max_seconds": None,
    }  # fmt: skip
