"""Many clients at once against real peers: the answers that they get, and what is left behind.

Each function is one kind of load on a `Site` and gives figures; whether they are good enough says `load_rows`. A client has
an address of its own in 127.0.0.0/8, by which peers tell clients apart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.serving.answer_times import Timed, percentile
from bench.serving.http_answer import Busy, HttpAnswer, Refused, asking
from bench.serving.load_site import MODEL, Question, Site

MOST_TOLD = 10  # of what went wrong
REST_SECONDS = 10.0  # for sessions to be freed when nobody asks any more
SETTLE_SECONDS = 3.0  # before memory is read
HONEST, ABUSER = "127.0.1.1", "127.0.2.1"
STARTED_TOKENS = 3  # of an answer whose client then vanishes


@dataclass
class Tally:
    """What clients received."""

    answers: int = 0
    tokens: int = 0
    busy: int = 0  # 429
    busy_without_retry: int = 0
    wrong: int = 0  # answers with other tokens than they have alone
    errors: list[str] = field(default_factory=list)  # anything else that went wrong, the first few
    error_count: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)

    def failed(self, error: Exception) -> None:
        self.error_count += 1
        if len(self.errors) < MOST_TOLD:
            self.errors.append(f"{type(error).__name__}: {error}")

    def figures(self) -> dict[str, Any]:
        found = asdict(self)
        for name in ("first", "between"):
            values = found.pop(name)
            for share in (0.5, 0.95):
                found[f"{name}_p{share * 100:.0f}"] = percentile(values, share) if values else None
        return found


def address_of(client: int) -> str:
    return f"127.0.{3 + client // 250}.{1 + client % 250}"


async def ask_once(site: Site, question: Question, source: str, tally: Tally) -> float:
    """Request one answer and check it. Returns the seconds for which the client must wait before the next request."""
    timed = Timed(time.perf_counter())
    try:
        async with asking(site.url, MODEL, question.prompt, len(question.answer), source) as answer:
            async for token in answer.tokens():
                timed.add(token, time.perf_counter())
    except Busy as busy:
        tally.busy += 1
        tally.busy_without_retry += busy.retry_seconds is None
        return busy.retry_seconds or 1.0
    except (Refused, OSError, ValueError) as error:
        tally.failed(error)
        return 0.1
    tally.answers += 1
    tally.tokens += len(timed.tokens)
    tally.wrong += tuple(timed.tokens) != question.answer
    if timed.tokens:
        tally.first.append(timed.first_seconds)
        tally.between += [b - a for a, b in zip(timed.at, timed.at[1:], strict=False)]
    return 0.0


async def ask_until(site: Site, client: int, source: str, until: float, tally: Tally) -> None:
    """Send one request after the other; the last one is answered to its end."""
    number = client
    while time.monotonic() < until:
        wait = await ask_once(site, site.questions[number % len(site.questions)], source, tally)
        number += 1
        if wait:
            await asyncio.sleep(min(wait, max(0.0, until - time.monotonic())))


async def steady(
    site: Site, clients: int, seconds: float, settle_seconds: float = SETTLE_SECONDS
) -> dict[str, Any]:
    """Many clients, each with one request after the other, in two halves: memory at rest must be the same after both."""
    tally, took, freed = Tally(), 0.0, 0.0
    memory: list[list[int]] = []
    for _ in range(2):
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for client in range(clients):
                tasks.create_task(ask_until(site, client, address_of(client), began + seconds / 2, tally))
        took += time.monotonic() - began
        freed = max(freed, await site.until_free(REST_SECONDS))
        await asyncio.sleep(settle_seconds)
        memory.append(site.resident_bytes())
    return {
        "clients": clients,
        "seconds": took,
        "tokens_per_second": tally.tokens / took,
        **tally.figures(),
        "freed_seconds": freed,
        "resident_bytes": {"half": memory[0], "end": memory[1]},
        "resident_growth": max(end / half for half, end in zip(*memory, strict=True)),
    }


async def vanishing(site: Site, clients: int) -> dict[str, Any]:
    """Clients that are switched off in the middle of long answers; wait until no stage holds anything of theirs."""
    started, errors = 0, list[str]()

    async def begin(client: int, open_: AsyncExitStack) -> HttpAnswer | None:
        nonlocal started
        try:
            answer = await open_.enter_async_context(
                asking(site.url, MODEL, site.long.prompt, len(site.long.answer), address_of(client))
            )
            count = 0
            async for _ in answer.tokens():
                count += 1
                if count == STARTED_TOKENS:
                    started += 1
                    return answer
        except (Busy, Refused, OSError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        return None

    async with AsyncExitStack() as open_:
        answers = await asyncio.gather(*(begin(client, open_) for client in range(clients)))
        sessions, _ = await site.held()
        for answer in filter(None, answers):
            answer.abort()
        freed = await site.until_free(REST_SECONDS)
    return {
        "clients": clients,
        "started": started,
        "sessions": sessions,
        "freed_seconds": freed,
        "errors": errors[:MOST_TOLD],
    }


async def overcommitted(site: Site, clients: int) -> dict[str, Any]:
    """Long answers, all at once, for which the stages lend too little memory: each must be given all the same. A client that
    gets 429 retries."""
    tally = Tally()
    most = [0, 0]
    done = asyncio.Event()

    async def answered(client: int) -> None:
        while True:
            before = tally.answers + tally.error_count
            wait = await ask_once(site, site.long, address_of(client), tally)
            if tally.answers + tally.error_count > before and not wait:
                return
            if tally.error_count:
                return
            await asyncio.sleep(wait)

    async def watch() -> None:
        while not done.is_set():
            most[:] = map(max, most, await site.held())
            await asyncio.sleep(0.1)

    began = time.monotonic()
    watching = asyncio.create_task(watch())
    try:
        await asyncio.gather(*(answered(client) for client in range(clients)))
    finally:
        done.set()
        await watching
    took = time.monotonic() - began
    freed = await site.until_free(REST_SECONDS)
    return {
        "clients": clients,
        "seconds": took,
        "most_sessions": most[0],
        "most_kv_bytes": most[1],
        "longest_pause": max(tally.between, default=0.0),
        "freed_seconds": freed,
        **tally.figures(),
    }


async def abused(site: Site, streams: int, seconds: float) -> dict[str, Any]:
    """An honest client's tokens a second, alone and beside a client that holds so many long answers open and reads none."""
    alone = await _honest_rate(site, seconds, lambda: None)
    refused = 0

    async def hold(number: int) -> None:
        nonlocal refused
        while True:
            try:
                async with asking(
                    site.url, MODEL, site.long.prompt, len(site.long.answer), ABUSER, unread=True
                ) as answer:
                    # It waits for the end of the connection without taking anything in: the stream's buffer is full at once.
                    del answer
                    await asyncio.sleep(HELD_SECONDS)
            except OSError:
                refused += 1
                await asyncio.sleep(0.05)

    holding = [asyncio.create_task(hold(number)) for number in range(streams)]
    try:
        await asyncio.sleep(min(2.0, seconds))
        sessions, _ = await site.held()
        tally = Tally()
        beside = await _honest_rate(site, seconds, lambda: None, tally)
    finally:
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)
    freed = await site.until_free(REST_SECONDS)
    return {
        "streams": streams,
        "sessions": sessions,
        "honest_alone": alone,
        "honest_beside": beside,
        "share": beside / alone,
        "freed_seconds": freed,
        **tally.figures(),
    }


HELD_SECONDS = 2.0  # for which an unread answer is kept before its client asks for another


async def _honest_rate(
    site: Site, seconds: float, seen: Callable[[], None], tally: Tally | None = None
) -> float:
    tally = tally or Tally()
    began = time.monotonic()
    await ask_until(site, 0, HONEST, began + seconds, tally)
    return tally.tokens / (time.monotonic() - began)
