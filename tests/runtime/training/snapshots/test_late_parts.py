"""Which owner is replaced where a snapshot does not become durable."""

from __future__ import annotations

import pytest

from fusion.runtime.training.snapshots.late_parts import LateParts, Trouble

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
