"""Over how many peers a model is served: no slower than it could be, on as few as that takes, and with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.instances import Builder

from fusion.dag.ir.dims import symbol
from fusion.dag.ir.errors import PlacementError
from fusion.dag.ir.graph import Graph, Input, TensorType
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.placing.place_job import place_job
from fusion.runtime.placing.stage_count import NEAR, Candidate, StageChoice, choose_stages, fewest
from fusion.swarm.directory.records import LinkRecord, Pair, PeerRecord
from fusion.swarm.transport import PeerId

seconds = st.floats(1e-6, 10.0)


def candidate(stages: int, seconds: float, links: float = 0.0) -> Candidate:
    peers = tuple(f"peer-{i}" for i in range(stages))
    return Candidate(peers=peers, token_seconds=seconds, link_seconds=links)


@given(st.lists(st.tuples(st.integers(1, 9), seconds), min_size=1, max_size=12))
def test_few_stages_that_are_nearly_as_fast_as_the_fastest(found: list[tuple[int, float]]) -> None:
    candidates = [candidate(*each) for each in found]
    chosen, best = fewest(candidates), min(each.token_seconds for each in candidates)
    assert chosen in candidates and chosen.token_seconds <= best * (1 + NEAR)
    for each in candidates:
        if (each.stages, each.token_seconds) < (chosen.stages, chosen.token_seconds):
            assert each.token_seconds > best * (1 + NEAR)


@given(st.dictionaries(st.integers(1, 8), seconds, min_size=1))
def test_what_is_looked_at_is_little_and_enough_to_say_why(table: dict[int, float]) -> None:
    """Of a swarm in which those counts are possible."""
    requested: list[int | None] = []

    def place(count: int | None) -> Candidate:
        requested.append(count)
        if count is None:
            count = min(table, key=lambda each: (table[each], each))
        if count not in table:
            raise PlacementError("no")
        return candidate(count, table[count])

    choice = choose_stages(place)
    chosen = choice.chosen
    assert chosen.token_seconds <= min(table.values()) * (1 + NEAR)
    assert len(requested) == len(set(requested)) <= len(table) + 3
    seen = {chosen.stages, *(each.stages for each in choice.others)}
    assert chosen.stages == 1 or chosen.stages - 1 in {*seen, *choice.misfits}
    assert (chosen.stages + 1 in seen) == (chosen.stages + 1 in table)
    assert not set(choice.misfits) & set(table)
    shown = choice.to_json()
    assert shown["chosen"]["stages"] == chosen.stages and shown["misfits"] == choice.misfits


def test_a_model_that_fits_nowhere_is_refused() -> None:
    def place(count: int | None) -> Candidate:
        raise PlacementError("it needs 3 GiB")

    with pytest.raises(PlacementError, match="it needs 3 GiB"):
        choose_stages(place)


@pytest.mark.parametrize(
    ("choice", "line"),
    [
        (
            StageChoice(chosen=candidate(1, 0.012), others=(candidate(2, 0.064, 0.052),)),
            "1 stage on PEER-0: 12 ms a token predicted; 2 stages would take 64 ms (52 ms on links)",
        ),
        (
            StageChoice(chosen=candidate(2, 0.0641, 0.05), others=(candidate(3, 1.5, 1.25),), misfits=(1,)),
            "2 stages on PEER-0, PEER-1: 64.1 ms a token predicted (50 ms on links); 1 stage would not fit; "
            "3 stages would take 1.5 s (1.25 s on links)",
        ),
        (
            StageChoice(chosen=candidate(1, 0.012), of="run"),
            "1 stage on PEER-0: 12 ms a run predicted",
        ),
        (
            StageChoice(chosen=candidate(6, 0.1, 0.05), asked=True),
            "6 stages on PEER-0, PEER-1, PEER-2, PEER-3 and 2 more, as asked: 100 ms a token predicted "
            "(50 ms on links)",
        ),
    ],
)
def test_the_reason_is_one_line(choice: StageChoice, line: str) -> None:
    assert choice.line(str.upper) == line


# --- on peers


WIDTH, BLOCKS, VOCABULARY = 256, 8, 16
WEIGHTS = WIDTH * (WIDTH * BLOCKS + VOCABULARY) * 4


def model() -> Graph:
    ids = Input("input_ids", TensorType((symbol("batch"), symbol("sequence")), "int64"))
    built = Builder(WIDTH, ids)
    built.at = built.add("aten.embedding", built.weight(VOCABULARY, WIDTH), built.at, -1, False)
    for _ in range(BLOCKS):
        built.block(WIDTH, WIDTH)
    return replace(built.graph(), symbols=("batch", "sequence"))


def peer(name: str, memory: int, flops: float = 1e9) -> PeerRecord:
    return PeerRecord(
        peer=PeerId(name), name=name, addresses=(), role="peer", device="cpu", flops_per_second=flops,
        memory_bytes=memory, free_memory_bytes=memory, software="0", opset=9, started_at=0.0,
    )  # fmt: skip


def links(peers: list[PeerRecord], rtt_seconds: float) -> list[LinkRecord]:
    return [
        LinkRecord(
            peer=a.peer,
            pairs=tuple(Pair(b.peer, rtt_seconds * 1000, 1000.0, 0.0) for b in peers if b is not a),
        )
        for a in peers
    ]


def chosen(peers: list[PeerRecord], rtt_seconds: float, stages: int | None = None) -> StageChoice:
    config = ServeConfig(cache="kv", max_sequence=64, vocabulary=VOCABULARY, prefill_chunk=8)
    found = place_job(model(), config, peers, links(peers, rtt_seconds), stages)
    assert found.stage_count is not None
    assert found.proposed == found.stage_count.chosen.peers
    assert found.predicted_seconds == found.stage_count.chosen.token_seconds
    return found.stage_count


def test_one_peer_that_has_room_is_enough_however_fast_the_links() -> None:
    peers = [peer(name, 4 * WEIGHTS) for name in "abc"]
    for rtt in (1e-5, 0.05):
        choice = chosen(peers, rtt)
        assert choice.chosen.stages == 1 and choice.chosen.link_seconds == 0.0
        (two,) = choice.others
        assert two.stages == 2 and two.link_seconds >= rtt  # there, and the token back
        assert two.token_seconds > choice.chosen.token_seconds


def test_a_model_that_no_peer_has_room_for_takes_as_few_as_have_it() -> None:
    peers = [peer(name, WEIGHTS * 2 // 3) for name in "abcd"]
    choice = chosen(peers, 0.01)
    assert choice.chosen.stages == 2 and choice.misfits == (1,)
    assert [each.stages for each in choice.others] == [3]


def test_a_slow_peer_with_room_gives_way_to_fast_ones_where_the_links_allow() -> None:
    peers = [peer("slow", 4 * WEIGHTS, 1e6), peer("b", WEIGHTS * 2 // 3), peer("c", WEIGHTS * 2 // 3)]
    fast, far = chosen(peers, 0.001).chosen, chosen(peers, 5.0).chosen
    assert fast.stages == 2 and "slow" not in fast.peers
    assert far.peers == ("slow",)


def test_the_number_that_was_asked_for_is_taken() -> None:
    peers = [peer(name, 4 * WEIGHTS) for name in "abc"]
    choice = chosen(peers, 0.05, 3)
    assert choice.asked and choice.chosen.stages == 3 and not choice.others


def cut_sizes(*speeds: float) -> list[int]:
    """Nodes of each of two stages on peers of these FLOPs a second."""
    peers = [peer(f"peer-{i}", 4 * WEIGHTS, flops) for i, flops in enumerate(speeds)]
    config = ServeConfig(cache="kv", max_sequence=64, vocabulary=VOCABULARY, prefill_chunk=8)
    found = place_job(model(), config, peers, links(peers, 1e-4), 2)
    return sorted(len(part.graph.nodes) for part in found.parts)


@pytest.mark.parametrize("times", [1.0, 1.02, 1.1, 1.25, 1.5])
def test_stages_take_equal_time_where_one_answer_alone_can_bear_that(times: float) -> None:
    """One answer takes about as long wherever the cut is: several at once want every peer busy. A peer that is faster by so many
    times, or by what a probe is wrong by, gets as much more."""
    less, more = cut_sizes(1e8, times * 1e8)
    assert more <= 1.2 * times * less


def test_a_slow_peer_gets_no_more_than_one_answer_alone_can_bear() -> None:
    less, more = cut_sizes(1e6, 1e8)
    assert more > 4 * less


def test_the_longest_session_has_to_fit() -> None:
    """Though a token alone would."""
    peers = [peer(name, WEIGHTS + (20 << 10)) for name in "ab"]
    config = ServeConfig(cache="kv", max_sequence=64, vocabulary=VOCABULARY, prefill_chunk=64)
    assert chosen(peers, 0.05).chosen.stages == 1
    assert len(place_job(model(), config, peers, links(peers, 0.05)).proposed) == 2
