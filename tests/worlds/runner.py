"""Runs many worlds on several processes, or one world with every frame and log line."""

from __future__ import annotations

import gc
import hashlib
import logging
import multiprocessing
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from worlds import plants, wiring
from worlds.process import Outcome
from worlds.scenario import scenario, with_liars
from worlds.virtual_time import lane_now, wall_seconds
from worlds.world import World

T = TypeVar("T")

CHUNK = 25  # seeds that a process takes at once


class LogCollector(logging.Handler):
    """Copies what the runtime logs into the log of the current world, with tracebacks if `traces`."""

    def __init__(self, *, traces: bool = True) -> None:
        super().__init__()
        self._traces = traces

    def emit(self, record: logging.LogRecord) -> None:
        world = World.current
        try:
            who = lane_now().name
        except LookupError:
            who = "?"
        world.note(who, f"[{record.levelname.lower()}] {record.getMessage()}")
        if self._traces and record.exc_info and record.exc_info[1] is not None:
            for line in traceback.format_exception(record.exc_info[1]):
                world.note(who, line.rstrip())


@dataclass
class Summary:
    worlds: int = 0
    failed: list[Outcome] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    faulted: int = 0  # worlds in which at least one fault struck
    captured: int = 0  # worlds in which liars claimed half of the stages while these were vacant
    updates: int = 0
    virtual_seconds: float = 0.0
    cpu_seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        self.worlds += 1
        self.faults.update(outcome.struck)
        self.faulted += bool(outcome.struck)
        self.captured += outcome.captured
        self.updates += outcome.updates
        self.virtual_seconds += outcome.virtual_seconds
        self.cpu_seconds += outcome.cpu_seconds
        if outcome.violations:
            self.failed.append(outcome)


def prepare(plant: str, liars: int = 0) -> None:
    """Set a process up: once, before its first world."""
    global LIARS
    LIARS = liars
    wiring.install()
    logging.getLogger("fusion").addHandler(logging.NullHandler())
    logging.getLogger("fusion").propagate = False
    if plant:
        plants.PLANTS[plant]()
    logging.disable(logging.WARNING)
    # Coroutines are destroyed with their world, wherever they are suspended.
    sys.unraisablehook = lambda _: None
    gc.collect()
    gc.freeze()  # what exists now stays, so the collection after every world need not scan it
    gc.disable()


LIARS = 0  # the most liars in a world; `prepare` sets it in every process


def run_one(seed: int, *, verbose: bool = False) -> Outcome:
    plan = scenario(seed)
    world = World(with_liars(plan, LIARS) if LIARS else plan, verbose=verbose)
    outcome, loop = world.run(), world.loop
    del world, World.current
    loop.close()
    return outcome


def run_many(
    seeds: Sequence[int], processes: int, plant: str, run: Callable[[int], T] = run_one, liars: int = 0
) -> Iterator[T]:
    """Yield `run(seed)` of each seed, in the order in which they finish. The processes end with the iterator."""
    if processes == 1:
        prepare(plant, liars)
        yield from map(run, seeds)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, initializer=prepare, initargs=(plant, liars)) as pool:
        yield from pool.imap_unordered(run, seeds, chunksize=CHUNK)


def replay(seed: int, *, traces: bool = True) -> Outcome:
    """Run one world and log every frame and every line of the runtime. Needs a process that `prepare` has set up."""
    collector = LogCollector(traces=traces)
    fusion = logging.getLogger("fusion")
    before = fusion.level, fusion.propagate
    logging.disable(logging.NOTSET)
    logs = [fusion, *map(logging.getLogger, wiring.MISTAKES_LOGS)]
    for log in logs:
        log.addHandler(collector)
    fusion.setLevel(logging.DEBUG)
    fusion.propagate = False
    try:
        return run_one(seed, verbose=True)
    finally:
        for log in logs:
            log.removeHandler(collector)
        fusion.level, fusion.propagate = before
        logging.disable(logging.WARNING)


def kinds(failed: Sequence[Outcome]) -> list[list[Outcome]]:
    """Failed worlds grouped by their first violation without numbers and names.

    The most frequent kind is first, and the shortest world of each kind.
    """
    groups: dict[str, list[Outcome]] = {}
    for outcome in failed:
        text = outcome.violations[0]
        line = text.strip().splitlines()[-2] if text.startswith("sound") and "\n" in text.strip() else text
        groups.setdefault(re.sub(r"\d+|\b[a-p]{2}\b|'.*?'", "_", line), []).append(outcome)
    for outcomes in groups.values():
        outcomes.sort(key=lambda outcome: outcome.virtual_seconds)
    return sorted(groups.values(), key=len, reverse=True)


@dataclass(frozen=True, order=True)
class Digest:
    """SHA-256 of what happened in a world.

    `events` covers the bytes of every frame with its time, sender and receiver, the faults, the updates and the end. It
    depends on no name or text of the code that is not sent. `log` covers every line of the world's log, without tracebacks.
    """

    seed: int
    events: str
    log: str

    def __str__(self) -> str:
        return f"{self.seed} {self.events} {self.log}"


def digest(seed: int) -> Digest:
    outcome = replay(seed, traces=False)
    broken = [text.splitlines()[0] for text in outcome.violations]
    events = (
        outcome.frames,
        outcome.struck,
        outcome.updates,
        outcome.committed,
        outcome.virtual_seconds,
        broken,
    )
    return Digest(seed, _sha256(repr(events)), _sha256("\n".join(outcome.log)))


def digests(seeds: Sequence[int], processes: int, plant: str) -> tuple[list[Digest], Digest]:
    """The digest of every world, in the order of seeds, and one digest of all of them under the first seed."""
    worlds = sorted(run_many(seeds, processes, plant, digest))
    events, log = (
        "\n".join(part) for part in zip(*((each.events, each.log) for each in worlds), strict=True)
    )
    return worlds, Digest(worlds[0].seed, _sha256(events), _sha256(log))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(outcome: Outcome) -> str:
    """A short hash of the log, the violations and the duration."""
    text = "\n".join([*outcome.log, *outcome.violations, repr(outcome.virtual_seconds)])
    return _sha256(text)[:16]


def timed(
    seeds: Sequence[int], processes: int, plant: str, stop_after: int, until: str = "", liars: int = 0
) -> tuple[Summary, float]:
    """The summary of these worlds, and how many seconds they took.

    Stops early after `stop_after` failed worlds, or after the first one with a violation of the kind `until`.
    """
    summary, began = Summary(), wall_seconds()
    shown = began
    for outcome in run_many(seeds, processes, plant, liars=liars):
        summary.add(outcome)
        matched = until and any(text.startswith(until) for text in outcome.violations)
        if matched or len(summary.failed) >= stop_after:
            break
        if wall_seconds() - shown > 30.0:
            shown = wall_seconds()
            failed = ", ".join(str(outcome.seed) for outcome in summary.failed)
            print(
                f"{summary.worlds} of {len(seeds)} worlds, failed: {failed or 'none'}, {shown - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return summary, wall_seconds() - began
