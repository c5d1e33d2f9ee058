from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.swarm.authority.names import Ambiguous, Named, may_mean, meant
from fusion.swarm.directory.records import JobId
from fusion.swarm.identity import Identity

ALICE, MALLORY = Identity.generate().peer_id, Identity.generate().peer_id
HONEST = Named(job=JobId("5" * 64), name="tiny", author=ALICE, owned=True, launched_at=1000)
forged = st.builds(
    Named, job=st.integers(0, 2**64).map(lambda n: JobId(f"{n:064x}")), name=st.sampled_from(["tiny", "other"]),
    author=st.sampled_from([MALLORY, None]), owned=st.booleans(), launched_at=st.integers(0, 2**40),
)  # fmt: skip


@given(st.lists(forged, max_size=5, unique_by=lambda each: each.job))
def test_a_stranger_never_takes_a_name_over(strangers: list[Named]) -> None:
    found = [*strangers, HONEST]
    assert (
        meant(found, "tiny", {ALICE})
        == meant(found, f"tiny@{ALICE}")
        == meant(found, HONEST.job)
        == (HONEST,)
    )
    assert meant(found, f"tiny@{ALICE[:24]}")[0] == HONEST
    run = [each for each in strangers if each.name == "tiny" and each.owned and each.author is not None]
    if run:
        with pytest.raises(Ambiguous, match=f"tiny@{ALICE[:16]}"):
            meant(found, "tiny")
    else:
        assert meant(found, "tiny") == (HONEST,)


def test_of_one_author_what_runs_goes_first_and_then_the_newest() -> None:
    later = replace(HONEST, job=JobId("6" * 64), launched_at=2000)
    idle = replace(later, job=JobId("7" * 64), owned=False, launched_at=3000)
    assert meant([HONEST, idle, later], "tiny") == (later, HONEST, idle)
    assert meant([HONEST, idle, later], "777") == (idle,)
    assert meant([HONEST], "huge") == meant([HONEST], "") == ()


def test_what_somebody_calls_a_job_is_looked_into_and_no_more() -> None:
    assert may_mean("tiny", "tiny", HONEST.job) and may_mean("tiny@12D3", "tiny", HONEST.job)
    assert may_mean("55", "other", HONEST.job) and not may_mean("", "other", HONEST.job)
    assert meant([replace(HONEST, author=None)], "tiny") == ()
