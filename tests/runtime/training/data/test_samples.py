"""Every sample once an epoch, in an order that all stages agree on."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.runtime.job.manifest import DataConfig, OptimizerConfig, TrainConfig
from fusion.runtime.training.data import samples as order
from fusion.runtime.training.data.samples import held_out_indices, sample_indices
from fusion.swarm.directory.records import Digest

CONFIG = TrainConfig(
    steps=5,
    microbatches=3,
    microbatch_size=2,
    sequence=4,
    seed=0,
    optimizer=OptimizerConfig(),
    data=DataConfig(kind="tokens", train=Digest("0" * 64)),
    evaluate_batches=3,
)


@given(st.integers(1, 300), st.integers(0, 2**63 - 1), st.integers(1, 5), st.integers(1, 7))
@settings(max_examples=examples(40))
def test_an_epoch_holds_every_sample_once(samples: int, seed: int, microbatches: int, size: int) -> None:
    config = replace(CONFIG, microbatches=microbatches, microbatch_size=size)
    drawn: list[int] = []
    place = 0
    while len(drawn) < 2 * samples:
        drawn += sample_indices(seed, *divmod(place, microbatches), config, samples)
        place += 1
    assert set(Counter(drawn[:samples]).values()) == {1} and len(set(drawn[:samples])) == samples
    assert set(drawn[samples : 2 * samples]) == set(range(samples))


def test_the_order_depends_on_the_seed_and_the_epoch_and_on_nothing_else() -> None:
    def epoch(seed: int, first: int) -> list[int]:
        config = replace(CONFIG, microbatches=1, microbatch_size=50)
        return sample_indices(seed, first, 0, config, 50)

    assert epoch(1, 0) == epoch(1, 0)
    assert epoch(1, 0) != epoch(2, 0) and epoch(1, 0) != epoch(1, 1)
    assert epoch(1, 0) != list(range(50))


def test_held_out_samples_are_spread_and_the_same_every_time() -> None:
    drawn = [i for batch in range(3) for i in held_out_indices(batch, CONFIG, 600)]
    assert drawn == [0, 100, 200, 300, 400, 500]
    few = [i for batch in range(3) for i in held_out_indices(batch, CONFIG, 2)]
    assert set(few) == {0, 1}


def _image(seed: int, epoch: int, index: int, samples: int) -> int:
    """One index at a time, as the order of samples is defined: jobs that run already depend on it."""
    half = max(1, math.ceil(math.log2(max(2, samples)) / 2))
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{seed}/{epoch}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = (left << half) | right
        if index < samples:
            return index


@given(
    st.one_of(st.integers(1, 70), st.integers(1, 2**40)),
    st.integers(0, 2**63 - 1),
    st.integers(0, 10**6),
    st.integers(1, 70),
)
@settings(max_examples=examples(60))
def test_the_order_is_the_one_that_is_defined(samples: int, seed: int, step: int, size: int) -> None:
    config = replace(CONFIG, microbatches=3, microbatch_size=size)
    first = (3 * step + 1) * size
    places = [divmod(first + i, samples) for i in range(size)]
    assert sample_indices(seed, step, 1, config, samples) == [
        _image(seed, epoch, index, samples) for epoch, index in places
    ]


def test_a_large_microbatch_takes_few_hashes_and_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = 0

    def counted(text: str) -> int:
        nonlocal hashes
        hashes += 1
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    monkeypatch.setattr(order, "_hashed", counted)
    config = replace(CONFIG, microbatches=1, microbatch_size=1 << 15)
    for step in range(12):
        sample_indices(5, step, 0, config, 10**6)
    walks = 12  # an index walks on with a probability of 1 - 10**6 / 2**20
    assert hashes <= 12 * walks * 4 * 1024  # and not 12 * 2**15 * 4
    assert order._window.cache.currsize <= order.REMEMBERED_SAMPLES  # type: ignore[attr-defined]
