"""The way of control messages at one hosted stage: what comes waits in the mailbox, what it says goes out by the outbox."""

from __future__ import annotations

import asyncio
from collections import Counter

from fusion.runtime.training.lead.lead import Lead
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.events import StageEvent
from fusion.runtime.training.streams.partners import Partners
from fusion.swarm.errors import StaleTerm

# Of one stage, while ours is at something else: a restore takes seconds, and a step has a handful of messages.
MOST_WAITING = 1024


class Mailbox:
    """What the stage has to deal with, in the order in which it came: (stage that it is from, message or event)."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._events: asyncio.Queue[tuple[int, m.Message | StageEvent]] = asyncio.Queue()
        self._waiting: Counter[int] = Counter()  # of those, by stage

    def receive(self, source: int, message: m.Message) -> None:
        """From a partner. StaleTerm for what only a lead may say, or is for a lead to hear, and for more than can be dealt with."""
        if isinstance(message, m.FromLead) != (source == 0) or (self._stage != 0 and source != 0):
            raise StaleTerm(f"stage {source} may not send {m.kind_of(message)} to stage {self._stage}")
        if self._waiting[source] >= MOST_WAITING:
            raise StaleTerm(f"{MOST_WAITING} messages of stage {source} wait already")
        self._put(source, message)

    def put(self, event: m.Message | StageEvent) -> None:
        """Of our own peer."""
        self._put(self._stage, event)

    async def get(self) -> tuple[int, m.Message | StageEvent]:
        source, event = await self._events.get()
        self._waiting[source] -= 1
        return source, event

    def _put(self, source: int, event: m.Message | StageEvent) -> None:
        self._waiting[source] += 1
        self._events.put_nowait((source, event))


class Outbox:
    """`lead` is that of the job, where it is here."""

    def __init__(self, stage: int, mailbox: Mailbox, partners: Partners) -> None:
        self.lead: Lead | None = None
        self.mailbox = mailbox
        self.partners = partners
        self._stage = stage

    def send(self, target: int, message: m.Message) -> None:
        """To any stage, our own too; returns at once."""
        if target != self._stage:
            self.partners.send(target, message)
        elif isinstance(message, m.FromLead):
            self.mailbox.put(message)
        else:
            # Our lead hears of our own links before it hears of anything that came over them since: what it tells a
            # stage that we have lost is told to nobody.
            assert self.lead is not None
            self.lead.receive(target, message)
