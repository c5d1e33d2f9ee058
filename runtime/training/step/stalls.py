"""A step that stands still: when a stage says so, and which owner has to leave. Pure.

A stage that has nothing to compute knows which other one it waits for. Once it has got nothing for as long as its clock
asks, it tells the lead; so the owner of a stage that others wait for, and that waits for nobody, holds the step up. Where
all say that they wait, two contradict each other: one goes first, and where the step stands still again, the other. So
who reports falsely moves its own stage, or once that of a neighbour.

A machine that sleeps, a call that is compiled and a slow link all look the same from outside: what is asked for is far
more than an honest peer usually takes (`StallClock.patience`), and the lead has nobody leave a stage for which no
standby is ready.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from statistics import median

LEAD = -1  # who is waited for: the lead's word, not what its stage computes

# Within a step a stage waits for parts of it: nothing takes as long as several whole ones usually do.
USUAL_STEPS = 4.0
# Times as long before a step was seen from its begin to its commit: planes compile in the first one
UNKNOWN_PACE = 3.0
REMEMBERED = 8  # steps that say what is usual
SLOW_LINK_BYTES_PER_SECOND = 125e3  # for the largest tensor that a stage waits for
SLOW_DISK_BYTES_PER_SECOND = 20e6  # for a snapshot: others wait meanwhile
RESTORING_BYTES_PER_SECOND = 1e6  # for the state of a stage, from several peers, before a step can begin

# Times its patience. The lead waits for everybody else to say that they wait, and no longer than this: two may be silent.
NOT_ALL_SAY_SO = 2.0
LEAD_STALLS = 3.0  # before a lead that does nothing is at fault: it waits for others, who may only be slow


@dataclass(frozen=True, kw_only=True)
class StallClock:
    """How long the step of one stage has stood still. Times are seconds of one clock."""

    least_seconds: float
    since: float  # it last went on
    tensor_bytes: int = 0  # the largest that it may wait for
    state_bytes: int = 0  # of the stage that has most
    mark: Hashable = None  # what changes whenever it goes on
    began: float | None = None  # when the step under way did, with the commit of the one before
    steps: tuple[float, ...] = ()  # seconds that the last ones took

    def see(self, now: float, mark: Hashable, *, busy: bool) -> StallClock:
        """`busy`: the stage has something to do itself."""
        if mark == self.mark and not busy:
            return self
        return replace(self, mark=mark, since=now)

    def begin(self) -> StallClock:
        """What came before the next commit was no whole step."""
        return replace(self, began=None)

    def commit(self, now: float) -> StallClock:
        steps = self.steps if self.began is None else (*self.steps, now - self.began)[-REMEMBERED:]
        return replace(self, began=now, steps=steps)

    def patience(self, *, running: bool) -> float:
        """Seconds. `running`: while a step is; a state may have to be fetched before one is."""
        least = self.least_seconds
        usual = USUAL_STEPS * median(self.steps) if self.steps else UNKNOWN_PACE * least
        link = self.tensor_bytes / SLOW_LINK_BYTES_PER_SECOND
        state = self.state_bytes / (SLOW_DISK_BYTES_PER_SECOND if running else RESTORING_BYTES_PER_SECOND)
        return max(least, usual, link, state)

    def stands_still(self, now: float, *, running: bool, times: float = 1.0) -> bool:
        return now - self.since >= times * self.patience(running=running)


def culprits(
    stages: int,
    waits: Mapping[int, int],
    needed: Collection[int],
    moved: Collection[int] = (),
    *,
    all_say_so: bool = True,
) -> tuple[int, ...]:
    """The stages of which one has to go, the first one that another peer can take; none while somebody may be at work.

    `waits`: for whom each stage says that it waits; 0 among them where the lead's own does. `needed`: from whom the lead needs
    something. `moved`: those that had to go at this step already. `all_say_so`: only if every other stage says that it
    waits.
    """
    # Who waits for the lead has nothing left to do: not one from whom the lead still needs something.
    said = {
        stage: other
        for stage, other in waits.items()
        if other != stage and (other != LEAD or stage not in needed)
    }
    named = {other for other in said.values() if other > 0} | {stage for stage in needed if stage > 0}
    silent = [stage for stage in range(1, stages) if stage not in said]
    guilty = [stage for stage in silent if stage in named]
    if guilty:
        return () if all_say_so and len(silent) > 1 else tuple(guilty)
    way: list[int] = []
    at = min((stage for stage, other in said.items() if other != LEAD), default=LEAD)
    while at in said and at not in way:
        way.append(at)
        at = said[at]
    # They wait for each other in a circle; or the last one says that it has done all, and the one before that it has not.
    contrary = way[way.index(at) :] if at in way else way[-2:]
    order = sorted(contrary, key=lambda stage: (stage in moved, -way.index(stage)))
    return tuple(order) if len(order) > 1 else ()
