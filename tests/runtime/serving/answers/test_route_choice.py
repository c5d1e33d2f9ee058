from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fusion.runtime.serving.answers.route_choice import Costs, RemainingWork, RouteOptions, holders
from fusion.runtime.serving.ring.session import Hop
from fusion.swarm.directory.records import ClaimRecord, JobId, Pair
from fusion.swarm.links.view import LinkView
from fusion.swarm.transport import PeerId

JOB = JobId("5" * 64)
GATEWAY, A, B, C = (PeerId(name) for name in "gabc")
COSTS = Costs(stage_seconds=(0.01, 0.01), hop_bytes=(16384.0,))
NEW = RemainingWork(20, 200)


def claim(peer: PeerId, **fields: Any) -> ClaimRecord:
    given: dict[str, Any] = {
        "job": JOB, "stage": 1, "peer": peer, "role": "owner", "term": 1, "score": 1.0, "step": 0, "load": 0.0,
        "ready": True, **fields,
    }  # fmt: skip
    return ClaimRecord(**given)


def view(**mbps: float) -> LinkView:
    """10 ms and 80 Mbps between all, but for the pairs given."""
    peers = (GATEWAY, A, B, C)
    pairs = {
        (one, two): Pair(two, 10.0, mbps.get(f"{one}{two}", 80.0), 0.0)
        for one in peers
        for two in peers
        if one != two
    }
    return LinkView(pairs=pairs)


STAGES = ((claim(A, term=7),), (claim(B, term=2), claim(C, role="replica", term=2)))
BY_B, BY_C = (Hop(A, 7), Hop(B, 2)), (Hop(A, 7), Hop(C, 2))


def ways(
    links: LinkView, stages: Any = STAGES, costs: Costs = COSTS, own_sessions: Mapping[Any, int] | None = None
) -> RouteOptions:
    return RouteOptions(
        stages=stages, links=links, gateway=GATEWAY, costs=costs, own_sessions=own_sessions or {}
    )


def loaded(b: float, c: float) -> Any:
    return STAGES[0], (replace(STAGES[1][0], load=b), replace(STAGES[1][1], load=c))


def test_the_owner_comes_first_and_only_ready_replicas_after_it() -> None:
    owner, old = claim(A, term=4), claim(C, term=3)
    ready, loading = claim(B, role="replica"), claim(C, role="replica", ready=False)
    standby = claim(C, role="standby")
    assert holders([ready, old, owner, loading, standby]) == (owner, ready)
    assert holders([standby, loading]) == ()
    assert holders([ready]) == (ready,)


def test_sessions_leave_a_link_that_became_slow() -> None:
    assert ways(view()).choose(NEW) == BY_B
    assert ways(view(ab=8.0)).choose(NEW) == BY_C
    assert ways(view(ab=8.0)).better(NEW, BY_B) == BY_C


def test_a_session_stays_where_moving_would_not_pay() -> None:
    assert ways(view(), loaded(0, 0)).better(NEW, BY_C) is None, "no worse than the other"
    assert ways(view(ac=60.0)).better(NEW, BY_C) is None, "hardly worse"
    assert ways(view(ab=8.0)).better(RemainingWork(20, 5), BY_B) is None, "over soon"
    assert ways(view(ab=8.0, ac=10.0)).better(RemainingWork(4000, 200), BY_B) is None, (
        "all would have to be read anew"
    )


def test_activations_decide_only_where_they_are_large() -> None:
    small = replace(COSTS, hop_bytes=(64.0,))
    assert ways(view(ab=8.0), costs=small).better(NEW, BY_B) is None
    assert ways(view(ab=8.0, ac=6.0)).choose(NEW) == BY_B
    assert ways(view(ab=0.5), costs=small).choose(RemainingWork(20_000, 10)) == BY_C, "a long prompt"


def test_without_a_cache_the_whole_sequence_crosses_for_each_token() -> None:
    small = replace(COSTS, hop_bytes=(1024.0,), cached=False)
    assert ways(view(ab=2.0), costs=small).better(RemainingWork(500, 200), BY_B) == BY_C
    assert ways(view(ab=2.0), costs=small).better(RemainingWork(1, 200), BY_B) is None


def test_a_new_session_goes_where_fewer_are() -> None:
    assert ways(view(), loaded(1, 0)).choose(NEW) == BY_C
    assert ways(view(), loaded(1, 2)).choose(NEW) == BY_B
    assert ways(view(), own_sessions={(1, B): 1}).choose(NEW) == BY_C, "no claim says so yet"


def test_a_session_is_not_in_its_own_way() -> None:
    alone = ways(view(), loaded(1, 0), own_sessions={(1, B): 1})
    assert alone.better(NEW, BY_B) is None
    crowded = ways(view(), loaded(6, 0), own_sessions={(1, B): 1})
    assert crowded.better(NEW, BY_B) == BY_C
    moved = ways(view(), loaded(2, 0), own_sessions={(1, B): 1, (1, C): 1})
    assert moved.better(NEW, BY_B) is None, "another of ours has just gone there"


def test_a_holder_whose_claim_has_run_out_is_left_to_the_session() -> None:
    gone = (STAGES[0], STAGES[1][1:])
    assert ways(view(ab=8.0), gone).better(NEW, BY_B) is None


def test_nothing_known_of_links_is_no_reason_not_to_answer() -> None:
    assert ways(LinkView()).choose(NEW) == BY_B
