"""Every sample once an epoch, in an order that all stages agree on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.runtime.job.manifest import DataConfig, OptimizerConfig, TrainConfig
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
@settings(max_examples=40, deadline=None)
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
