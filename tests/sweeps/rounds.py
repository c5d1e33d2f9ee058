"""The rounds of a sweep, of which each should kill a peer, and their summary. Some rounds kill none: the stage has no owner at
that moment, or the answer is over first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from fusion.cli.terminal.output import percentile

Row = dict[str, Any]  # of one round: `killed`, `identical`, `stall_seconds`, ...
ROUNDS_PER_KILL = 3  # the most, over the whole sweep


async def until_killed(kills: int, one_round: Callable[[], Awaitable[Row]]) -> AsyncIterator[Row]:
    """Yield rounds until so many of them have killed a peer, or too many have not."""
    done = 0
    for _ in range(ROUNDS_PER_KILL * kills):
        if done == kills:
            return
        row = await one_round()
        done += bool(row["killed"])
        yield row


def summary(rows: Sequence[Row], asked: int) -> Row:
    """The summary of rounds that should kill `asked` times. `ok`: they did, and no answer differed in any round."""
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
