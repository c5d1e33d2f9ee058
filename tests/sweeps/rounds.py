"""Rounds of a sweep that are to kill somebody each, and what came of them. Now and then one kills nobody: the stage has no
owner just then, or the answer is over first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from fusion.cli.terminal.output import percentile

Row = dict[str, Any]  # of one round: `killed`, `identical`, `stall_seconds`, ...
ROUNDS_PER_KILL = 3  # at most, over the whole sweep


async def until_killed(kills: int, one_round: Callable[[], Awaitable[Row]]) -> AsyncIterator[Row]:
    """Rounds until so many of them killed somebody, or too many did not."""
    done = 0
    for _ in range(ROUNDS_PER_KILL * kills):
        if done == kills:
            return
        row = await one_round()
        done += bool(row["killed"])
        yield row


def summary(rows: Sequence[Row], asked: int) -> Row:
    """What came of the rounds that were to kill `asked` times. `ok`: they did, and no answer differed in any round."""
    killed = [row for row in rows if row["killed"]]
    stalls = [stall for row in killed for stall in row["stall_seconds"]]
    return {
        "ok": len(killed) == asked and all(row["identical"] for row in rows),
        "kills": len(killed),
        "rounds_without_kill": len(rows) - len(killed),
        "identical": sum(row["identical"] for row in killed),
        "stall_p50_seconds": percentile(stalls, 0.5),
        "stall_p95_seconds": percentile(stalls, 0.95),
        "stall_max_seconds": max(stalls, default=None),
    }
