from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.graph import Graph, TensorType, Variable
from fusion.runtime.job.errors import JobError
from fusion.runtime.training.data.ledger import Ledger
from fusion.runtime.training.snapshots import snapshot
from fusion.runtime.training.step.checkpoint import Checkpoint
from fusion.runtime.training.step.history import UNKNOWN, Version
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.transport import PeerId

JOB = JobId("a" * 64)
D = [Digest(c * 64) for c in "0123456789"]
STAGE = Stage(
    0, Graph((), (Variable("w", TensorType((2, 3), "float32")), Variable("n", TensorType((), "int64"))), (), ()), (), (), ()
)  # fmt: skip
WEIGHTS = {"w": torch.ones(2, 3), "n": torch.tensor(4)}
STATE = {
    "variable/w": torch.ones(2, 3),
    "variable/n": torch.tensor(4),
    "optimizer/w/exp_avg": torch.zeros(2, 3),
    "optimizer/w/step": torch.tensor(2.0),
}


LEDGER = Ledger(steps=7, samples=28, head="e" * 64)


def test_an_index_round_trips_and_belongs_to_its_job() -> None:
    index = snapshot.Index(job=JOB, step=7, shards=(D[1], D[2]), ledger=LEDGER)
    data = snapshot.encode_index(index)
    assert snapshot.decode_index(data, JOB, 2) == index
    assert (
        index.checkpoint(D[3]) == Checkpoint(step=7, digest=D[3], ledger=LEDGER)
        and index.checkpoint(D[3]).sound
    )
    with pytest.raises(JobError, match="another job"):
        snapshot.decode_index(data, JobId("b" * 64), 2)
    with pytest.raises(JobError):
        snapshot.decode_index(data, JOB, 1)
    with pytest.raises(JobError, match="version 1"):
        snapshot.decode_index(msgpack.packb({"job": JOB, "step": 7, "shards": D[:2], "version": 1}), JOB, 2)


@pytest.mark.parametrize(
    "ledger", [replace(LEDGER, steps=6), replace(LEDGER, head="x"), replace(LEDGER, samples=-1)]
)
def test_an_index_whose_ledger_is_not_that_of_its_step_is_refused(ledger: Ledger) -> None:
    data = snapshot.encode_index(snapshot.Index(job=JOB, step=7, shards=(D[1], D[2]), ledger=ledger))
    with pytest.raises(JobError, match="ledger"):
        snapshot.decode_index(data, JOB, 2)


@given(st.binary(max_size=100))
@settings(max_examples=examples(60))
def test_other_bytes_are_no_index(data: bytes) -> None:
    with pytest.raises(JobError):
        snapshot.decode_index(data, JOB, 2)


def test_weights_and_state_round_trip(tmp_path: Path) -> None:
    snapshot.save(WEIGHTS, tmp_path / "weights")
    snapshot.save(STATE, tmp_path / "state")
    assert torch.equal(snapshot.load_weights(tmp_path / "weights", STAGE)["w"], WEIGHTS["w"])
    state = snapshot.load_state(tmp_path / "state", STAGE)
    assert set(state) == set(STATE) and set(snapshot.variables(state)) == {"w", "n"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"variable/w": None}, "lacks variable/w"),
        ({"variable/w": torch.ones(3, 2)}, "the graph says"),
        ({"variable/w": torch.ones(2, 3, dtype=torch.float64)}, "the graph says"),
        ({"codec/x": torch.ones(2, 3)}, "nothing that a codec of this stage leaves out"),
        ({"variable/x": torch.ones(2, 3)}, "'variable/x'"),
        ({"optimizer/x/exp_avg": torch.ones(2, 3)}, "'optimizer/x/exp_avg'"),
        ({"optimizer/w/exp_avg": torch.ones(10_000)}, "not the state of an optimizer"),
    ],
)
def test_a_shard_that_does_not_fit_its_stage_is_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], says: str
) -> None:
    state = {name: value for name, value in {**STATE, **changes}.items() if value is not None}
    snapshot.save(state, tmp_path / "state")
    with pytest.raises(JobError) as error:
        snapshot.load_state(tmp_path / "state", STAGE)
    assert says in str(error.value)


def test_what_is_not_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"\x80\x04\x95 pickled")
    with pytest.raises(JobError, match="not safetensors"):
        snapshot.load_weights(tmp_path / "weights", STAGE)


def test_a_header_of_more_than_a_state_has_is_not_read(tmp_path: Path) -> None:
    more = {f"{i:0200}": torch.zeros(0) for i in range(500)}
    snapshot.save({**STATE, **more}, tmp_path / "state")
    with pytest.raises(JobError, match="a header of 1"):
        snapshot.load_state(tmp_path / "state", STAGE)


def collecting(step: int) -> snapshot.Collector:
    return snapshot.Collector(stages=2, ledger=replace(LEDGER, steps=step), history=D[7])


def at(step: int, history: str = D[7]) -> Version:
    return Version(step, history)


def test_a_snapshot_counts_once_every_stage_holds_its_copies() -> None:
    books = collecting(3).shard(0, at(3), D[0], 0.5)
    assert not books.complete
    assert books.held(0, 3) == books  # nothing to hold yet
    books = books.shard(1, at(3), D[1], 0.25)
    assert books.complete and books.index(JOB).shards == (D[0], D[1]) and not books.durable
    assert books.index(JOB).ledger.steps == 3 and books.seconds == 0.5
    books = books.held(0, 3)
    assert not books.durable and books.held(1, 2) == books
    assert books.held(1, 3).durable


def test_copies_of_every_other_snapshot_go_a_stage_further_where_all_have_owners_of_their_own() -> None:
    away, owners = snapshot.copies_away, {stage: PeerId(name) for stage, name in enumerate("abcd")}
    assert away(1, 2, owners, 4) == 2 and away(2, 2, owners, 4) == 1
    assert away(1, 1, owners, 4) == 1  # a stage of the release before could not be asked
    assert away(1, 2, {**owners, 3: PeerId("a")}, 4) == 1  # its own copy would lie on the same disk
    assert (
        away(1, 2, {0: PeerId("a"), 2: PeerId("c"), 3: PeerId("d")}, 4) == 1
    )  # an owner that we do not know
    assert away(1, 2, {stage: owners[stage] for stage in range(3)}, 3) == 1
    books = collecting(3).shard(0, at(3), D[0], furthest=2)
    assert books.furthest == 2 and books.shard(1, at(3), D[1], furthest=1).furthest == 1
    # Whichever two neighbours vanish, of two snapshots in a row each shard of one is left.
    for stages in range(4, 9):
        for gone in range(stages):
            lost = {gone, (gone + 1) % stages}
            kept = [all({s, (s + n) % stages} - lost for s in range(stages)) for n in (1, 2)]
            assert any(kept), (stages, gone)


def test_only_shards_of_the_step_that_was_asked_for_count() -> None:
    books = collecting(4).shard(0, at(4), D[0])
    assert books.shard(1, at(3), D[1]) == books and books.shard(1, at(5), D[1]) == books
    assert snapshot.Collector(stages=1).shard(0, at(0), D[0]) == snapshot.Collector(stages=1)


def test_only_shards_of_the_history_that_was_asked_for_count() -> None:
    books = collecting(4).shard(0, at(4), D[0])
    assert books.shard(1, at(4, D[8]), D[1]) == books
    assert books.shard(1, at(4, UNKNOWN), D[1]).complete  # of a peer that does not say it
    index = books.shard(1, at(4), D[1]).index(JOB)
    assert index.history == D[7] and index.checkpoint(D[3]).version == at(4)


def test_a_shard_of_another_state_than_its_index_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    snapshot.save(STATE, path, snapshot.marked(at(4)))
    for right in (at(4), at(4, UNKNOWN), None):
        assert snapshot.load_state(path, STAGE, version=right)
    for wrong in (at(3), at(5, UNKNOWN), at(4, D[8])):
        with pytest.raises(JobError, match="a shard of state 4 7777"):
            snapshot.load_state(path, STAGE, version=wrong)
    snapshot.save(STATE, path)  # of a peer that does not say it
    assert snapshot.load_state(path, STAGE, version=at(4))


def test_the_same_state_makes_the_same_blob(tmp_path: Path) -> None:
    made = set()
    for turn in range(8):
        snapshot.save(STATE, tmp_path / str(turn), snapshot.marked(at(4)))
        made.add((tmp_path / str(turn)).read_bytes())
    assert len(made) == 1


def test_an_index_whose_history_is_none_is_refused() -> None:
    index = snapshot.Index(job=JOB, step=7, shards=(D[1], D[2]), ledger=LEDGER, history="x")
    with pytest.raises(JobError, match="history"):
        snapshot.decode_index(snapshot.encode_index(index), JOB, 2)


def test_a_shard_that_is_saved_anew_must_be_held_anew() -> None:
    books = collecting(4).shard(0, at(4), D[0]).shard(1, at(4), D[1]).held(0, 4)
    assert books.shard(1, at(4), D[1]) == books
    assert books.shard(1, at(4), D[2]).holders == frozenset()


def test_a_stage_that_names_another_shard_again_and_again_is_heard_so_many_times() -> None:
    books = collecting(4).shard(0, at(4), D[0]).shard(1, at(4), D[1])
    heard = 0
    for number in range(100):
        before, books = books, books.shard(1, at(4), D[2 + number % 2])
        heard += books.shards != before.shards
    assert heard == snapshot.SAVED_ANEW and books.held(0, 4).held(1, 4).durable
