"""Which owner is replaced where a snapshot does not become durable."""

from __future__ import annotations

import pytest

from fusion.runtime.training.snapshots.late_parts import BELIEVED, UNPROVEN, LateParts, LeadDoubt, Trouble
from fusion.runtime.training.step.stalls import LEAD_STALLS

FULL = Trouble("could not save the snapshot of step 6: the disk is full")


def refuses(stage: int) -> Trouble:
    return Trouble(
        f"could not hold the snapshot of step 6: the shard of stage {stage}: no state", refused=stage
    )


@pytest.mark.parametrize(
    ("pending", "troubles", "moved", "ending", "late"),
    [
        ({2}, {}, set(), False, (2,)),  # it saves nothing and says nothing
        ({2}, {2: refuses(1)}, set(), False, (1,)),
        ({2}, {2: refuses(1)}, {1}, False, (2,)),  # the second owner of stage 1 is refused as well
        ({0}, {0: refuses(2)}, {2}, False, (2,)),  # the lead believes itself, and does not replace itself
        ({1}, {1: refuses(0)}, set(), False, (1,)),
        ({0}, {0: FULL}, set(), True, ()),
        ({1, 2}, {2: refuses(2)}, set(), False, (1,)),
        ({1, 3}, {1: FULL}, set(), False, (3,)),  # a full disk costs no owner its stage while steps go on
        ({1, 3}, {1: FULL}, set(), True, (3, 1)),
        ({1, 2, 3}, {1: FULL, 3: refuses(2)}, set(), True, (2, 1, 3)),
        ({3}, {3: refuses(2)}, set(), True, (2, 3)),  # if the accused has no standby the accuser goes
        (set(), {1: FULL, 3: refuses(2)}, set(), True, ()),  # they have done their part since
    ],
)
def test_who_is_late(
    pending: set[int], troubles: dict[int, Trouble], moved: set[int], ending: bool, late: tuple[int, ...]
) -> None:
    assert LateParts(60.0, frozenset(pending), troubles).suspects(moved, ending=ending) == late


def test_an_owner_that_refuses_the_leads_shard_stays_until_the_others_have_checked_it() -> None:
    late = LateParts(60.0, frozenset({1, 2}), {1: refuses(0)})
    assert late.suspects(ending=True, believed=False) == (2,)
    assert late.suspects(ending=True) == (1, 2)
    assert BELIEVED > LEAD_STALLS


def test_a_lead_is_checked_in_the_end_and_again_after_twice_as_long() -> None:
    doubt, began = LeadDoubt(), LEAD_STALLS * 10
    asked = {"indexed": True, "ending": False}
    assert doubt.next(began - 1, began - 1, 10, **asked) == "wait"
    assert doubt.next(began, 0, 10, **asked) == "check"
    assert doubt.next(began, 0, 10, indexed=False, ending=False) == "wait"
    sound = LeadDoubt(checked=began)
    assert sound.next(2 * began - 1, began, 10, **asked) == "wait"
    assert sound.next(2 * began, began, 10, **asked) == "check"
    assert LeadDoubt(checked=began, refused=True).next(began + 1, 0, 10, **asked) == "vote"


def test_without_a_proof_only_the_last_snapshot_is_a_reason_and_each_lead_gets_twice_as_long() -> None:
    long = UNPROVEN * LEAD_STALLS * 10
    for indexed in (False, True):
        doubt = LeadDoubt(checked=long)
        assert doubt.next(long, long, 10, indexed=indexed, ending=False) == "wait"
        assert doubt.next(long, long, 10, indexed=indexed, ending=True) == "vote"
        assert doubt.next(2 * long - 1, long - 1, 10, indexed=indexed, ending=True) == "wait"
        second = LeadDoubt(checked=2 * long, unproven=1)
        assert second.next(2 * long, 2 * long - 1, 10, indexed=indexed, ending=True) == "wait"
        assert second.next(2 * long, 2 * long, 10, indexed=indexed, ending=True) == "vote"
