from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.counted_checks import CountedChecks, CountedId, counted_ids
from support.directory_records import job_record

from fusion.swarm.authority.belief import Belief, OwnershipView, Standing, believe
from fusion.swarm.authority.law import JobLaw
from fusion.swarm.authority.statements import seal_statement, statement_of, stop_statement
from fusion.swarm.directory.records import Digest, JobId, JobRecord
from fusion.swarm.identity import Identity

AUTHOR, LAUNCHER, LEAD, SECOND, THIRD, IDLE, MALLORY, SYBIL = (Identity.generate() for _ in range(8))
OWNERS = (LEAD, SECOND, THIRD)
JOB = JobId("1" * 64)
LAW = JobLaw(
    job=JOB, author=AUTHOR.peer_id, stages=3, steps=90, name="tiny", proposed=(LEAD.peer_id, SECOND.peer_id)
)
TRUE, FALSE = Digest("5" * 64), Digest("6" * 64)


def view(
    *live: Identity | None, seen: bool = True, law: JobLaw | None = LAW, us: Identity = IDLE
) -> OwnershipView:
    """Who owns each stage now, by stage, None where nobody does. All owned one under term 3, if `seen` then."""
    owners = {stage: (one.peer_id, 3) for stage, one in enumerate(live) if one is not None}
    held = frozenset((stage, 3, one.peer_id) for stage, one in enumerate(OWNERS)) if seen else frozenset()
    held |= {(stage, term, peer) for stage, (peer, term) in owners.items()}
    return OwnershipView(
        law=law, owners=owners, held=held, us=us.peer_id, own_step=90, snapshots=frozenset({TRUE})
    )


def record_of(who: Identity, **changes: Any) -> JobRecord:
    """The lead is at step 40, its snapshot at 32, unless `changes` say otherwise."""
    fields = {
        "job": JOB,
        "term": 3,
        "step": 40,
        "snapshot": TRUE,
        "snapshot_step": 32,
        "lead": None,
        **changes,
    }
    return job_record(who, **fields)


def with_statement(record: JobRecord, who: Identity, of: JobRecord | None = None) -> JobRecord:
    proof = seal_statement(statement_of(of or record, who.peer_id, 7), who.sign)
    return replace(record, proof=(*record.proof, proof))


def ended(who: Identity, state: str = "done", **changes: Any) -> JobRecord:
    return record_of(who, state=state, step=90, snapshot_step=90, lead=who.peer_id, **changes)


def judged(records: list[JobRecord], seen: OwnershipView) -> Belief:
    found = believe(records, seen)
    assert found is not None
    return found


TRUTH = record_of(LEAD, lead=LEAD.peer_id)
FORGERIES = st.builds(
    lambda who, carried, **fields: (
        with_statement(record_of(who, **fields), who) if carried else record_of(who, **fields)
    ),
    st.sampled_from([MALLORY, SYBIL]),
    st.booleans(),
    state=st.sampled_from(["launching", "running", "done", "stopped", "failed"]),
    term=st.integers(0, 2**31),
    step=st.integers(0, 2**53),
    snapshot=st.sampled_from([None, FALSE]),
    snapshot_step=st.integers(-1, 2**53),
    lead=st.sampled_from([None, MALLORY.peer_id, LEAD.peer_id]),
    message=st.just("a lie"),
    name=st.sampled_from(["tiny", "other"]),
    stages=st.integers(0, 9),
    kind=st.sampled_from(["train", "serve"]),
)


@given(st.lists(FORGERIES, max_size=6), st.randoms(use_true_random=False))
def test_no_number_of_strangers_changes_what_is_said_by_who_leads(
    forged: list[JobRecord], random: Any
) -> None:
    records = [TRUTH, *forged]
    random.shuffle(records)
    found = judged(records, view(*OWNERS))
    assert found.record == TRUTH and found.standing is Standing.PROVEN and not found.over


@given(st.lists(FORGERIES, min_size=1, max_size=6))
def test_strangers_alone_show_nothing_while_the_job_has_owners(forged: list[JobRecord]) -> None:
    found = judged(forged, view(LEAD))
    assert not found.over and found.record.snapshot is None and found.record.term == 0
    assert found.record.lead is None and found.record.message == "" and found.record.name == "tiny"


@given(st.lists(FORGERIES, max_size=6), st.sampled_from(["done", "stopped", "failed"]))
def test_most_owners_end_a_job_and_fewer_do_not(forged: list[JobRecord], state: str) -> None:
    one = judged([TRUTH, ended(SECOND, state), *forged], view(*OWNERS))
    assert not one.over and one.doubted
    two = judged([TRUTH, ended(SECOND, state), ended(THIRD, state), *forged], view(*OWNERS))
    assert (
        two.settled and two.record.snapshot == TRUE and two.record.author in (SECOND.peer_id, THIRD.peer_id)
    )


@given(st.lists(FORGERIES, max_size=6))
def test_one_owner_of_three_that_lies_about_what_a_job_came_to_is_outvoted(forged: list[JobRecord]) -> None:
    lie = record_of(MALLORY, state="done", step=10**6, snapshot=FALSE, snapshot_step=90, term=5000)
    seen = view(LEAD, SECOND, MALLORY)
    for carried in (False, True):
        record = with_statement(lie, MALLORY) if carried else lie
        found = judged([record, ended(LEAD), ended(SECOND), *forged], seen)
        assert found.settled and (found.record.snapshot, found.record.step) == (TRUE, 90)


def test_of_two_voices_that_contradict_each_other_the_one_that_others_bear_out_is_believed() -> None:
    """A liar came to the first stage under a high term once, in our eyes alone; the last owner says nothing yet."""
    lie = record_of(MALLORY, state="done", step=10**6, snapshot=FALSE, snapshot_step=90, term=5000)
    seen = view(us=LEAD)
    seen = replace(seen, held=seen.held | {(0, 5000, MALLORY.peer_id)})
    found = judged([lie, ended(LEAD), ended(SECOND)], seen)
    assert found.settled and (found.record.snapshot, found.record.step) == (TRUE, 90)


@pytest.mark.parametrize("us", [LEAD, IDLE])
@pytest.mark.parametrize("step", [90, 10**6])
def test_one_that_took_a_stage_does_not_outvote_the_lead_that_ended_the_job(us: Identity, step: int) -> None:
    """Each has one voice, and the third has not spoken yet: what we say ourselves counts, else what the author's choice says."""
    seen = view(None, SECOND, us=us)
    seen = replace(
        seen, held=frozenset((s, 3 + s, one.peer_id) for s, one in enumerate((LEAD, SECOND, MALLORY)))
    )
    forged = replace(ended(MALLORY, term=5, snapshot=FALSE), step=step)
    found = judged([ended(LEAD), forged], seen)
    assert found.record.snapshot == TRUE and found.record.step == 90


def test_an_owner_that_is_gone_has_a_voice_only_if_it_spoke() -> None:
    assert judged([TRUTH, ended(SECOND)], view(None, None, THIRD)).doubted
    assert judged([TRUTH, ended(SECOND), ended(LEAD)], view(None, None, THIRD)).settled
    assert judged([TRUTH, ended(SECOND), ended(LEAD)], view(None, None, None)).settled
    assert judged([TRUTH, ended(SECOND), ended(THIRD)], view(None, None, THIRD)).settled


@pytest.mark.parametrize("state", ["done", "stopped", "failed"])
def test_who_came_to_one_vacant_stage_of_three_ends_nothing_for_good_though_all_others_are_gone(
    state: str,
) -> None:
    alone = view(None, None, None)
    came = replace(alone, held=alone.held | {(2, 9, MALLORY.peer_id)})
    lie = ended(MALLORY, state, term=9, snapshot=FALSE)
    assert not judged([TRUTH, lie], came).settled
    assert not judged([TRUTH, lie], replace(came, owners={2: (MALLORY.peer_id, 9)})).over
    # Two of the three are a majority, whoever they are.
    both = replace(came, held=came.held | {(0, 9, MALLORY.peer_id)})
    assert judged([TRUTH, lie], both).settled


def test_without_its_manifest_a_job_has_as_many_stages_as_anybody_says() -> None:
    launched = record_of(
        LAUNCHER, state="launching", term=0, step=0, snapshot=None, snapshot_step=-1, stages=3
    )
    alone = OwnershipView(held=frozenset({(0, 3, MALLORY.peer_id)}), us=IDLE.peer_id)
    repeated = with_statement(ended(MALLORY), MALLORY)
    assert not judged([launched, repeated], alone).settled
    two = replace(alone, held=frozenset({(0, 3, LEAD.peer_id), (1, 3, SECOND.peer_id)}))
    assert judged([launched, ended(LEAD, stages=3), ended(SECOND, stages=3)], two).settled


def test_half_of_a_job_of_two_stages_is_enough_where_the_other_half_vanished() -> None:
    law = replace(LAW, stages=2)
    seen = OwnershipView(
        law=law, held=frozenset({(0, 3, LEAD.peer_id), (1, 3, SECOND.peer_id)}), us=IDLE.peer_id
    )
    assert judged([TRUTH, ended(SECOND)], seen).settled
    assert not judged([TRUTH, ended(SECOND)], replace(seen, owners={0: (LEAD.peer_id, 3)})).over


@given(st.lists(FORGERIES, max_size=6))
def test_who_followed_those_proposed_ends_a_job_that_nobody_owns_any_more(forged: list[JobRecord]) -> None:
    """The statements of a proposed lead that died are signed, and anybody may carry them for ever."""
    replayed = with_statement(record_of(MALLORY), LEAD, TRUTH)
    records = [replayed, ended(THIRD), *forged]
    found = judged(records, replace(view(seen=False), successors=frozenset({THIRD.peer_id})))
    assert (found.record.state, found.record.step, found.record.snapshot) == ("done", 90, TRUE)
    assert found.vouched and not found.settled
    assert judged([replayed, ended(THIRD)], view(seen=False)).record.state == "running"
    # Where others own the stages, it is they who know.
    seen = replace(view(*OWNERS[:2]), successors=frozenset({MALLORY.peer_id}))
    assert not judged([TRUTH, ended(MALLORY)], seen).over


def test_training_is_done_at_the_step_of_its_manifest_alone() -> None:
    early = [replace(ended(one), step=89) for one in OWNERS]
    assert not judged([TRUTH, *early], view(*OWNERS)).over
    assert not judged(early, view()).over


@given(st.lists(FORGERIES, max_size=6), st.booleans())
def test_the_author_stops_a_job_whoever_carries_the_word(forged: list[JobRecord], live: bool) -> None:
    stop = seal_statement(stop_statement(JOB, AUTHOR.peer_id, 9), AUTHOR.sign)
    carried = replace(record_of(MALLORY, state="running", message="mine"), proof=(stop,))
    found = judged([TRUTH, carried, *forged], view(*OWNERS) if live else view())
    assert found.settled and found.record.state == "stopped" and found.record.proof == (stop,)
    assert (found.record.snapshot, found.record.step, found.record.term) == (TRUE, 40, 3)
    assert found.record.message == ""
    unsigned = seal_statement(stop_statement(JOB, AUTHOR.peer_id, 9), MALLORY.sign)
    assert not judged([TRUTH, replace(carried, proof=(unsigned,))], view(*OWNERS)).over


def test_who_leads_since_the_end_has_no_voice_in_it() -> None:
    later = view(None, SECOND, THIRD)
    later = replace(later, owners={**later.owners, 0: (IDLE.peer_id, 4)})
    goes_on = record_of(IDLE, term=4, lead=IDLE.peer_id)
    assert judged([goes_on, ended(SECOND), ended(THIRD), ended(MALLORY, term=9)], later).settled
    assert not judged([goes_on, ended(SECOND)], later).over
    assert not judged([goes_on, ended(SECOND, term=4)], replace(later, owners={0: (IDLE.peer_id, 4)})).over


@pytest.mark.parametrize("state", ["done", "failed"])
def test_an_owner_goes_by_the_word_of_its_lead_that_the_job_has_ended_and_others_wait_for_the_rest(
    state: str,
) -> None:
    records = [TRUTH, ended(LEAD, state)]
    live = (None, SECOND, THIRD)
    assert judged(records, view(*live, us=SECOND)).settled
    assert not judged(records, view(*live, us=IDLE)).over
    assert not judged([TRUTH, ended(MALLORY, state)], view(*live, us=SECOND)).over
    assert not judged([TRUTH, ended(LEAD, "stopped")], view(*live, us=SECOND)).over
    # A lead that came to a vacant stage may say anything: an owner knows whether it has taken the last step itself.
    early = replace(view(*live, us=SECOND), own_step=89)
    assert judged(records, early).settled is (state == "failed")
    # And which snapshots have its shards: where the job came to is not for the lead alone to say.
    for made_up in (FALSE, None):
        found = judged([TRUTH, ended(LEAD, state, snapshot=made_up)], view(*live, us=SECOND))
        assert found.settled is (state == "failed")
    # That a job has failed it believes of a lead that the author chose.
    uninvited = replace(view(*live, us=SECOND), law=replace(LAW, proposed=(SECOND.peer_id, THIRD.peer_id)))
    assert judged(records, uninvited).settled is (state == "done")
    # Taken up again under a later lead, earlier statements do not count.
    later = replace(
        view(*live), owners={0: (THIRD.peer_id, 4), 1: (SECOND.peer_id, 3), 2: (THIRD.peer_id, 3)}
    )
    failed = [ended(one, "failed") for one in OWNERS]
    found = judged([*failed, record_of(THIRD, term=4, lead=THIRD.peer_id)], later)
    assert not found.over and not found.doubted


def test_what_a_lead_said_is_believed_when_others_repeat_it_after_it_is_gone() -> None:
    repeated = replace(
        with_statement(record_of(THIRD), LEAD, TRUTH), step=999, snapshot=FALSE, snapshot_step=998
    )
    found = judged(
        [repeated, record_of(MALLORY, term=9, snapshot=FALSE, snapshot_step=99)], view(None, None, None)
    )
    assert found.vouched
    by_stranger = with_statement(record_of(MALLORY, term=9, snapshot=FALSE, message="mine"), LEAD, TRUTH)
    found = judged([by_stranger], view(None, SECOND, THIRD))
    assert (found.record.snapshot, found.record.step, found.record.message) == (TRUE, 40, "")
    assert found.standing is Standing.PROVEN and found.record.lead is None


def test_where_nobody_leads_most_other_owners_say_which_snapshot_is_the_newest() -> None:
    newer = {"snapshot": Digest("7" * 64), "snapshot_step": 36}
    live = (None, SECOND, THIRD)
    alone = judged([TRUTH, record_of(SECOND, **newer)], view(*live))
    assert alone.record.snapshot == TRUE
    both = judged([TRUTH, record_of(SECOND, **newer), record_of(THIRD, **newer)], view(*live))
    assert both.record.snapshot == newer["snapshot"]
    led = judged([TRUTH, record_of(SECOND, **newer), record_of(THIRD, **newer)], view(*OWNERS))
    assert led.record == TRUTH


@given(st.lists(FORGERIES, max_size=6))
def test_at_first_sight_of_a_job_without_owners_those_whom_its_author_chose_go_first(
    forged: list[JobRecord],
) -> None:
    ends = [with_statement(ended(one), one) for one in OWNERS]
    found = judged([*ends, *forged], view(seen=False))
    assert found.over and found.vouched and not found.settled and found.record.snapshot == TRUE
    running = judged([TRUTH, *forged], view(seen=False))
    assert not running.over and running.record.snapshot == TRUE


@given(st.lists(FORGERIES, max_size=6))
def test_a_job_that_was_just_launched_is_not_ended_by_strangers(forged: list[JobRecord]) -> None:
    fields = {"state": "launching", "term": 0, "step": 0, "snapshot": None, "snapshot_step": -1}
    launched = record_of(LAUNCHER, **fields)
    launched = with_statement(launched, AUTHOR)
    found = judged([launched, *forged], view(seen=False))
    assert found.record.state == "launching" and found.standing is Standing.LAUNCHED
    assert found.record.snapshot is None


def test_a_stranger_alone_is_believed_of_a_job_that_nobody_else_speaks_of_but_not_its_terms() -> None:
    found = judged([record_of(MALLORY, term=2**31 - 2)], view(seen=False))
    assert found.standing is Standing.BARE and not found.owned and found.term == 0
    assert judged([TRUTH], view(*OWNERS)).term == 3
    assert believe([], view()) is None


def test_the_words_that_others_may_go_by_travel_with_what_is_believed() -> None:
    ends = [with_statement(ended(one), one) for one in (SECOND, THIRD)]
    found = judged([TRUTH, *ends, with_statement(ended(MALLORY), MALLORY)], view(*OWNERS))
    assert set(found.record.proof) == {data for one in ends for data in one.proof}
    alone = replace(found.record, author=IDLE.peer_id, lead=None)
    assert judged([alone], view(*OWNERS)).settled


def test_forged_statements_cost_one_check_for_each_that_carries_them_and_those_of_strangers_none() -> None:
    """A hundred strangers with eighteen each used to hold a reader up for seconds, at every look."""
    checks = CountedChecks()

    strangers = [Identity.generate() for _ in range(20)]
    forged = []
    for number, one in enumerate(strangers):
        lies = [replace(statement_of(TRUTH, LEAD.peer_id, 7), step=12 * number + i) for i in range(12)]
        own = [statement_of(record_of(other), other.peer_id, 7) for other in strangers]
        signed = [seal_statement(each, other.sign) for each, other in zip(own, strangers, strict=True)]
        proof = (*signed[:6], *(seal_statement(lie, one.sign) for lie in lies))
        forged.append(replace(record_of(one), proof=proof))
    for _ in range(3):
        found = believe([TRUTH, *forged], view(*OWNERS), checks.verify)
        assert found is not None and (found.record.step, found.standing) == (40, Standing.PROVEN)
        assert checks.signers == [LEAD.peer_id] * len(strangers)  # of each once, and never again
    # What an honest peer carries behind a forgery is ignored.
    behind = with_statement(forged[0], AUTHOR, record_of(AUTHOR, state="stopped"))
    assert not judged([TRUTH, behind], view(*OWNERS)).over
    assert judged(
        [TRUTH, with_statement(record_of(MALLORY), AUTHOR, record_of(AUTHOR, state="stopped"))], view(*OWNERS)
    ).over


def test_a_word_is_not_held_against_each_of_thousands_of_owners() -> None:
    """A job of 4096 stages, of which two hundred strangers spoke, used to hold a reader up for seconds."""
    peers = counted_ids(500)
    held = frozenset((stage, 3, peer) for stage, peer in enumerate(peers))
    owners = {stage: (peer, 3) for stage, peer in enumerate(peers[:250])}
    seen = OwnershipView(
        law=replace(LAW, stages=500, proposed=peers), owners=owners, held=held, us=IDLE.peer_id
    )
    strangers = [Identity.generate() for _ in range(20)]
    records = [with_statement(with_statement(record_of(one), one), MALLORY) for one in strangers]
    assert judged(records, seen).standing is Standing.BARE
    assert CountedId.compared <= 4 * len(peers)
