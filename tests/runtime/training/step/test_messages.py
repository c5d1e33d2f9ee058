from __future__ import annotations

import msgpack
import pytest

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.progress import Progress
from fusion.runtime.training.data.ledger import Ledger
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.checkpoint import Checkpoint
from fusion.runtime.training.step.faults import Fault
from fusion.runtime.training.step.handover_state import HandoverState
from fusion.runtime.training.step.run_statistics import RunStatistics
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.transport import Frame, PeerId

SNAPSHOT = Checkpoint(step=3, digest=Digest("a" * 64), ledger=Ledger(steps=3, samples=12, head="b" * 64))
FAULTS = (Fault(1, 3, PeerId("12D3KooW"), 2, "no memory"),)
STATISTICS = RunStatistics(high=4, discarded=1, last_discard=(2, 3), seconds=7.5)
CODECS = (("x/0", "int8", "none"),)
MESSAGES: tuple[m.Message, ...] = (
    m.Begin((2, 4), 3, m.After(snapshot=True, look=True), STATISTICS, "a" * 64, FAULTS),
    m.Commit((2, 4), 3, 0.1, 0.5, m.After(hold=(1, 2))),
    m.Commit((2, 4), 4, 0.1, 0.5, m.After(codecs=CODECS), "b" * 64),
    m.Discard((2, 4), FAULTS, ((1, 7, 99),)),
    m.Hold((2, 4), 2, (1, 99, 2)),
    m.Restore((2, 5), SNAPSHOT),
    m.Replicate(3, Digest("d" * 64), 2),
    m.Saved(SNAPSHOT),
    m.Move(PeerId("12D3KooW")),
    m.Finish("done", "", Progress(job=JobId("e" * 64), state="done", recent=((3, 0.5),))),
    m.Join(
        step=-1, join_id=(1, 99, 2), links=((0, 1), (2, 3)), attempt=(2, 4), abandoned=True, newest=SNAPSHOT,
        statistics=STATISTICS, history="a" * 64, faults=FAULTS,
    ),
    m.Suspect((1, 99, 2), "gone"),
    m.Suspect(m.NO_JOIN, "", 2),
    m.Ready((2, 4), 3, squared_norm=2.0, loss=1.5, fed="c" * 64, not_finite=("loss",), busy=0.5, sent_bytes=1, received_bytes=2),
    m.Evaluated(3, 1.25),
    m.Shard(3, Digest("d" * 64), 0.25, "a" * 64, 2),
    m.Held(3, Digest("d" * 64)),
    m.Held(3, m.NOTHING, "could not hold the snapshot of step 3: the disk is full"),
    m.Failed((2, 4), "no memory"),
    m.Leaving((1, 99, 2)),
    m.Lack((2, 5), "nobody announces it"),
)  # fmt: skip


def over_the_wire(header: object) -> dict[str, object]:
    found: dict[str, object] = msgpack.unpackb(msgpack.packb(header), strict_map_key=True)
    return found


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: m.Message) -> None:
    kind, header = m.encode(message, 7)
    assert header["term"] == 7
    assert m.decode(Frame(kind, over_the_wire(header), memoryview(b""))) == message


def test_every_kind_of_message_is_tried() -> None:
    assert {m.kind_of(message) for message in MESSAGES} == set(m.KINDS)


def test_what_is_no_message_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="knows no 'dance'"):
        m.decode(Frame("dance", {}, memoryview(b"")))
    with pytest.raises(ValueError, match=r"leaving\.join_id"):
        m.decode(Frame("leaving", {"term": 1, "join_id": [1, 2]}, memoryview(b"")))


@pytest.mark.parametrize("wrong", [{"snapshot": "x"}, {"snapshot_step": 2**54}, {"step": 2**54}])
def test_an_end_and_a_snapshot_that_no_record_can_carry_are_no_message(wrong: dict[str, object]) -> None:
    """They reached the words on the job, and then no word on any job could be signed."""
    finish = m.Finish("done", "", Progress(job=JobId("e" * 64), state="done"))
    _, header = m.encode(finish, 7)
    header["progress"] = {**header["progress"], **wrong}
    with pytest.raises(ValueError, match=r"finish\.progress"):
        m.decode(Frame("finish", over_the_wire(header), memoryview(b"")))
    changes = {"digest": "x"} if "snapshot" in wrong else {"step": 2**54}
    for message in (m.Saved(SNAPSHOT), m.Restore((2, 5), SNAPSHOT)):
        kind, header = m.encode(message, 7)
        header["checkpoint"] = {**header["checkpoint"], **changes}
        with pytest.raises(ValueError, match=rf"{kind}\.checkpoint"):
            m.decode(Frame(kind, over_the_wire(header), memoryview(b"")))


def test_a_handover_arrives_as_it_was_given_and_anything_else_is_refused() -> None:
    handover = HandoverState(
        step=4,
        shard=Digest("e" * 64),
        checkpoint=SNAPSHOT,
        ledger=Ledger(steps=4),
        statistics=STATISTICS,
        codecs=CODECS,
    )
    assert HandoverState.read(over_the_wire(handover.to_header())) == handover
    assert len(msgpack.packb(handover.to_header())) < 16 << 10
    for changes in ({"step": -1}, {"step": 2**54}, {"shard": "x"}, {"checkpoint": None}):
        with pytest.raises(JobError):
            HandoverState.read({**handover.to_header(), **changes})
