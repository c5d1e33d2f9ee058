from __future__ import annotations

from fusion.runtime.hosting.vacant_stages import BEHIND_SECONDS, VacantStages
from fusion.runtime.job.manifest import Manifest, ServeConfig
from fusion.swarm.claims.election import HEAD_START_SECONDS
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId
from fusion.swarm.identity import Identity
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.transport import PeerId

US, OWNER = PeerId("us"), PeerId("owner")
PLACE = (JobId("0" * 64), 0)
MANIFEST = Manifest(
    name="work",
    kind="serve",
    graph=Digest("1" * 64),
    cuts=(1,),
    weights=(Digest("2" * 64),),
    proposed=(OWNER,),
    serve=ServeConfig(cache="kv", max_sequence=16, vocabulary=32),
    author=Identity.generate().peer_id,
    memory_bytes=(7,),
)


def claim(peer: PeerId, role: str = "owner", term: int = 3) -> ClaimRecord:
    return ClaimRecord(
        job=PLACE[0], stage=0, peer=peer, role=role, term=term, score=0.5, step=0, load=0.0  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_stage_is_empty_from_when_it_was_first_seen_without_an_owner() -> None:
    clock = ManualClock()
    vacancies = VacantStages(US, 0.25, clock)
    assert vacancies.look(PLACE, MANIFEST, [], account=OWNER, early=False) is None
    clock.advance(HEAD_START_SECONDS)
    found = vacancies.look(PLACE, MANIFEST, [], account=OWNER, early=False)
    assert found is not None and (found.empty_seconds, found.score) == (HEAD_START_SECONDS, 0.25)
    assert found.memory_bytes == MANIFEST.needed_bytes(0) == 7
    assert vacancies.look(PLACE, MANIFEST, [claim(OWNER)], account=OWNER, early=False) is None
    assert vacancies.look(PLACE, MANIFEST, [], account=OWNER, early=False) is None  # from now on again
    clock.advance(HEAD_START_SECONDS)
    vacancies.filled(PLACE)
    assert vacancies.look(PLACE, MANIFEST, [], account=OWNER, early=False) is None


def test_whoever_stands_by_or_has_the_state_need_not_wait() -> None:
    vacancies = VacantStages(US, 0.25, ManualClock())
    early = vacancies.look(PLACE, MANIFEST, [], account=OWNER, early=True)
    assert early is not None and early.early and early.score == 0.625
    standby = vacancies.look(PLACE, MANIFEST, [claim(US, "standby")], account=OWNER, early=True)
    assert standby is not None and standby.standby and not standby.early and standby.score == 0.25
    assert vacancies.look(PLACE, MANIFEST, [claim(OWNER, "standby")], account=OWNER, early=True) is None


def test_whoever_goes_on_under_a_term_that_was_used_is_left_the_time_to_hear_of_it() -> None:
    clock = ManualClock()
    vacancies = VacantStages(US, 0.25, clock)
    standby = claim(US, role="standby")
    assert vacancies.look(PLACE, MANIFEST, [standby], account=OWNER, early=False, behind=lambda: True) is None
    clock.advance(BEHIND_SECONDS - 0.5)
    assert vacancies.look(PLACE, MANIFEST, [standby], account=OWNER, early=False, behind=lambda: True) is None
    clock.advance(0.5)  # and no longer, for anybody may claim so
    assert (
        vacancies.look(PLACE, MANIFEST, [standby], account=OWNER, early=False, behind=lambda: True)
        is not None
    )


def test_an_owner_has_vanished_unless_it_said_that_it_leaves() -> None:
    vacancies = VacantStages(US, 0.25, ManualClock())
    assert vacancies.vanished(PLACE, []) is None  # there never was one
    vacancies.look(PLACE, MANIFEST, [claim(OWNER)], account=OWNER, early=False)
    assert vacancies.vanished(PLACE, [claim(US, "standby")]) == OWNER
    assert vacancies.vanished(PLACE, [claim(OWNER, "released")]) is None
    vacancies.look(PLACE, MANIFEST, [claim(US)], account=OWNER, early=False)
    assert vacancies.vanished(PLACE, []) is None  # that was we
