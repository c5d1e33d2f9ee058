"""Sessions at the gateway's end: opened on every stage of a route, received from, closed on all of them.

One long-lived link to each stage serves all sessions. Its end tells the gateway that a stage has failed; any frame over it shows that
the stage is alive.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from fusion.runtime.serving.answers.expected_prefixes import ExpectedPrefixes
from fusion.runtime.serving.answers.failover import Fault, Faulted
from fusion.runtime.serving.answers.served_model import ServedModel
from fusion.runtime.serving.requests.header_fields import pack_tokens, whole
from fusion.runtime.serving.requests.request import Logprobs
from fusion.runtime.serving.ring.batches import frames_of
from fusion.runtime.serving.ring.links import GATEWAY, GrantsOf, LinkEnds, RingLinks, no_grants
from fusion.runtime.serving.ring.prefix import PrefixHash, positions_of
from fusion.runtime.serving.ring.session import Hop, Opening, SessionId
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import FrameError, SwarmError
from fusion.swarm.identity import friendly_name
from fusion.swarm.printable import error_line
from fusion.swarm.streams.queued_stream import QueuedStream, memory_bytes
from fusion.swarm.transport import Frame, PeerId, Transport

log = logging.getLogger(__name__)

# Of logits and log-probabilities that wait for a slow client.
UNREAD_BYTES = 16 << 20
UNREAD_EVENTS = 1024  # beside a token for each position of two sessions


@dataclass(eq=False)
class GatewaySession:
    opening: Opening
    model: ServedModel
    events: asyncio.Queue[Event]
    links: dict[int, QueuedStream] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)  # stages that have not opened it yet
    # stage -> when its last frame about this session arrived
    received_at: dict[int, float] = field(default_factory=dict)
    capabilities: dict[int, frozenset[str]] = field(default_factory=dict)  # stage -> what it announced
    new: bool = False  # no stage can have cached a prefix of it
    expected: int = 0  # positions that every stage should have in its prefix cache
    prompted: bool = False
    # stage -> chunks of this session that it has run, by its last pong
    ran: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)  # stage -> cached positions when it opened the session
    reused: int = 0  # positions that no stage has to run, as all have cached them
    scored: int = 0  # tokens of the prompt whose log-probabilities have arrived
    reached: int = 0  # the position of the newest token: every stage has run those before
    unread_bytes: int = 0  # of logits and log-probabilities among the events

    @property
    def id(self) -> SessionId:
        return self.opening.session

    @property
    def route(self) -> tuple[Hop, ...]:
        return self.opening.route

    def where(self, stage: int) -> str:
        return f"stage {stage} of {self.model.manifest.name} on {friendly_name(self.route[stage].peer)}"

    @property
    def begins_early(self) -> bool:
        """Whether to send the prompt while stages still open the session: every stage queues early frames, it is known what is cached,
        and the last stage supports all settings. Not with a schema, which takes long to open."""
        known = [self.capabilities.get(stage, frozenset()) for stage in range(len(self.route))]
        newer = {*self.opening.newer}
        needed = "early" if self.new else "expects"
        return (
            (self.new or self.expected > 0)
            and not self.opening.schema_bytes
            and all(needed in each for each in known)
            and newer <= known[-1]
        )

    def prompt(self, tokens: Sequence[int], *, guesses: bool, source: bytes = b"") -> None:
        """Send the prompt, to be run from the first position that some stage has not cached. The last position always runs, as the first
        token is sampled after it. `guesses`: allow speculation, if all stages support it; `source`: input of an encoder."""
        self.prompted = True
        held = [self.expected] if self.waiting else self.held.values()
        self.reused = min(*held, len(tokens) - 1)
        fields: dict[str, Any] = {"from": self.reused} if self.reused else {}
        if guesses and all("guesses" in self.capabilities.get(stage, ()) for stage in range(len(self.route))):
            fields["guesses"] = True
        self.links[0].post("prompt", {"session": self.id, **fields}, [source, pack_tokens(tokens)])

    def put_event(self, stage: int, what: Frame | Fault) -> None:
        """FrameError where more events wait than a session can have."""
        if self.events.qsize() > UNREAD_EVENTS + 2 * self.opening.capacity:
            raise FrameError("more than a session has to say")
        self.events.put_nowait(Event(self, stage, what))

    def slow(self) -> None:
        """Report to every stage that tokens have become slower."""
        for link in self.links.values():
            link.post("slow", {"session": self.id})

    def ping(self) -> None:
        """Ping every stage."""
        for link in self.links.values():
            link.post("ping", {"session": self.id})


@dataclass(frozen=True)
class Event:
    """A frame of a stage about a session (`opened`, `token`, `leaving`), or a fault."""

    session: GatewaySession
    stage: int
    what: Frame | Fault


class GatewaySessions:
    """The sessions of one gateway. The events of each go to the queue that it was opened with."""

    def __init__(
        self,
        transport: Transport,
        reach_seconds: float,
        clock: Callable[[], float],
        chain: GrantsOf = no_grants,
    ) -> None:
        """`chain`: our grants in a job."""
        self._links = RingLinks(
            transport,
            on_frame=self._received,
            on_end=self._lost,
            needed=self._needed,
            clock=clock,
            chain=chain,
        )
        self._reach_seconds = reach_seconds
        self._clock = clock
        self._sessions: dict[SessionId, GatewaySession] = {}
        self._prefix_key = secrets.token_bytes(32)
        self._capabilities: WeakKeyDictionary[QueuedStream, frozenset[str]] = WeakKeyDictionary()
        self._expected = ExpectedPrefixes()

    async def aclose(self) -> None:
        await self._links.aclose()

    def sessions_per_holder(self, job: JobId) -> Counter[tuple[int, PeerId]]:
        """How many sessions run at each holder of a stage of the job."""
        routes = (session.route for session in self._sessions.values() if session.model.job == job)
        return Counter((stage, hop.peer) for route in routes for stage, hop in enumerate(route))

    def prefixes(self, model: ServedModel, tenant: PeerId) -> PrefixHash | None:
        """The hash of prefixes for the tenant's sequences. None: there is nothing to reuse without a KV cache, or in an encoder-decoder,
        where it depends on the source."""
        if model.serve.cache != "kv" or model.serve.source is not None:
            return None
        return PrefixHash(self._prefix_key, f"{model.job} {tenant}")

    async def open(
        self,
        opening: Opening,
        model: ServedModel,
        events: asyncio.Queue[Event],
        prompt: Sequence[int],
        schema: bytes = b"",
    ) -> GatewaySession:
        """Connect to every stage and request the session; each replies with an event. Faulted where one cannot be reached. The caller
        must `close` the session. `prompt`: its first `prompt_length` tokens are sent to the last stage, after the `schema`, where
        penalties or the schema need them."""
        session = GatewaySession(opening, model, events, waiting=set(range(len(opening.route))))
        self._sessions[session.id] = session
        try:
            await asyncio.gather(*(self._reach(session, stage) for stage in range(len(opening.route))))
        except BaseException:
            self.close(session)
            raise
        expected = self._expected.begin(opening.prefix, opening.route)
        session.new, session.expected = expected is None, expected or 0
        header, now = opening.to_header(), self._clock()
        for stage, link in session.links.items():
            session.received_at[stage] = now
            session.capabilities[stage] = self._capabilities.get(link, frozenset())
            needed = opening.reads_prompt and stage == len(opening.route) - 1
            link.post(
                "open", header, [schema, pack_tokens(prompt[: opening.prompt_length])] if needed else ()
            )
        return session

    def close(self, session: GatewaySession, chain: bytes = b"") -> None:
        """Free it on every stage that was reached, which may retain the blocks of `chain`. Idempotent."""
        if self._sessions.pop(session.id, None) is not None:
            self._expected.end(chain, session.route, session.reached)
            kept = {"prefix": chain} if chain else {}
            for link in session.links.values():
                link.post("close", {"session": session.id, **kept})

    def _needed(self) -> set[LinkEnds]:
        """The links of all sessions, also of those that are being opened."""
        return {
            _ends(session, stage)
            for session in self._sessions.values()
            for stage in range(len(session.route))
        }

    async def _reach(self, session: GatewaySession, stage: int) -> None:
        try:
            async with asyncio.timeout(self._reach_seconds):
                session.links[stage] = await self._links.to(_ends(session, stage))
        except (SwarmError, TimeoutError) as error:
            reason = "timed out" if isinstance(error, TimeoutError) else error_line(error)
            message = f"{session.where(stage)} cannot be reached: {reason}"
            raise Faulted(Fault("vanished", message, (stage,))) from None

    def _received(self, ends: LinkEnds, frame: Frame) -> None:
        if frame.kind in ("leaving", "loading"):  # one frame for all sessions of the stage
            for each in self._sessions_over(ends):
                each.received_at[ends.stage] = self._clock()
                if frame.kind == "leaving":
                    each.put_event(ends.stage, frame)
            return
        if frame.kind == "tokens":
            for part in frames_of(frame):
                self._received(ends, part)
            return
        name = frame.header.get("session")
        session = self._sessions.get(SessionId(name)) if isinstance(name, str) else None
        if session is None:
            return  # closed while the frame was in flight
        if ends.stage not in session.links or session.route[ends.stage].peer != ends.peer:
            raise FrameError("a frame for a session of other stages")
        session.received_at[ends.stage] = self._clock()
        match frame.kind:
            case "pong":
                session.ran[ends.stage] = whole(frame.header, "ran", 0)
            case "failed":
                fault = Fault.from_failed(frame.header, ends.stage, len(session.route))
                session.put_event(ends.stage, fault)
            case "token":
                self._received_token(session, ends.stage, frame)
            case "prompt_logprobs":
                self._received_prompt_logprobs(session, ends.stage, frame)
            case "opened":
                self._received_opened(session, ends.stage, frame)
            case _:
                raise FrameError(
                    f"stages send opened, prompt_logprobs, token, failed and pong, not {frame.kind!r:.40}"
                )

    def _received_token(self, session: GatewaySession, stage: int, frame: Frame) -> None:
        if stage != len(session.route) - 1:
            raise FrameError("only the last stage chooses tokens")
        position, token = whole(frame.header, "position", -1), whole(frame.header, "id", -1)
        if not 0 <= token < session.model.serve.vocabulary:
            raise FrameError("a token that the model does not have")
        session.opening.logprobs_of(frame.header, session.model.serve.vocabulary)
        if frame.payload and not session.opening.logits:
            raise FrameError("logits that nobody asked for")
        session.put_event(stage, frame)
        session.reached = max(session.reached, position)
        self._weigh(session, stage, frame)

    def _received_prompt_logprobs(self, session: GatewaySession, stage: int, frame: Frame) -> None:
        if stage != len(session.route) - 1:
            raise FrameError("only the last stage tells of the prompt")
        logprobs = prompt_logprobs_of(session, frame)
        if frame.header["position"] != session.scored + 1:
            session.put_event(stage, Fault("broken", f"{session.where(stage)} left log-probabilities out"))
            return
        session.scored += len(logprobs)
        session.put_event(stage, frame)
        self._weigh(session, stage, frame)

    def _weigh(self, session: GatewaySession, stage: int, frame: Frame) -> None:
        """Count the frame's bytes, which wait for the client. Too many end the session."""
        session.unread_bytes += unread_bytes(frame)
        if session.unread_bytes > UNREAD_BYTES:  # another session continues once these have been read
            session.put_event(stage, Fault("moved", "the client reads its answer too slowly"))
            self.close(session)

    def _received_opened(self, session: GatewaySession, stage: int, frame: Frame) -> None:
        if stage in session.held:
            raise FrameError("a session that is opened twice")
        held = whole(frame.header, "held", 0)  # older releases do not send it
        session.held[stage] = max(0, min(held, positions_of(session.opening.prefix)))
        what = _outdated(session, stage, frame) or self._missing_prefix(session, stage) or frame
        link = session.links[stage]
        capabilities = {"guesses", "early", "expects", *session.opening.newer} & {*_capabilities_in(frame)}
        session.capabilities[stage] = self._capabilities[link] = (
            self._capabilities.get(link, frozenset()) | capabilities
        )
        session.put_event(stage, what)

    def _missing_prefix(self, session: GatewaySession, stage: int) -> Fault | None:
        """The fault of a stage that has cached less than was expected when the prompt was sent. It may have evicted it: the next session
        waits for confirmation."""
        if session.held[stage] >= session.reused:
            return None
        self._expected.forget(session.opening.prefix)
        return Fault("moved", f"{session.where(stage)} holds less than was expected")

    def _lost(self, ends: LinkEnds, reason: str) -> None:
        log.info("ring: stage %d on %s: %s", ends.stage, friendly_name(ends.peer), reason)
        for session in self._sessions_over(ends):
            fault = Fault("vanished", f"{session.where(ends.stage)} vanished", (ends.stage,))
            session.events.put_nowait(Event(session, ends.stage, fault))

    def _sessions_over(self, ends: LinkEnds) -> list[GatewaySession]:
        """The sessions that use the link with these ends."""
        return [
            s
            for s in self._sessions.values()
            if s.model.job == ends.job and ends.stage in s.links and s.route[ends.stage].peer == ends.peer
        ]


def _ends(session: GatewaySession, stage: int) -> LinkEnds:
    return LinkEnds(session.model.job, GATEWAY, stage, session.route[stage].peer)


def token_of(frame: Frame) -> tuple[int, int]:
    """Position and id of a `token` frame."""
    return frame.header["position"], frame.header["id"]


def prompt_logprobs_of(session: GatewaySession, frame: Frame) -> list[Logprobs]:
    """The log-probabilities in a `prompt_logprobs` frame. JobError where they are not valid for the session."""
    position, vocabulary = whole(frame.header, "position", 0), session.model.serve.vocabulary
    return session.opening.prompt_logprobs_of(position, frame.payload, vocabulary)


def unread_bytes(frame: Frame) -> int:
    """Bytes of memory of a frame's logits and log-probabilities."""
    return len(frame.payload) + memory_bytes(frame.header.get("top_logprobs"))


def _capabilities_in(opened: Frame) -> list[str]:
    """The capabilities that an `opened` frame announces."""
    known = opened.header.get("knows")
    return [each for each in known if isinstance(each, str)] if isinstance(known, list) else []


def _outdated(session: GatewaySession, stage: int, opened: Frame) -> Fault | None:
    """The fault of a last stage of an older release, which opened the session without support for all of its settings: it would generate
    other tokens than requested."""
    known = _capabilities_in(opened)
    missing = [name for name in session.opening.newer if name not in known]
    if stage != len(session.route) - 1 or not missing:
        return None
    return Fault("broken", f"{session.where(stage)} is too old to know {', '.join(missing)}", (stage,))
