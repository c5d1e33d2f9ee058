"""What the samples that peers read of those held out are: as many as are asked for, each as often as any other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.runtime.datasets.held_out import even_batches, in_unlike_places
from fusion.runtime.job.manifest import DataConfig, OptimizerConfig, TrainConfig
from fusion.runtime.training.data.samples import held_out_indices
from fusion.swarm.directory.records import Digest

CONFIG = TrainConfig(
    steps=1,
    microbatches=1,
    microbatch_size=1,
    sequence=0,
    seed=0,
    optimizer=OptimizerConfig(),
    data=DataConfig(kind="arrays", train=Digest("0" * 64)),
)


def read(samples: int, size: int, count: int) -> list[int]:
    """What peers read."""
    config = replace(CONFIG, microbatch_size=size, evaluate_batches=count)
    return [i for batch in range(count) for i in held_out_indices(batch, config, samples)]


@pytest.mark.parametrize(
    ("samples", "size", "most", "count"),
    [(20, 4, 8, 5), (32, 4, 8, 8), (3, 5, 8, 3), (1, 4, 8, 1), (2, 4, 8, 1), (4, 8, 1, 1), (10_000, 4, 8, 8)],
)
def test_few_samples_count_alike(samples: int, size: int, most: int, count: int) -> None:
    assert even_batches(samples, size, most) == count
    often = Counter(read(samples, size, count))
    assert len(often) == min(samples, count * size) and len(set(often.values())) == 1


@given(st.integers(1, 400), st.integers(1, 40), st.integers(1, 20))
@settings(max_examples=examples(60))
def test_no_other_number_of_microbatches_counts_them_more_alike(samples: int, size: int, most: int) -> None:
    def unlike(count: int) -> float:
        often = Counter(read(samples, size, count))
        mean = count * size / samples
        return sum((often[i] - mean) ** 2 for i in range(samples)) / samples / mean**2

    found = even_batches(samples, size, most)
    assert 1 <= found <= most
    assert unlike(found) == pytest.approx(min(unlike(count) for count in range(1, most + 1)), abs=1e-9)
    if samples >= most * size:
        assert found == most


@pytest.mark.parametrize(("total", "classes"), [(10_000, 10), (320, 10), (640, 2), (33, 4), (32, 10)])
def test_classes_that_take_turns_are_all_read(total: int, classes: int) -> None:
    arrays = {"x": np.arange(total), "y": np.arange(total) % classes}
    found = in_unlike_places(arrays, 32)
    assert sorted(found["x"]) == list(range(total)) and (found["y"] == found["x"] % classes).all()
    chosen = read(total, 4, 8)
    assert len(set(chosen)) == 32
    assert len(set(found["y"][chosen])) >= 0.8 * classes
    # Spread over all of them still: one of each piece.
    assert [int(x) * 32 // total for x in found["x"][chosen]] == pytest.approx(list(range(32)), abs=1)
