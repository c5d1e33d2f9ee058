"""What the stages of a training job say to each other on `/fusion/stage/1`, one frame each.

A stream carries one direction between two stages of one job: the sending stage opens it with `hello`, the receiver
answers `welcome`, then only the opener speaks. Every frame carries the term that its sender holds its stage under.

    activation, gradient, tie        tensors, see `TensorHeader`
    begin commit discard restore     the lead to the others
    saved finish failed replicate
    join suspect ready evaluated     the others to the lead
    shard held failed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fusion.runtime.fields import build, plain
from fusion.runtime.training.step import After, Attempt, Report
from fusion.swarm.records import Digest, JobId
from fusion.swarm.transport import Frame

PROTOCOL = "/fusion/stage/1"
TENSOR_KINDS = ("activation", "gradient", "tie")


@dataclass(frozen=True, kw_only=True)
class Hello:
    """First frame of a stream: stage `source` under its owner's `term` will speak to stage `target`."""

    job: JobId
    source: int
    target: int
    term: int
    target_term: int  # the term under which the opener believes the receiver to hold its stage


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
    evaluate: bool = False  # of the held-out data, forward only


@dataclass(frozen=True, kw_only=True)
class Point:
    """A snapshot that all stages hold: the blob of its index; step 0 without one is the initial weights."""

    step: int = 0
    digest: Digest | None = None


# --- control, the lead to the others


@dataclass(frozen=True, kw_only=True)
class BeginMessage:
    attempt: Attempt
    step: int
    after: After


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
class RestoreMessage:
    point: Point


@dataclass(frozen=True, kw_only=True)
class ReplicateMessage:
    """All shards are saved: hold the index, and the shard of the stage before you beside your own."""

    step: int
    index: Digest


@dataclass(frozen=True, kw_only=True)
class SavedMessage:
    """Every shard of this snapshot lies on two peers (where there are two): it is the newest to go back to."""

    point: Point


@dataclass(frozen=True, kw_only=True)
class FinishMessage:
    state: Literal["done", "stopped", "failed"]
    text: str = ""


# --- control, the others to the lead


@dataclass(frozen=True, kw_only=True)
class JoinMessage:
    step: int
    newest: Point  # the newest snapshot that this stage knows to be held


@dataclass(frozen=True, kw_only=True)
class SuspectMessage:
    text: str


@dataclass(frozen=True, kw_only=True)
class ReadyMessage:
    attempt: Attempt
    step: int
    report: Report


@dataclass(frozen=True, kw_only=True)
class EvaluatedMessage:
    step: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class ShardMessage:
    step: int
    digest: Digest


@dataclass(frozen=True, kw_only=True)
class HeldMessage:
    step: int
    index: Digest


@dataclass(frozen=True, kw_only=True)
class FailedMessage:
    """A stage cannot go on, and another owner could not either: the job fails."""

    text: str


_CONTROL: Mapping[str, type[Any]] = {
    "begin": BeginMessage,
    "commit": CommitMessage,
    "discard": DiscardMessage,
    "restore": RestoreMessage,
    "replicate": ReplicateMessage,
    "saved": SavedMessage,
    "finish": FinishMessage,
    "join": JoinMessage,
    "suspect": SuspectMessage,
    "ready": ReadyMessage,
    "evaluated": EvaluatedMessage,
    "shard": ShardMessage,
    "held": HeldMessage,
    "failed": FailedMessage,
}
_KIND: Mapping[type[Any], str] = {made: kind for kind, made in _CONTROL.items()}
FROM_LEAD = frozenset({"begin", "commit", "discard", "restore", "replicate", "saved", "finish"})

Message = (
    BeginMessage | CommitMessage | DiscardMessage | RestoreMessage | ReplicateMessage | SavedMessage | FinishMessage
    | JoinMessage | SuspectMessage | ReadyMessage | EvaluatedMessage | ShardMessage | HeldMessage | FailedMessage
)  # fmt: skip


def encode(message: Message, term: int) -> tuple[str, dict[str, Any]]:
    """Kind and header of the frame that carries a control message."""
    return _KIND[type(message)], {"term": term, **plain(message)}


def decode(frame: Frame) -> Message:
    """The control message of a frame. ValueError names what is wrong with it."""
    made = _CONTROL.get(frame.kind)
    if made is None:
        raise ValueError(f"{PROTOCOL} knows no {frame.kind[:40]!r}")
    header = {key: value for key, value in frame.header.items() if key != "term"}
    message: Message = build(made, header, frame.kind)
    return message
