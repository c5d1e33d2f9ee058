"""What the stages of a training job say to each other on `/fusion/stage/3`, one frame each.

A stream carries one direction between two stages of one job: the sending stage opens it with `hello`, the receiver
answers `welcome`, then only the opener speaks. Every frame carries the term that its sender holds its stage under.

    activation, gradient, tie        tensors, see `TensorHeader`
    begin commit discard hold        the lead to the others
    restore replicate saved move finish
    join suspect ready evaluated     the others to the lead
    shard held failed leaving lack

A message is what the two machines of this folder take in and give out: its kind is the name of its class, and the
fields of its header are its own.
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
MAX_TROUBLE = 300  # characters of what keeps a stage from its part of a snapshot
NO_JOIN = (0, 0, 0)
NEXT_STAGE = 1  # whose owner holds the second copy of a shard, before anybody could be asked for more

# (term of the stage's owner, the incarnation that its host drew when it was loaded, how often it has joined since). A
# peer that starts anew may find its claim still its own: then another host follows under the same term.
JoinId = tuple[int, int, int]
Links = tuple[tuple[int, int], ...]  # (stage, term of its owner) at the other end of each link of a stage


@dataclass(frozen=True, kw_only=True)
class Hello:
    """First frame of a stream: stage `source` under its owner's `term` will speak to stage `target`."""

    job: JobId
    source: int
    target: int
    term: int
    target_term: int  # the term under which the opener believes the receiver to hold its stage
    incarnation: int = 0  # drawn when the opener began its stage: not twice, even where it used a term twice
    # Of the opener, sealed (`Leases.sealed`): the receiver need not look for it in the directory.
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
    masked: bool = False  # a gradient at the elements of the activation that had any, in their order
    evaluate: bool = False  # of the held-out data, forward only


@dataclass(frozen=True, kw_only=True)
class After:
    """What every stage does once its state is that of a step, before it begins the step."""

    evaluate: bool = False
    snapshot: bool = False
    finish: bool = False  # no further step begins
    hold: tuple[int, ...] = ()  # stages that are handed over now: nothing begins until they have joined anew
    codecs: EdgeCodecs | None = None  # what tensors are sent as from now on; None: as before
    look: bool = False  # at every tensor of the step: a number in it was not finite


# --- the lead to the others


@dataclass(frozen=True)
class Begin:
    """Do what `after` says, then run the microbatches of `step`."""

    attempt: Attempt
    step: int
    after: After
    statistics: RunStatistics = CLEAN
    history: str = UNKNOWN  # of the state that the step is run on
    faults: Faults = ()  # what failed so far at the steps that are not committed


@dataclass(frozen=True)
class Commit:
    """Apply the gradients of `step`; `after` says what precedes the next step, which begins at once."""

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
    faults: Faults = ()  # as in `Begin`: the lead may be the next to go
    # (stage, term, incarnation) of owners that are to leave theirs
    give_up: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Hold:
    """To a stage that leaves while no step is under way: hand over the state as it is."""

    attempt: Attempt
    stage: int
    join_id: JoinId  # its join that this answers: one that has joined again since asks again


@dataclass(frozen=True)
class Restore:
    """Everybody back to `checkpoint`."""

    attempt: Attempt
    checkpoint: Checkpoint


@dataclass(frozen=True)
class Replicate:
    """All shards are saved: hold the index and, beside your own shard, that of the stage which is `away` before you."""

    step: int
    index: Digest
    away: int = NEXT_STAGE


@dataclass(frozen=True)
class Saved:
    """Every shard of this snapshot lies on two peers (where there are two): it is the newest to go back to."""

    checkpoint: Checkpoint


@dataclass(frozen=True)
class Move:
    """Hand your stage to that idle peer at the next step boundary, if it takes it."""

    peer: PeerId


@dataclass(frozen=True)
class Finish:
    """The job has ended, and how it went: from now on any stage can tell whoever asks."""

    state: Literal["done", "stopped", "failed"]
    text: str = ""
    progress: Progress | None = None


# --- the others to the lead


@dataclass(frozen=True, kw_only=True)
class Join:
    """A stage is linked to its partners and has the state of `step`."""

    step: int  # -1: it has none
    join_id: JoinId
    history: str = UNKNOWN  # of the state: a digest of the commits that were applied
    links: Links = ()  # the term under which each stage that it works with is held, as it knows
    attempt: Attempt = NO_ATTEMPT  # the newest that it has heard of
    abandoned: bool = False  # it dropped a step of that attempt before the lead said so
    newest: Checkpoint = START  # the newest snapshot that the stage knows to be held
    before: Checkpoint = START  # the one before it
    statistics: RunStatistics = CLEAN
    faults: Faults = ()  # of which a lead has told it

    @property
    def version(self) -> Version:
        return Version(self.step, self.history)


@dataclass(frozen=True)
class Suspect:
    """The stage, or a link that it needs, is gone after its join: discard what is under way. Or, with `waits_for` and a join
    that nobody has, which every lead passes over: our step stands still, and we wait for that stage."""

    join_id: JoinId
    text: str = ""
    # `fusion.runtime.training.step.stalls`; a lead of an older peer does not know it
    waits_for: int | None = None


@dataclass(frozen=True)
class Ready:
    """The gradients of `step` are complete, and summed over the tie-groups."""

    attempt: Attempt
    step: int
    squared_norm: float = 0.0
    loss: float | None = None  # mean over the microbatches, from the stage that makes it
    # `fusion.runtime.training.data.ledger.fed_digest` of the samples it read; None where it reads none
    fed: str | None = None
    not_finite: tuple[str, ...] = ()  # words of `fusion.runtime.training.step.faults`, where it looked
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
    """Our part of the snapshot is saved."""

    step: int
    digest: Digest
    seconds: float = 0.0  # that saving kept the device from the steps
    history: str = UNKNOWN  # of the state that was saved
    furthest: int = NEXT_STAGE  # `away` that we can be asked for

    @property
    def version(self) -> Version:
        return Version(self.step, self.history)


@dataclass(frozen=True)
class Held:
    """We hold what `replicate` asked for; or, with the index NOTHING, which every lead passes over, what keeps us from saving or
    holding our part of that step's snapshot."""

    step: int
    index: Digest
    trouble: str = ""  # one line for people; a lead of an older peer does not know it


@dataclass(frozen=True)
class Failed:
    """Our arithmetic failed in this attempt; we give the stage up."""

    attempt: Attempt
    text: str


@dataclass(frozen=True)
class Leaving:
    """Our peer leaves: hand the stage over at the next step boundary."""

    join_id: JoinId


@dataclass(frozen=True)
class Lack:
    """Nobody holds our shard of what the restore `attempt` asked for."""

    attempt: Attempt
    text: str


FromLead = Begin | Commit | Discard | Hold | Restore | Replicate | Saved | Move | Finish
ToLead = Join | Suspect | Ready | Evaluated | Shard | Held | Failed | Leaving | Lack
Message = FromLead | ToLead
KINDS: dict[str, type[Any]] = {made.__name__.lower(): made for made in get_args(Message)}


def kind_of(message: Message) -> str:
    return type(message).__name__.lower()


def encode(message: Message, term: int) -> tuple[str, dict[str, Any]]:
    """Kind and header of the frame that carries a message."""
    header = {"term": term, **plain(message)}
    if isinstance(message, Held) and not message.trouble:
        del header["trouble"]  # as peers know it that have no word for it
    if isinstance(message, Suspect) and message.waits_for is None:
        del header["waits_for"]
    return kind_of(message), header


def decode(frame: Frame) -> Message:
    """The message of a frame. ValueError names what is wrong with it."""
    made = KINDS.get(frame.kind)
    if made is None:
        raise ValueError(f"{STAGE.name} knows no {frame.kind[:40]!r}")
    header = {key: value for key, value in frame.header.items() if key != "term"}
    message: Message = build(made, header, frame.kind, known_only=True)
    return message
