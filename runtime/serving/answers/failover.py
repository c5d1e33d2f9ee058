"""When an answer stumbles: whose fault it is, what to do about it, and for how long. Pure; the shell that acts is
`fusion.runtime.serving.answers.generation`.

An answer is a pure function of the prompt, the sampling and the positions, so any stage of it may be run again
anywhere: the worst that a wrong decision here costs is time. That is also why nobody is ever banned: a peer that
seems to have vanished is reported, and whether it has is for those to find out who could replace it.
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
    "vanished",  # a stream to a stage broke, or it cannot be reached
    "silent",  # a stage does not answer, not even a ping: it may be frozen, and it may wake up
    "moved",  # whoever we asked does not hold the stage (any more)
    "absent",  # nobody holds the stage
    "full",  # no memory or no room for one more session
    "broken",  # running the stage failed
    "grammar",  # the stage could not follow the request's schema: it takes too much time or memory, as a rule
    "stuck",  # every stage is there, and yet nothing comes
    "refused",  # the request itself cannot work
]
_REASONS: frozenset[str] = frozenset(get_args(FailedReason))
_LASTING = frozenset({"broken", "grammar", "stuck"})  # waiting does not mend these: only a few more tries

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 0.5
REMEMBERED_GAPS = 64
LOOK_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class FailoverConfig:
    recover_seconds: float = 30.0  # without progress, before an answer is given up
    # The same, where a stage is there and has no memory: others' answers come to their end.
    full_seconds: float = 120.0
    reach_seconds: float = 5.0  # for a peer to accept a stream
    quiet_seconds: float = 2.0  # without a word, at least, before the stages are asked whether they are there
    quiet_factor: float = 20.0  # or this many times the usual time between two tokens
    ping_seconds: float = 1.0  # for a stage to answer when asked
    rounds: int = 5  # of asking, each twice as long as the last, while all are there and nothing comes
    tries: int = 3  # of a stage that fails by itself

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
    stages: tuple[int, ...] = ()  # whose it is

    @classmethod
    def from_failed(cls, header: Mapping[str, Any], stage: int, stages: int) -> Fault:
        """What a `failed` frame of `stage` reports, itself or a stage that it cannot reach."""
        message, reason, blamed = header.get("message"), header.get("reason"), header.get("stage")
        if not isinstance(message, str) or not message:
            message = f"stage {stage} failed"
        if not isinstance(blamed, int) or isinstance(blamed, bool) or not 0 <= blamed < stages:
            blamed = stage
        kind: FaultKind = reason if isinstance(reason, str) and reason in _REASONS else "broken"  # type: ignore[assignment]
        return cls(kind, message[:300], (blamed,))

    def on(self, peers: Sequence[str]) -> Fault:
        """The fault, of every stage that is its peers' where those are gone; `peers` run the stages, by number."""
        if self.kind not in ("vanished", "silent"):
            return self
        at_fault = {peers[stage] for stage in self.stages if stage < len(peers)}
        stages = tuple(stage for stage, peer in enumerate(peers) if peer in at_fault)
        return replace(self, stages=stages or self.stages)


class Faulted(Exception):
    """An attempt at an answer that has ended with this fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What an answer has been through since it last made progress."""

    faults: int = 0
    lasting: int = 0  # of them, those that waiting does not mend
    answered: bool = False  # whether the user has seen a token: then there is something to lose

    def with_fault(self, fault: Fault) -> Trouble:
        return replace(self, faults=self.faults + 1, lasting=self.lasting + (fault.kind in _LASTING))


@dataclass(frozen=True)
class Retry:
    """Open a session anew after a pause."""

    pause_seconds: float
    suspects: tuple[int, ...] = ()  # stages whose owners are to be reported first
    keep: bool = False  # the session stays as it is unless a suspect has been replaced: its owner may wake up


def respond(
    trouble: Trouble,
    fault: Fault,
    stalled_seconds: float,
    config: FailoverConfig,
    *,
    elsewhere: bool = False,
) -> Retry | None:
    """What to do about `fault`, which `trouble` counts already, `stalled_seconds` after the last progress. `elsewhere`:
    others run the stages at fault too. None: give the answer up."""
    if fault.kind == "refused" or trouble.lasting >= config.tries:
        return None
    if fault.kind == "full" and not trouble.answered and trouble.faults == 1 and not elsewhere:
        return None  # a new request: better told at once than kept waiting
    patience = config.full_seconds if fault.kind == "full" else config.recover_seconds
    if fault.kind not in _LASTING and stalled_seconds >= patience:
        return None
    pause = 0.0 if trouble.faults == 1 else FIRST_PAUSE_SECONDS * 2.0 ** min(trouble.faults - 2, 16)
    return Retry(
        min(pause, LONGEST_PAUSE_SECONDS),
        suspects=fault.stages if fault.kind in ("vanished", "silent") else (),
        keep=fault.kind == "silent" and not elsewhere,
    )


class Pulse:
    """How long the stages of one answer may be quiet, from its own history. Times are seconds on one clock."""

    def __init__(self, config: FailoverConfig, now: float) -> None:
        self._config = config
        self._gaps: deque[float] = deque(maxlen=REMEMBERED_GAPS)
        self._usual = 0.0  # median of the gaps, as of the last look
        self._due = 1  # tokens until the next look: nothing that costs is done for every one
        self._last = now
        self._rounds = 0

    def token(self, now: float, guessed: bool = False) -> None:
        """`guessed`: it took no trip of its own, so that the time before it says nothing."""
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
        """A session begins: what passed until now says nothing about the time between two tokens."""
        self._last = now
        self._rounds = 0

    def quiet_seconds(self) -> float:
        """Silence that is worth a question now; longer after each that was answered and brought nothing."""
        return max(self._config.quiet_seconds, self._config.quiet_factor * self._usual) * 2.0**self._rounds

    def asked(self) -> bool:
        """All have answered, and nothing came. True when that was once too often."""
        self._rounds += 1
        return self._rounds >= self._config.rounds


def explain(fault: Fault, name: str, memory_bytes: tuple[int, ...], waited_seconds: float) -> str:
    """The line for the user when an answer is given up. `memory_bytes`: what each stage needs, or nothing."""
    if fault.kind == "grammar":
        return TOO_MUCH
    if fault.kind not in ("vanished", "silent", "moved", "absent") or waited_seconds < 1.0:
        return fault.message
    stage = fault.stages[0] if fault.stages else None
    need = ""
    if stage is not None and fault.kind != "absent":
        need = f"; {needs(stage, memory_bytes, name)}"
    return f"{fault.message}{need} (gave up after {waited_seconds:.0f} s)"
