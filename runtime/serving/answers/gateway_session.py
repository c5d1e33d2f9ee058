"""Sessions as a gateway holds them: opened on every stage of a route, heard, closed on all of them.

One long-lived link to each stage serves all sessions. Its end is how a gateway learns that a stage has vanished;
that anything comes over it is how it knows that one is still there.
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
from fusion.runtime.serving.ring.links import GATEWAY, LinkEnds, RingLinks, ShownGrants, no_grants
from fusion.runtime.serving.ring.prefix import PrefixHash, positions_of
from fusion.runtime.serving.ring.session import Hop, Opening, SessionId
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import FrameError, SwarmError
from fusion.swarm.identity import friendly_name
from fusion.swarm.printable import error_line
from fusion.swarm.streams.queued_stream import QueuedStream, memory_bytes
from fusion.swarm.transport import Frame, PeerId, Transport

log = logging.getLogger(__name__)

# Of logits and log-probabilities that may wait here for a client which reads slowly.
UNREAD_BYTES = 16 << 20
UNREAD_EVENTS = 1024  # that may wait, beside a token for each position of two sessions


@dataclass(eq=False)
class GatewaySession:
    opening: Opening
    model: ServedModel
    events: asyncio.Queue[Event]
    links: dict[int, QueuedStream] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)  # stages that have not opened it yet
    # stage -> when it last said anything about this session
    heard: dict[int, float] = field(default_factory=dict)
    knows: dict[int, frozenset[str]] = field(default_factory=dict)  # stage -> what it has said that it knows
    new: bool = False  # no stage can hold anything of it
    expected: int = 0  # positions that every stage should hold, as it retained them of one that has ended
    prompted: bool = False
    # stage -> chunks of this session that it has run, as it said
    ran: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)  # stage -> positions that it had when it opened it
    reused: int = 0  # positions that no stage has to run, as all have them
    told: int = 0  # tokens of the prompt of which it has told log-probabilities
    reached: int = 0  # the position of the newest token that it gave: every stage has run what comes before
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
        """Whether the ring may begin while stages still open the session: each keeps what comes before, we know what need not be
        run, and the last one knows all settings. Grammars take long to open."""
        known = [self.knows.get(stage, frozenset()) for stage in range(len(self.route))]
        newer = {*self.opening.newer}
        needed = "early" if self.new else "expects"
        return (
            (self.new or self.expected > 0)
            and not self.opening.schema_bytes
            and all(needed in each for each in known)
            and newer <= known[-1]
        )

    def prompt(self, tokens: Sequence[int], *, guesses: bool, source: bytes = b"") -> None:
        """Let the ring begin, after what all stages hold. The last position always runs: the first token comes of it. `guesses`: the
        first stage may guess, where all of them know of it; `source`: what an encoder reads first."""
        self.prompted = True
        held = [self.expected] if self.waiting else self.held.values()
        self.reused = min(*held, len(tokens) - 1)
        said: dict[str, Any] = {"from": self.reused} if self.reused else {}
        if guesses and all("guesses" in self.knows.get(stage, ()) for stage in range(len(self.route))):
            said["guesses"] = True
        self.links[0].post("prompt", {"session": self.id, **said}, [source, pack_tokens(tokens)])

    def put_event(self, stage: int, what: Frame | Fault) -> None:
        """FrameError where more waits than a session has to say."""
        if self.events.qsize() > UNREAD_EVENTS + 2 * self.opening.capacity:
            raise FrameError("more than a session has to say")
        self.events.put_nowait(Event(self, stage, what))

    def slow(self) -> None:
        """Tell every stage that the tokens come slower than they did."""
        for link in self.links.values():
            link.post("slow", {"session": self.id})

    def ping(self) -> None:
        """Ask every stage whether it is there and how far it is."""
        for link in self.links.values():
            link.post("ping", {"session": self.id})


@dataclass(frozen=True)
class Event:
    """What a stage said about a session (`opened`, `token`, `leaving`), or what went wrong with it."""

    session: GatewaySession
    stage: int
    what: Frame | Fault


class GatewaySessions:
    """The sessions of one gateway. What happens to each goes to the queue that it was opened with."""

    def __init__(
        self,
        transport: Transport,
        reach_seconds: float,
        clock: Callable[[], float],
        chain: ShownGrants = no_grants,
    ) -> None:
        """`chain`: the grants that we show in a job."""
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
        self._knows: WeakKeyDictionary[QueuedStream, frozenset[str]] = WeakKeyDictionary()
        self._expected = ExpectedPrefixes()

    async def aclose(self) -> None:
        await self._links.aclose()

    def through(self, job: JobId) -> Counter[tuple[int, PeerId]]:
        """How many sessions run at each holder of a stage of the job."""
        routes = (session.route for session in self._sessions.values() if session.model.job == job)
        return Counter((stage, hop.peer) for route in routes for stage, hop in enumerate(route))

    def prefixes(self, model: ServedModel, holder: PeerId) -> PrefixHash | None:
        """By what stages find what they have of the holder's sequences. None: without a KV cache they have nothing, and of an
        encoder-decoder nothing that another source would not change."""
        if model.serve.cache != "kv" or model.serve.source is not None:
            return None
        return PrefixHash(self._prefix_key, f"{model.job} {holder}")

    async def open(
        self,
        opening: Opening,
        model: ServedModel,
        events: asyncio.Queue[Event],
        prompt: Sequence[int],
        schema: bytes = b"",
    ) -> GatewaySession:
        """Reach every stage and ask it to open the session; each answers with an event. Faulted where one cannot
        be reached. Whoever gets the session has to `close` it. `prompt`: its first `prompt_length` tokens go with it to
        the last stage, where penalties or the `schema`, which goes before them, need them."""
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
            session.heard[stage] = now
            session.knows[stage] = self._knows.get(link, frozenset())
            needed = opening.reads_prompt and stage == len(opening.route) - 1
            link.post(
                "open", header, [schema, pack_tokens(prompt[: opening.prompt_length])] if needed else ()
            )
        return session

    def close(self, session: GatewaySession, chain: bytes = b"") -> None:
        """Free it on every stage that is reached, which may keep what it has of the blocks of `chain`. Idempotent."""
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
        if frame.kind in ("leaving", "loading"):  # said once for all sessions of the stage
            for session in self._through(ends):
                session.heard[ends.stage] = self._clock()
                if frame.kind == "leaving":
                    session.put_event(ends.stage, frame)
            return
        if frame.kind == "tokens":
            for each in frames_of(frame):
                self._received(ends, each)
            return
        name = frame.header.get("session")
        found = self._sessions.get(SessionId(name)) if isinstance(name, str) else None
        if found is None:
            return  # closed while the frame was under way
        if ends.stage not in found.links or found.route[ends.stage].peer != ends.peer:
            raise FrameError("a frame for a session of other stages")
        found.heard[ends.stage] = self._clock()
        match frame.kind:
            case "pong":
                found.ran[ends.stage] = whole(frame.header, "ran", 0)
            case "failed":
                fault = Fault.from_failed(frame.header, ends.stage, len(found.route))
                found.put_event(ends.stage, fault)
            case "token":
                self._received_token(found, ends.stage, frame)
            case "prompt_logprobs":
                self._received_prompt_logprobs(found, ends.stage, frame)
            case "opened":
                self._received_opened(found, ends.stage, frame)
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
        found = prompt_logprobs_of(session, frame)
        if frame.header["position"] != session.told + 1:
            session.put_event(stage, Fault("broken", f"{session.where(stage)} left log-probabilities out"))
            return
        session.told += len(found)
        session.put_event(stage, frame)
        self._weigh(session, stage, frame)

    def _weigh(self, session: GatewaySession, stage: int, frame: Frame) -> None:
        """What waits for the client has become more by this frame."""
        session.unread_bytes += unread_bytes(frame)
        if session.unread_bytes > UNREAD_BYTES:  # another session goes on once these have been read
            session.put_event(stage, Fault("moved", "the client reads its answer too slowly"))
            self.close(session)

    def _received_opened(self, session: GatewaySession, stage: int, frame: Frame) -> None:
        if stage in session.held:
            raise FrameError("a session that is opened twice")
        held = whole(frame.header, "held", 0)  # the release before says nothing of it
        session.held[stage] = max(0, min(held, positions_of(session.opening.prefix)))
        what = _older(session, stage, frame) or self._lacking(session, stage) or frame
        link = session.links[stage]
        said = {"guesses", "early", "expects", *session.opening.newer} & {*_known(frame)}
        session.knows[stage] = self._knows[link] = self._knows.get(link, frozenset()) | said
        session.put_event(stage, what)

    def _lacking(self, session: GatewaySession, stage: int) -> Fault | None:
        """What is wrong with a stage that holds less than was expected when the prompt went out. It may have needed the memory: the next
        session of the answer asks first."""
        if session.held[stage] >= session.reused:
            return None
        self._expected.forget(session.opening.prefix)
        return Fault("moved", f"{session.where(stage)} holds less than was expected")

    def _lost(self, ends: LinkEnds, reason: str) -> None:
        log.info("ring: stage %d on %s: %s", ends.stage, friendly_name(ends.peer), reason)
        for session in self._through(ends):
            fault = Fault("vanished", f"{session.where(ends.stage)} vanished", (ends.stage,))
            session.events.put_nowait(Event(session, ends.stage, fault))

    def _through(self, ends: LinkEnds) -> list[GatewaySession]:
        """The sessions that have reached the stage over the link with these ends."""
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
    """What a `prompt_logprobs` frame has. JobError where it is nothing that the session may tell."""
    position, vocabulary = whole(frame.header, "position", 0), session.model.serve.vocabulary
    return session.opening.prompt_logprobs_of(position, frame.payload, vocabulary)


def unread_bytes(frame: Frame) -> int:
    """Of memory that a `token` frame takes for what was asked for beside the token."""
    return len(frame.payload) + memory_bytes(frame.header.get("top_logprobs"))


def _known(opened: Frame) -> list[str]:
    """What the stage says that it knows."""
    known = opened.header.get("knows")
    return [each for each in known if isinstance(each, str)] if isinstance(known, list) else []


def _older(session: GatewaySession, stage: int, opened: Frame) -> Fault | None:
    """What is wrong with a last stage that has opened the session without knowing all of its settings: it would give
    other tokens than were asked for. The peers of the release before are such."""
    known = _known(opened)
    missing = [name for name in session.opening.newer if name not in known]
    if stage != len(session.route) - 1 or not missing:
        return None
    return Fault("broken", f"{session.where(stage)} is too old to know {', '.join(missing)}", (stage,))
