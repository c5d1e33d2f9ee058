"""What the stages of a training job say to each other on `/fusion/stage/2`, one frame each.

A stream carries one direction between two stages of one job: the sending stage opens it with `hello`, the receiver
answers `welcome`, then only the opener speaks. Every frame carries the term that its sender holds its stage under.

    activation, gradient, tie        tensors, see `TensorHeader`
    begin commit discard hold        the lead to the others
    restore replicate saved move finish
    join suspect ready evaluated     the others to the lead
    shard held failed leaving lack
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fusion.runtime.job.fields import build, plain
from fusion.runtime.job.progress import Progress
from fusion.runtime.job.protocol import STAGE
from fusion.runtime.training.step.checkpoint import START, Checkpoint
from fusion.runtime.training.step.events import NO_ENTRY, After, Entry, Links, StageReport
from fusion.runtime.training.step.run_statistics import CLEAN, NO_ATTEMPT, Attempt, RunStatistics
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.transport import Frame, PeerId

TENSOR_KINDS = ("activation", "gradient", "tie")


@dataclass(frozen=True, kw_only=True)
class Hello:
    """First frame of a stream: stage `source` under its owner's `term` will speak to stage `target`."""

    job: JobId
    source: int
    target: int
    term: int
    target_term: int  # the term under which the opener believes the receiver to hold its stage
    host: int = 0  # drawn when the opener began its stage: not twice, even where it used a term twice
    claim: bytes = (
        b""  # of the opener, sealed (`Leases.sealed`): the receiver need not look for it in the directory
    )


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """`activation`: an edge's value, producer to consumer. `gradient`: of that value, consumer to producer.
    `tie`: the gradient of a tied variable (`edge` is its name), to each other member of the tie-group."""

    term: int
    attempt: Attempt
    step: int
    microbatch: int
    edge: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    masked: bool = False  # a gradient at the elements of the activation that had any, in their order
    evaluate: bool = False  # of the held-out data, forward only


# --- control, the lead to the others


@dataclass(frozen=True, kw_only=True)
class BeginMessage:
    attempt: Attempt
    step: int
    after: After
    tally: RunStatistics = CLEAN


@dataclass(frozen=True, kw_only=True)
class CommitMessage:
    attempt: Attempt
    step: int
    learning_rate: float
    clip_factor: float
    after: After


@dataclass(frozen=True, kw_only=True)
class DiscardMessage:
    attempt: Attempt


@dataclass(frozen=True, kw_only=True)
class HoldMessage:
    """No step is under way: hand your stage over, if `entry` is your newest join."""

    attempt: Attempt
    stage: int
    entry: Entry


@dataclass(frozen=True, kw_only=True)
class RestoreMessage:
    attempt: Attempt
    point: Checkpoint


@dataclass(frozen=True, kw_only=True)
class ReplicateMessage:
    """All shards are saved: hold the index, and the shard of the stage before you beside your own."""

    step: int
    index: Digest


@dataclass(frozen=True, kw_only=True)
class SavedMessage:
    """Every shard of this snapshot lies on two peers (where there are two): it is the newest to go back to."""

    point: Checkpoint


@dataclass(frozen=True, kw_only=True)
class MoveMessage:
    """Hand your stage to that idle peer at the next step boundary, if it takes it."""

    peer: PeerId


@dataclass(frozen=True, kw_only=True)
class FinishMessage:
    """The job has ended, and how it went: from now on any stage can tell whoever asks."""

    state: Literal["done", "stopped", "failed"]
    text: str = ""
    progress: Progress | None = None


# --- control, the others to the lead


@dataclass(frozen=True, kw_only=True)
class JoinMessage:
    step: int
    newest: Checkpoint  # the newest snapshot that this stage knows to be held
    before: Checkpoint = START  # the one before it
    entry: Entry = NO_ENTRY
    links: Links = ()  # the term under which each stage that it works with is held, as it knows
    attempt: Attempt = NO_ATTEMPT
    abandoned: bool = False
    tally: RunStatistics = CLEAN


@dataclass(frozen=True, kw_only=True)
class SuspectMessage:
    text: str
    entry: Entry = NO_ENTRY


@dataclass(frozen=True, kw_only=True)
class ReadyMessage:
    attempt: Attempt
    step: int
    report: StageReport


@dataclass(frozen=True, kw_only=True)
class EvaluatedMessage:
    step: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class ShardMessage:
    step: int
    digest: Digest
    seconds: float = 0.0  # that saving kept the device from the steps


@dataclass(frozen=True, kw_only=True)
class HeldMessage:
    step: int
    index: Digest


@dataclass(frozen=True, kw_only=True)
class FailedMessage:
    """Our arithmetic failed in this attempt; we give the stage up."""

    text: str
    attempt: Attempt = NO_ATTEMPT


@dataclass(frozen=True, kw_only=True)
class LeavingMessage:
    """Our peer leaves: hand the stage over at the next step boundary."""

    entry: Entry


@dataclass(frozen=True, kw_only=True)
class LackMessage:
    """Nobody holds our shard of what the restore `attempt` asked for."""

    attempt: Attempt
    text: str


_CONTROL: Mapping[str, type[Any]] = {
    "begin": BeginMessage,
    "commit": CommitMessage,
    "discard": DiscardMessage,
    "hold": HoldMessage,
    "restore": RestoreMessage,
    "replicate": ReplicateMessage,
    "saved": SavedMessage,
    "move": MoveMessage,
    "finish": FinishMessage,
    "join": JoinMessage,
    "suspect": SuspectMessage,
    "ready": ReadyMessage,
    "evaluated": EvaluatedMessage,
    "shard": ShardMessage,
    "held": HeldMessage,
    "failed": FailedMessage,
    "leaving": LeavingMessage,
    "lack": LackMessage,
}
_KIND: Mapping[type[Any], str] = {made: kind for kind, made in _CONTROL.items()}
FROM_LEAD = frozenset(
    {"begin", "commit", "discard", "hold", "restore", "replicate", "saved", "move", "finish"}
)

Message = (
    BeginMessage | CommitMessage | DiscardMessage | HoldMessage | RestoreMessage | ReplicateMessage | SavedMessage
    | MoveMessage | FinishMessage | JoinMessage | SuspectMessage | ReadyMessage | EvaluatedMessage | ShardMessage | HeldMessage
    | FailedMessage | LeavingMessage | LackMessage
)  # fmt: skip


def kind_of(message: Message) -> str:
    return _KIND[type(message)]


def encode(message: Message, term: int) -> tuple[str, dict[str, Any]]:
    """Kind and header of the frame that carries a control message."""
    return kind_of(message), {"term": term, **plain(message)}


def decode(frame: Frame) -> Message:
    """The control message of a frame. ValueError names what is wrong with it."""
    made = _CONTROL.get(frame.kind)
    if made is None:
        raise ValueError(f"{STAGE.name} knows no {frame.kind[:40]!r}")
    header = {key: value for key, value in frame.header.items() if key != "term"}
    message: Message = build(made, header, frame.kind)
    return message
