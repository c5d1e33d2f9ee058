"""Failover policy of a completion: which fault gets which response, and for how long it is retried. Pure; carried out by
`fusion.runtime.serving.answers.recovery`.

A completion is a pure function of the prompt, the sampling parameters and the positions, so any stage may be run again anywhere:
the worst that a wrong decision costs is time. So no peer is ever banned: one that seems to have failed is reported, and its
possible successors find out whether it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal, get_args

from fusion.runtime.job.size_text import needs
from fusion.runtime.serving.grammar.matcher import TOO_MUCH
from fusion.runtime.serving.ring.session import FailedReason

FaultKind = Literal[
    "vanished",  # a stream to a stage broke, or its peer cannot be reached
    "silent",  # a stage does not answer pings: it may be frozen, and may resume
    "moved",  # the peer does not hold the stage (any more)
    "absent",  # no peer holds the stage
    "full",  # no memory for another session, or too many
    "broken",  # running the stage failed
    "grammar",  # the stage could not enforce the schema: most often it takes too much time or memory
    "stuck",  # every stage answers pings, but no token arrives
    "refused",  # the request itself is not possible
]
_REASONS: frozenset[str] = frozenset(get_args(FailedReason))
_LASTING = frozenset({"broken", "grammar", "stuck"})  # waiting does not help: only a few retries

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 0.5
REMEMBERED_GAPS = 64
LOOK_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class FailoverConfig:
    recover_seconds: float = 30.0  # without progress, before a completion fails
    # The same while a stage has no memory: other completions will end.
    full_seconds: float = 120.0
    reach_seconds: float = 5.0  # for a peer to accept a stream
    quiet_seconds: float = 2.0  # least time without a frame before the stages are pinged
    quiet_factor: float = 20.0  # or so many times the usual time between two tokens
    ping_seconds: float = 1.0  # for a stage to answer a ping
    rounds: int = 5  # of pings without progress, each after twice the time, before the completion is stuck
    tries: int = 3  # for lasting faults

    def __post_init__(self) -> None:
        seconds = (
            self.recover_seconds,
            self.full_seconds,
            self.reach_seconds,
            self.quiet_seconds,
            self.ping_seconds,
        )
        if min(*seconds, self.quiet_factor) <= 0 or min(self.rounds, self.tries) < 1:
            raise ValueError(
                "recover_, full_, reach_, quiet_ and ping_seconds, quiet_factor, rounds and tries: above 0"
            )


@dataclass(frozen=True)
class Fault:
    kind: FaultKind
    message: str  # one line, for the user
    stages: tuple[int, ...] = ()  # that are at fault

    @classmethod
    def from_failed(cls, header: Mapping[str, Any], stage: int, stages: int) -> Fault:
        """The fault in a `failed` frame of `stage`, which may blame a stage that it cannot reach."""
        message, reason, blamed = header.get("message"), header.get("reason"), header.get("stage")
        if not isinstance(message, str) or not message:
            message = f"stage {stage} failed"
        if not isinstance(blamed, int) or isinstance(blamed, bool) or not 0 <= blamed < stages:
            blamed = stage
        kind: FaultKind = reason if isinstance(reason, str) and reason in _REASONS else "broken"  # type: ignore[assignment]
        return cls(kind, message[:300], (blamed,))

    def on(self, peers: Sequence[str]) -> Fault:
        """The fault, extended to all stages of the same peers where those are gone. `peers`: of the stages, by index."""
        if self.kind not in ("vanished", "silent"):
            return self
        at_fault = {peers[stage] for stage in self.stages if stage < len(peers)}
        stages = tuple(stage for stage, peer in enumerate(peers) if peer in at_fault)
        return replace(self, stages=stages or self.stages)


class Faulted(Exception):
    """A session of a completion has ended with this fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


@dataclass(frozen=True, kw_only=True)
class FaultHistory:
    """The faults of a completion since its last progress."""

    faults: int = 0
    lasting: int = 0  # of these, faults that waiting does not help
    answered: bool = False  # whether the client has received a token: then there is something to lose

    def with_fault(self, fault: Fault) -> FaultHistory:
        return replace(self, faults=self.faults + 1, lasting=self.lasting + (fault.kind in _LASTING))


@dataclass(frozen=True)
class Retry:
    """Open a new session after a pause."""

    pause_seconds: float
    suspects: tuple[int, ...] = ()  # stages whose owners are reported first
    keep: bool = False  # keep the session unless a suspect has been replaced: its peer may resume


def respond(
    history: FaultHistory,
    fault: Fault,
    stalled_seconds: float,
    config: FailoverConfig,
    *,
    elsewhere: bool = False,
) -> Retry | None:
    """The response to `fault`, which `history` counts already, `stalled_seconds` after the last progress. `elsewhere`: the stages at
    fault have other holders. None: the completion fails."""
    if fault.kind == "refused" or history.lasting >= config.tries:
        return None
    if fault.kind == "full" and not history.answered and history.faults == 1 and not elsewhere:
        return None  # a new request: better refused at once than kept waiting
    patience = config.full_seconds if fault.kind == "full" else config.recover_seconds
    if fault.kind not in _LASTING and stalled_seconds >= patience:
        return None
    pause = 0.0 if history.faults == 1 else FIRST_PAUSE_SECONDS * 2.0 ** min(history.faults - 2, 16)
    return Retry(
        min(pause, LONGEST_PAUSE_SECONDS),
        suspects=fault.stages if fault.kind in ("vanished", "silent") else (),
        keep=fault.kind == "silent" and not elsewhere,
    )


class SilenceTimeout:
    """How long the stages of one completion may be silent, by the usual time between its tokens. Times are seconds of one clock."""

    def __init__(self, config: FailoverConfig, now: float) -> None:
        self._config = config
        self._gaps: deque[float] = deque(maxlen=REMEMBERED_GAPS)
        self._usual = 0.0  # median of the gaps, as last computed
        self._due = 1  # tokens until it is computed again: too costly for every token
        self._last = now
        self._rounds = 0

    def token(self, now: float, guessed: bool = False) -> None:
        """`guessed`: an accepted speculative token, which took no trip of its own, so that its gap is ignored."""
        gap, self._last = now - self._last, now
        self._rounds = 0
        if guessed:
            return
        self._gaps.append(gap)
        self._due -= 1
        if not self._due:
            self._usual = median(self._gaps)
            self._due = min(len(self._gaps), LOOK_TOKENS)

    def begin(self, now: float) -> None:
        """A session begins: the time until now is no gap between tokens."""
        self._last = now
        self._rounds = 0

    def quiet_seconds(self) -> float:
        """Silence after which to ping; it doubles with each round of pings without progress."""
        return max(self._config.quiet_seconds, self._config.quiet_factor * self._usual) * 2.0**self._rounds

    def no_progress(self) -> bool:
        """All stages have answered a ping, but no token has arrived. Whether that was the last round."""
        self._rounds += 1
        return self._rounds >= self._config.rounds


def explain(fault: Fault, name: str, memory_bytes: tuple[int, ...], waited_seconds: float) -> str:
    """The error message of a failed completion. `memory_bytes`: of each stage, or empty."""
    if fault.kind == "grammar":
        return TOO_MUCH
    if fault.kind not in ("vanished", "silent", "moved", "absent") or waited_seconds < 1.0:
        return fault.message
    stage = fault.stages[0] if fault.stages else None
    need = ""
    if stage is not None and fault.kind != "absent":
        need = f"; {needs(stage, memory_bytes, name)}"
    return f"{fault.message}{need} (gave up after {waited_seconds:.0f} s)"
