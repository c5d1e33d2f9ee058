from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.runtime.serving.ring.prefix import (
    BLOCK_POSITIONS,
    HASH_BYTES,
    MAX_BLOCKS,
    PrefixHash,
    blocks_of,
    checked_chain,
    positions_of,
    shared_blocks,
)
from fusion.runtime.serving.ring.session import Feed, Hop, Opening, SessionId
from fusion.swarm.transport import PeerId

HASH = PrefixHash(b"k" * 32, "a")
blocks = st.lists(st.integers(0, 2), max_size=9)  # of one token each


def tokens(contents: list[int]) -> list[int]:
    return [content for content in contents for _ in range(BLOCK_POSITIONS)]


@given(one=blocks, two=blocks, rest=st.integers(0, BLOCK_POSITIONS - 1))
def test_what_two_chains_share_is_what_the_sequences_begin_with(
    one: list[int], two: list[int], rest: int
) -> None:
    chain = HASH.chain(tokens(one) + [7] * rest)
    assert blocks_of(chain) == len(one) and positions_of(chain) == len(tokens(one))
    common = next(
        (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
    )
    assert shared_blocks(chain, HASH.chain(tokens(two))) == common


def test_nobody_else_has_the_same_chain() -> None:
    chain = HASH.chain([1] * 200)
    assert chain == HASH.chain([1] * 200)
    for other in (replace(HASH, key=b"l" * 32), replace(HASH, apart="b")):
        assert shared_blocks(chain, other.chain([1] * 200)) == 0
    assert shared_blocks(chain, chain[HASH_BYTES:]) == 0
    assert len(HASH.chain([1] * (MAX_BLOCKS + 3) * BLOCK_POSITIONS)) == MAX_BLOCKS * HASH_BYTES


@pytest.mark.parametrize("prefix", [b"x" * 15, b"x" * HASH_BYTES * (MAX_BLOCKS + 1), "text", 5, None])
def test_what_is_no_chain_is_refused(prefix: Any) -> None:
    with pytest.raises(JobError, match="prefix: at most 512 hashes"):
        checked_chain({"prefix": prefix})
    assert checked_chain({}) == b""


def test_an_opening_says_no_more_blocks_than_its_prompt_has() -> None:
    opening = Opening(
        session=SessionId("s"), route=(Hop(PeerId("a"), 1),), prompt_length=130, max_tokens=4,
        sampling=Sampling(), prefix=HASH.chain([1] * 130),
    )  # fmt: skip
    assert Opening.from_header(opening.to_header(), stages=1, max_sequence=200) == opening
    header = {**opening.to_header(), "prompt_length": 127}
    with pytest.raises(JobError, match="no more blocks than the prompt has"):
        Opening.from_header(header, stages=1, max_sequence=200)


def test_a_feed_begins_after_what_is_held() -> None:
    feed = Feed(range(100), recompute=False, start=64)
    assert feed.fed == 64
    chunk, ids = feed.next(30) or pytest.fail("there is more")
    assert (chunk.start, chunk.length, chunk.sample, list(ids)) == (64, 30, False, list(range(64, 94)))
    assert feed.next(30) is not None
    feed.push(100, 5)
    assert feed.next(9) is not None and feed.fed == 101
