"""Many worlds on several processes, and one world again with everything that was said in it."""

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
    """What the runtime logs, into the log of the world that runs; with `traces`, where errors came from as well."""

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
    captured: int = 0  # in which liars came to half of the stages
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
    """Once in every process, before its first world."""
    global LIARS
    LIARS = liars
    wiring.install()
    logging.getLogger("fusion").addHandler(logging.NullHandler())
    logging.getLogger("fusion").propagate = False
    if plant:
        plants.PLANTS[plant]()
    logging.disable(logging.WARNING)
    # Coroutines end with their world, wherever they are.
    sys.unraisablehook = lambda _: None
    gc.collect()
    gc.freeze()  # what is there now stays, and need not be looked at after every world
    gc.disable()


LIARS = 0  # in a world at most; `prepare` sets it, once in every process


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
    """What `run` makes of each seed, as it comes; processes end with the iterator."""
    if processes == 1:
        prepare(plant, liars)
        yield from map(run, seeds)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, initializer=prepare, initargs=(plant, liars)) as pool:
        yield from pool.imap_unordered(run, seeds, chunksize=CHUNK)


def replay(seed: int, *, traces: bool = True) -> Outcome:
    """One world with every frame and every line that the runtime logs, in a process that `prepare` was called in."""
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
    """Failed worlds by what was broken, numbers and names left out, the most frequent first; in each the shortest
    world first."""
    found: dict[str, list[Outcome]] = {}
    for outcome in failed:
        text = outcome.violations[0]
        line = text.strip().splitlines()[-2] if text.startswith("sound") and "\n" in text.strip() else text
        found.setdefault(re.sub(r"\d+|\b[a-p]{2}\b|'.*?'", "_", line), []).append(outcome)
    for outcomes in found.values():
        outcomes.sort(key=lambda outcome: outcome.virtual_seconds)
    return sorted(found.values(), key=len, reverse=True)


@dataclass(frozen=True, order=True)
class Digest:
    """SHA-256 of what happened in a world. `events`: every frame that was sent, byte by byte, when, by whom and to whom,
    the faults, the updates and the end; no name or text of the code goes into it but what is sent. `log`: every line of
    the world's log in the words of the code, without tracebacks."""

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
    """Of every world, in the order of seeds, and one of all of them under the first seed."""
    found = sorted(run_many(seeds, processes, plant, digest))
    events, log = ("\n".join(part) for part in zip(*((each.events, each.log) for each in found), strict=True))
    return found, Digest(found[0].seed, _sha256(events), _sha256(log))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(outcome: Outcome) -> str:
    """The same for the same course of events."""
    text = "\n".join([*outcome.log, *outcome.violations, repr(outcome.virtual_seconds)])
    return _sha256(text)[:16]


def timed(
    seeds: Sequence[int], processes: int, plant: str, stop_after: int, until: str = "", liars: int = 0
) -> tuple[Summary, float]:
    """The summary of these worlds and the seconds that they took; ends early with `stop_after` failed ones, or with
    the first one that failed in the way that `until` names."""
    summary, began = Summary(), wall_seconds()
    shown = began
    for outcome in run_many(seeds, processes, plant, liars=liars):
        summary.add(outcome)
        told = until and any(text.startswith(until) for text in outcome.violations)
        if told or len(summary.failed) >= stop_after:
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
