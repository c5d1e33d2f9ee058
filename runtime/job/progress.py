"""The progress of a training job, as its lead knows it, which `jobs watch` and `train` show, one frame a change; and the load, the
loading and the failures of stages, as their peers know them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from fusion.runtime.job.fields import build
from fusion.swarm.directory.records import MAX_STEP, Digest, JobId, is_digest
from fusion.swarm.printable import one_line

State = Literal["launching", "running", "done", "stopped", "failed"]
RECENT = 64  # losses that a frame repeats, so that a watcher that polls misses none


@dataclass(frozen=True, kw_only=True)
class Progress:
    job: JobId
    state: State
    step: int = 0  # committed steps
    steps: int = 0
    loss: float | None = None  # mean over the microbatches of the last committed step
    validation_loss: float | None = None  # on held-out data, newest
    validation_step: int = 0
    recent: tuple[tuple[int, float], ...] = ()  # (step, loss) of the last committed steps, oldest first
    tokens_per_second: float = 0.0  # of the last few steps; samples where the graph has no sequence
    busy: tuple[float, ...] = ()  # share of the last step that each stage computed, 0..1
    codecs: str = ""  # of the edges now; empty where nothing is compressed
    sent_bytes: int = 0  # payload between stages since this lead began, all stages together
    received_bytes: int = 0
    stages: int = 0
    owners: tuple[str | None, ...] = ()  # peer id of each stage; None where none is linked
    attempts: int = 0  # how often a step was begun after the first time: discards and restores
    snapshot: Digest | None = None  # blob: index of the newest snapshot that all stages hold
    snapshot_step: int = 0
    samples: int = 0  # that the committed steps were made of
    ledger: str = ""  # head of the ledger of samples (`fusion.runtime.training.data.ledger`), hex
    discarded: int = 0  # steps that were begun and not committed
    replayed: int = 0  # steps committed again after going back to a snapshot
    losses: int = 0  # stages whose owner vanished
    recoveries: int = 0  # times that work went on after an interruption
    message: str = ""  # one line: what it waits for
    error: str = ""  # one line: why it failed

    def __post_init__(self) -> None:
        # A progress ends up in our job record: one with values that a record cannot carry would fail our whole heartbeat.
        steps = -1 <= self.step <= MAX_STEP and -1 <= self.snapshot_step <= MAX_STEP
        if not steps or not (self.snapshot is None or is_digest(self.snapshot)):
            raise ValueError("steps of at least -1, and the digest of a blob")

    @property
    def finished(self) -> bool:
        return self.state in ("done", "stopped", "failed")

    def with_fields(self, **fields: object) -> Progress:
        """With these fields changed. Text of other peers ends up here, too, and a record carries only clean lines."""
        clean = {name: one_line(value) if isinstance(value, str) else value for name, value in fields.items()}
        return replace(self, **clean)  # type: ignore[arg-type]

    def to_header(self) -> dict[str, Any]:
        return {f.name: _listed(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Progress:
        """Raises ValueError naming the field for a header that is not one; unknown keys of newer peers are dropped."""
        known = {f.name for f in fields(cls)}
        return build(cls, {key: value for key, value in header.items() if key in known})


def _listed(value: Any) -> Any:
    return [_listed(v) for v in value] if isinstance(value, tuple) else value


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """The load of a stage that is served, as the peer that runs it knows it."""

    job: JobId
    stage: int
    sessions: int
    kv_bytes: int  # reserved for them
    retained_bytes: int  # of sessions that have ended, until others need the memory
    tokens: int  # passed since the stage began to run there; the first stage alone counts them


MAX_LOADING = 64  # stages that are being loaded, in one reply
LoadingPhase = Literal["fetching", "loading"]


@dataclass(frozen=True, kw_only=True)
class StageLoading:
    """How far the loading of a stage that is to be served has come on a peer."""

    job: JobId
    stage: int
    phase: LoadingPhase  # its weights onto the disk, then into memory
    bytes: int  # of the weights, on the disk
    of_bytes: int  # 0: not known yet
    seconds: float = field(compare=False)  # in this phase
    trouble: str = ""  # one line: on the last peer that failed to send them

    def line(self) -> str:
        """For people."""
        if self.phase == "loading":
            return f"loading for {self.seconds:.0f} s"
        if not self.of_bytes:
            return f"looking for its weights for {self.seconds:.0f} s" + (
                f": {self.trouble}" if self.trouble else ""
            )
        fetched = f"{self.bytes / 1e6:,.0f} of {self.of_bytes / 1e6:,.0f} MB fetched in {self.seconds:.0f} s"
        return fetched + (f" ({self.trouble})" if self.trouble else "")

    def to_list(self) -> list[Any]:
        return [self.job, self.stage, self.phase, self.bytes, self.of_bytes, self.seconds, self.trouble]

    @classmethod
    def from_list(cls, value: object) -> StageLoading | None:
        """From another peer's reply; None for nonsense."""
        match value:
            case [
                str() as job,
                int() as stage,
                "fetching" | "loading" as phase,
                int() as fetched,
                int() as of,
                seconds,
                str() as trouble,
                *_,
            ] if isinstance(seconds, (int, float)) and stage >= 0 and 0 <= fetched <= of and seconds >= 0:
                return cls(
                    job=JobId(job), stage=stage, phase=phase, bytes=fetched, of_bytes=of, seconds=float(seconds),
                    trouble=one_line(trouble[:200]),
                )  # fmt: skip
        return None


def stages_loading(reply: Mapping[str, Any]) -> list[StageLoading]:
    """The valid entries of a peer's reply to `status`; none in an older peer's."""
    entries = reply.get("loading")
    found = map(StageLoading.from_list, entries[:MAX_LOADING] if isinstance(entries, list) else ())
    return [each for each in found if each is not None]


MAX_FAILURES = 32  # failed stages, in one reply
MAX_REASON = 200  # characters


@dataclass(frozen=True, kw_only=True)
class StageFailure:
    """Why a stage that a peer had claimed does not run there."""

    job: JobId
    stage: int
    reason: str  # one line

    def to_list(self) -> list[Any]:
        return [self.job, self.stage, self.reason]

    @classmethod
    def from_list(cls, value: object) -> StageFailure | None:
        """From another peer's reply; None for nonsense."""
        match value:
            case [str() as job, int() as stage, str() as reason, *_] if stage >= 0:
                return cls(job=JobId(job), stage=stage, reason=one_line(reason[:MAX_REASON]))
        return None


def stages_failed(reply: Mapping[str, Any]) -> list[StageFailure]:
    """As `stages_loading`."""
    entries = reply.get("failed")
    found = map(StageFailure.from_list, entries[:MAX_FAILURES] if isinstance(entries, list) else ())
    return [each for each in found if each is not None]
