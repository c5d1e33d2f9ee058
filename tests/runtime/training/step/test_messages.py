from __future__ import annotations

import msgpack
import pytest

from fusion.runtime.job.errors import JobError
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step import protocol as s
from fusion.runtime.training.step.checkpoint import Checkpoint
from fusion.runtime.training.step.handover_state import HandoverState
from fusion.swarm.directory.records import Digest
from fusion.swarm.transport import Frame, PeerId

POINT = Checkpoint(step=3, digest=Digest("a" * 64), ledger=s.Ledger(steps=3, samples=12, head="b" * 64))
TALLY = s.RunStatistics(high=4, discarded=1, last_discard=(2, 3), failed=(4, 1), seconds=7.5)
REPORT = s.StageReport(squared_norm=2.0, loss=1.5, fed="c" * 64, busy=0.5, sent_bytes=1, received_bytes=2)
MESSAGES: tuple[m.Message, ...] = (
    m.BeginMessage(attempt=(2, 4), step=3, after=s.After(snapshot=True), tally=TALLY),
    m.CommitMessage(attempt=(2, 4), step=3, learning_rate=0.1, clip_factor=0.5, after=s.After(hold=(1, 2))),
    m.DiscardMessage(attempt=(2, 4)),
    m.HoldMessage(attempt=(2, 4), stage=2, entry=(1, 99, 2)),
    m.RestoreMessage(attempt=(2, 5), point=POINT),
    m.SavedMessage(point=POINT),
    m.MoveMessage(peer=PeerId("12D3KooW")),
    m.CommitMessage(
        attempt=(2, 4), step=4, learning_rate=0.1, clip_factor=0.5, after=s.After(wires=(("x/0", "int8", "none"),))
    ),
    m.JoinMessage(
        step=-1, newest=POINT, entry=(1, 99, 2), links=((0, 1), (2, 3)), attempt=(2, 4), abandoned=True, tally=TALLY
    ),
    m.SuspectMessage(text="gone", entry=(1, 99, 2)),
    m.ReadyMessage(attempt=(2, 4), step=3, report=REPORT),
    m.ShardMessage(step=3, digest=Digest("d" * 64), seconds=0.25),
    m.FailedMessage(text="no memory", attempt=(2, 4)),
    m.LeavingMessage(entry=(1, 99, 2)),
    m.LackMessage(attempt=(2, 5), text="nobody announces it"),
)  # fmt: skip


def over_the_wire(header: object) -> dict[str, object]:
    found: dict[str, object] = msgpack.unpackb(msgpack.packb(header), strict_map_key=True)
    return found


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: m.Message) -> None:
    kind, header = m.encode(message, 7)
    assert header["term"] == 7
    assert m.decode(Frame(kind, over_the_wire(header), memoryview(b""))) == message


def test_what_is_no_message_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="knows no 'dance'"):
        m.decode(Frame("dance", {}, memoryview(b"")))
    with pytest.raises(ValueError, match=r"leaving\.entry"):
        m.decode(Frame("leaving", {"term": 1, "entry": [1, 2]}, memoryview(b"")))


def test_a_baton_arrives_as_it_was_given_and_anything_else_is_refused() -> None:
    baton = HandoverState(
        step=4,
        shard=Digest("e" * 64),
        point=POINT,
        ledger=s.Ledger(steps=4),
        tally=TALLY,
        wires=(("x/0", "int8", "none"),),
    )
    assert HandoverState.read(over_the_wire(baton.to_header())) == baton
    assert len(msgpack.packb(baton.to_header())) < 16 << 10
    for changes in ({"step": -1}, {"shard": "x"}, {"stray": 1}, {"point": None}):
        with pytest.raises(JobError):
            HandoverState.read({**baton.to_header(), **changes})
