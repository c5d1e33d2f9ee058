"""The messages between the stages of a training job on `/fusion/stage/3`, one frame each.

A stream carries one direction between two stages of one job: the sending stage opens it with `hello`, the receiver
answers `welcome`, then only the opener sends. Every frame carries the term under which its sender holds its stage.

    activation, gradient, tie        tensors, see `TensorHeader`
    begin commit discard hold        the lead to the others
    restore replicate saved move finish
    join suspect ready evaluated     the others to the lead
    shard held failed leaving lack

Messages are inputs and outputs of the two state machines of this folder. A frame's kind is the name of the message's class,
its header the message's fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from fusion.runtime.job.fields import build, plain
from fusion.runtime.job.manifest import EdgeCodecs
from fusion.runtime.job.progress import Progress
from fusion.runtime.job.protocol import STAGE
from fusion.runtime.training.step.checkpoint import START, Checkpoint
from fusion.runtime.training.step.faults import Faults
from fusion.runtime.training.step.history import UNKNOWN, Version
from fusion.runtime.training.step.run_statistics import CLEAN, NO_ATTEMPT, Attempt, RunStatistics
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.transport import Frame, PeerId

TENSOR_KINDS = ("activation", "gradient", "tie")
NOTHING = Digest("")
MAX_TROUBLE = 300  # characters of the reason why a stage cannot save or hold its part of a snapshot
NO_JOIN = (0, 0, 0)
NEXT_STAGE = 1  # its owner holds the second copy of a shard

# (term of the stage's owner, incarnation of its host, number of joins since it was loaded). A peer that restarts may still
# hold its claim: then another host follows under the same term.
JoinId = tuple[int, int, int]
Links = tuple[tuple[int, int], ...]  # (stage, term of its owner) at the other end of each link of a stage


@dataclass(frozen=True, kw_only=True)
class Hello:
    """First frame of a stream from stage `source`, held under `term`, to stage `target`."""

    job: JobId
    source: int
    target: int
    term: int
    target_term: int  # the term under which the opener believes the receiver to hold its stage
    incarnation: int = 0  # drawn at random when the opener started its stage, new even under the same term
    # The opener's, sealed (`Leases.sealed`): saves the receiver a lookup in the directory.
    claim: bytes = b""


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
    masked: bool = False  # only the elements that the activation was sent with, in their order
    evaluate: bool = False  # held-out data, forward only


@dataclass(frozen=True, kw_only=True)
class After:
    """What every stage does between a commit and the next step."""

    evaluate: bool = False
    snapshot: bool = False
    finish: bool = False  # no further step begins
    hold: tuple[int, ...] = ()  # stages that are handed over now: no step begins until they have joined again
    codecs: EdgeCodecs | None = None  # of the edges, from now on; None: unchanged
    look: bool = False  # check every tensor of the step: it had a number that is not finite


# --- the lead to the others


@dataclass(frozen=True)
class Begin:
    """Do what `after` asks for, then run the microbatches of `step`."""

    attempt: Attempt
    step: int
    after: After
    statistics: RunStatistics = CLEAN
    history: str = UNKNOWN  # of the state that the step is run on
    faults: Faults = ()  # at steps that are not committed


@dataclass(frozen=True)
class Commit:
    """Apply the gradients of `step`, do what `after` asks for, and begin the next step."""

    attempt: Attempt
    step: int
    learning_rate: float
    clip_factor: float
    after: After
    made_of: str = UNKNOWN  # digest of the step's contents (`fusion.runtime.training.step.history`)


@dataclass(frozen=True)
class Discard:
    """Drop gradients; the state is still that of the step before."""

    attempt: Attempt
    faults: Faults = ()  # as in `Begin`: the lead may be replaced itself
    # (stage, term, incarnation) of owners that are to give their stage up
    give_up: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Hold:
    """To a stage that leaves while no step is running: hand over the state as it is."""

    attempt: Attempt
    stage: int
    join_id: JoinId  # the join that this answers: a stage that has joined since asks again


@dataclass(frozen=True)
class Restore:
    """To all stages: load `checkpoint`."""

    attempt: Attempt
    checkpoint: Checkpoint


@dataclass(frozen=True)
class Replicate:
    """All shards are saved: hold the index and, beside your own shard, that of the stage `away` places before yours."""

    step: int
    index: Digest
    away: int = NEXT_STAGE


@dataclass(frozen=True)
class Saved:
    """Every shard of this snapshot is on two peers (where there are two): it is the newest that can be restored."""

    checkpoint: Checkpoint


@dataclass(frozen=True)
class Move:
    """Hand your stage to the idle peer `peer` at the next step boundary, if it accepts."""

    peer: PeerId


@dataclass(frozen=True)
class Finish:
    """The job has ended: from now on every stage can report how."""

    state: Literal["done", "stopped", "failed"]
    text: str = ""
    progress: Progress | None = None


# --- the others to the lead


@dataclass(frozen=True, kw_only=True)
class Join:
    """A stage is linked to its partners and holds the state of `step`."""

    step: int  # -1: none
    join_id: JoinId
    history: str = UNKNOWN  # of the state: a digest of the commits that were applied
    links: Links = ()  # of the stage: the term of each partner, as it knows
    attempt: Attempt = NO_ATTEMPT  # the newest that it has received
    abandoned: bool = False  # it dropped a step of that attempt before the lead discarded it
    newest: Checkpoint = START  # the newest snapshot that the stage knows to be held
    before: Checkpoint = START  # the one before it
    statistics: RunStatistics = CLEAN
    faults: Faults = ()  # as the last lead sent them

    @property
    def version(self) -> Version:
        return Version(self.step, self.history)


@dataclass(frozen=True)
class Suspect:
    """The stage or one of its links was lost after its join: discard the running step. Or, with `waits_for` and NO_JOIN, which
    every lead ignores otherwise: our step has stalled, and we wait for that stage."""

    join_id: JoinId
    text: str = ""
    # `fusion.runtime.training.step.stalls`; unknown to older leads
    waits_for: int | None = None


@dataclass(frozen=True)
class Ready:
    """The gradients of `step` are complete, and summed over the tie-groups."""

    attempt: Attempt
    step: int
    squared_norm: float = 0.0
    loss: float | None = None  # mean over the microbatches, from the stage that computes it
    # `fusion.runtime.training.data.ledger.fed_digest` of the samples it read; None where it reads none
    fed: str | None = None
    not_finite: tuple[
        str, ...
    ] = ()  # where, in the terms of `fusion.runtime.training.step.faults`; empty if not checked
    busy: float = 0.0  # share of the step's time that the stage computed
    sent_bytes: int = 0  # payload since the stage was loaded
    received_bytes: int = 0


@dataclass(frozen=True)
class Evaluated:
    """The loss on held-out data, with the state of `step`."""

    step: int
    loss: float


@dataclass(frozen=True)
class Shard:
    """The stage's shard of the snapshot is saved."""

    step: int
    digest: Digest
    seconds: float = 0.0  # that saving held up the device
    history: str = UNKNOWN  # of the saved state
    furthest: int = NEXT_STAGE  # the largest `away` of `replicate` that the stage supports

    @property
    def version(self) -> Version:
        return Version(self.step, self.history)


@dataclass(frozen=True)
class Held:
    """The stage holds what `replicate` asked for; or, with the index NOTHING, which every lead ignores otherwise, `trouble` says
    why it cannot save or hold its part of that step's snapshot."""

    step: int
    index: Digest
    trouble: str = ""  # one line; unknown to older leads
    refused: int | None = None  # the stage whose shard it can neither fetch nor load; unknown to older leads


@dataclass(frozen=True)
class Failed:
    """The stage's arithmetic failed in this attempt; its owner gives it up."""

    attempt: Attempt
    text: str


@dataclass(frozen=True)
class Leaving:
    """The stage's peer leaves: hand the stage over at the next step boundary."""

    join_id: JoinId


@dataclass(frozen=True)
class Lack:
    """No peer holds the stage's shard of the snapshot that the restore `attempt` asked for."""

    attempt: Attempt
    text: str


FromLead = Begin | Commit | Discard | Hold | Restore | Replicate | Saved | Move | Finish
ToLead = Join | Suspect | Ready | Evaluated | Shard | Held | Failed | Leaving | Lack
Message = FromLead | ToLead
KINDS: dict[str, type[Any]] = {each.__name__.lower(): each for each in get_args(Message)}


def kind_of(message: Message) -> str:
    return type(message).__name__.lower()


def encode(message: Message, term: int) -> tuple[str, dict[str, Any]]:
    """Kind and header of the frame that carries a message."""
    header = {"term": term, **plain(message)}
    if isinstance(message, Held) and not message.trouble:
        del header["trouble"]  # older peers refuse fields that they do not know
    if isinstance(message, Held) and message.refused is None:
        del header["refused"]
    if isinstance(message, Suspect) and message.waits_for is None:
        del header["waits_for"]
    return kind_of(message), header


def decode(frame: Frame) -> Message:
    """The message of a frame. ValueError names what is wrong with it."""
    message_class = KINDS.get(frame.kind)
    if message_class is None:
        raise ValueError(f"{STAGE.name} knows no {frame.kind[:40]!r}")
    header = {key: value for key, value in frame.header.items() if key != "term"}
    message: Message = build(message_class, header, frame.kind, known_only=True)
    return message
