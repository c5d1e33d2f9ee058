"""Control messages of one hosted stage: received ones queue in the mailbox, sent ones leave by the outbox."""

from __future__ import annotations

import asyncio
from collections import Counter

from fusion.runtime.training.lead.lead import Lead
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.events import StageEvent
from fusion.runtime.training.streams.partners import Partners
from fusion.swarm.errors import StaleTerm

MOST_WAITING = 1024  # of one stage: a restore here takes seconds, and a step has a handful of messages


class Mailbox:
    """A queue of (sending stage, message or event), in order of arrival."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._events: asyncio.Queue[tuple[int, m.Message | StageEvent]] = asyncio.Queue()
        self._waiting: Counter[int] = Counter()  # by sending stage

    def receive(self, source: int, message: m.Message) -> None:
        """Receive a message from a partner. Raises StaleTerm for a message that only a lead sends or receives where neither is one, and
        above MOST_WAITING."""
        if isinstance(message, m.FromLead) != (source == 0) or (self._stage != 0 and source != 0):
            raise StaleTerm(f"stage {source} may not send {m.kind_of(message)} to stage {self._stage}")
        if self._waiting[source] >= MOST_WAITING:
            raise StaleTerm(f"{MOST_WAITING} messages of stage {source} wait already")
        self._put(source, message)

    def put(self, event: m.Message | StageEvent) -> None:
        """Queue a message from our own peer."""
        self._put(self._stage, event)

    async def get(self) -> tuple[int, m.Message | StageEvent]:
        source, event = await self._events.get()
        self._waiting[source] -= 1
        return source, event

    def _put(self, source: int, event: m.Message | StageEvent) -> None:
        self._waiting[source] += 1
        self._events.put_nowait((source, event))


class Outbox:
    """`lead`: of the job, if it is on this peer."""

    def __init__(self, stage: int, mailbox: Mailbox, partners: Partners) -> None:
        self.lead: Lead | None = None
        self.mailbox = mailbox
        self.partners = partners
        self._stage = stage

    def send(self, target: int, message: m.Message) -> None:
        """Send a message to any stage, also to our own. Returns at once."""
        if target != self._stage:
            self.partners.send(target, message)
        elif isinstance(message, m.FromLead):
            self.mailbox.put(message)
        else:
            # Not queued: our lead must learn of our lost links before it handles any message that came over them since, or it
            # would answer a stage that cannot be reached.
            assert self.lead is not None
            self.lead.receive(target, message)
