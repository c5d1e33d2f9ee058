"""What a gateway expects its stages to hold: what they retained of its sessions on the same route, and nothing that it cannot tell."""

from __future__ import annotations

import pytest

from fusion.runtime.serving.answers import expected_prefixes
from fusion.runtime.serving.answers.expected_prefixes import ExpectedPrefixes
from fusion.runtime.serving.ring.prefix import BLOCK_POSITIONS, PrefixHash
from fusion.runtime.serving.ring.retained import MAX_PER_GATEWAY
from fusion.runtime.serving.ring.session import Hop
from fusion.swarm.transport import PeerId

HERE, ELSEWHERE = (Hop(PeerId("one"), 1),), (Hop(PeerId("two"), 1),)
SYSTEM = tuple(range(BLOCK_POSITIONS))
CHAT = (*SYSTEM, *range(3 * BLOCK_POSITIONS))
OTHER = (*SYSTEM, *range(7, 7 + BLOCK_POSITIONS))


def chain(*tokens: int) -> bytes:
    return PrefixHash(b"key", "apart").chain(tokens)


def test_nothing_is_held_of_what_was_never_begun() -> None:
    known = ExpectedPrefixes()
    assert known.begin(chain(*CHAT), HERE) is None
    assert known.begin(b"", HERE) is None
    known.end(b"", HERE, 0)
    assert known.begin(b"", HERE) is None


def test_a_session_under_way_may_hold_anything() -> None:
    known = ExpectedPrefixes()
    known.begin(chain(*CHAT), HERE)
    assert known.begin(chain(*CHAT), HERE) == 0


def test_the_next_turn_finds_what_the_one_before_has_run() -> None:
    known = ExpectedPrefixes()
    known.end(chain(*CHAT), HERE, len(CHAT))
    assert known.begin(chain(*CHAT, *SYSTEM, 1), HERE) == len(CHAT)
    assert known.begin(chain(*CHAT[:-1]), HERE) == len(CHAT) - BLOCK_POSITIONS


def test_another_chat_with_the_same_beginning_takes_nothing_away() -> None:
    known = ExpectedPrefixes()
    known.end(chain(*CHAT), HERE, len(CHAT))
    assert known.begin(chain(*OTHER), HERE) == BLOCK_POSITIONS
    known.end(chain(*OTHER), HERE, len(OTHER))
    assert known.begin(chain(*CHAT), HERE) == len(CHAT)


def test_what_an_answer_had_not_reached_is_not_expected() -> None:
    known = ExpectedPrefixes()
    known.end(chain(*CHAT), HERE, 0)
    assert known.begin(chain(*CHAT), HERE) == 0
    known.end(chain(*CHAT), HERE, 2 * BLOCK_POSITIONS + 5)
    assert known.begin(chain(*CHAT), HERE) == 2 * BLOCK_POSITIONS


def test_on_another_route_nobody_can_tell() -> None:
    known = ExpectedPrefixes()
    known.end(chain(*CHAT), HERE, len(CHAT))
    assert known.begin(chain(*CHAT), ELSEWHERE) == 0
    known.end(chain(*OTHER), ELSEWHERE, len(OTHER))
    assert known.begin(chain(*CHAT), HERE) == len(CHAT)


def test_what_a_stage_does_not_hold_is_asked_for_the_next_time_and_what_others_share_stays() -> None:
    known = ExpectedPrefixes()
    known.end(chain(*CHAT), HERE, len(CHAT))
    known.end(chain(*OTHER), HERE, len(OTHER))
    known.forget(chain(*CHAT))
    assert known.begin(chain(*CHAT), HERE) == 0
    assert known.begin(chain(*OTHER), HERE) == len(OTHER)


def test_no_more_sequences_are_expected_than_a_stage_keeps() -> None:
    known = ExpectedPrefixes()
    known.end(chain(*CHAT), HERE, len(CHAT))
    for other in range(1, MAX_PER_GATEWAY + 1):
        assert known.begin(chain(*CHAT), HERE) == len(CHAT)
        known.end(chain(*range(other, other + BLOCK_POSITIONS)), HERE, BLOCK_POSITIONS)
    assert known.begin(chain(*CHAT), HERE) == 0


def test_what_ended_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_prefixes, "REMEMBERED_BLOCKS", 4)
    known = ExpectedPrefixes()
    known.end(chain(*CHAT), HERE, len(CHAT))
    known.end(chain(*range(50, 50 + BLOCK_POSITIONS)), HERE, BLOCK_POSITIONS)
    assert known.begin(chain(*SYSTEM), HERE) is None
    assert known.begin(chain(*CHAT), HERE) == len(CHAT)
