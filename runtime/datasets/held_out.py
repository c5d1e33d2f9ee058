"""Which of the samples that are held out an evaluation reads. Peers read so many microbatches, spread evenly over what the launcher
packed (`fusion.runtime.training.data.samples.held_out_indices`): it chooses how many, and what lies where. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from fusion.runtime.datasets.dataset import Array
from fusion.runtime.job.spec import somewhere


def even_batches(samples: int, size: int, most: int) -> int:
    """How many microbatches of `size`, `most` at most, count so many samples most alike: all equally often if that is possible, as
    each counts in a mean over all of them. Where there are enough samples: `most`, in which each is once at most."""

    def unlike(count: int) -> float:
        """The variance of how often a sample is read, in units of the mean squared."""
        read = count * size
        return (read % samples) * (samples - read % samples) / read**2

    return min(range(1, most + 1), key=lambda count: (unlike(count), count))


def in_unlike_places(arrays: Mapping[str, Array], wanted: int) -> dict[str, Array]:
    """The same samples, of which every first one of `wanted` equal pieces, those that are read, was taken from somewhere in its piece:
    at even distances, samples whose classes take turns would all be of one class."""
    total = len(next(iter(arrays.values())))
    if wanted >= total:
        return dict(arrays)
    order = np.arange(total)
    for begin, end in pairwise([i * total // wanted for i in range(wanted + 1)]):
        chosen = somewhere(begin, end)
        order[begin], order[chosen] = chosen, begin
    return {name: array[order] for name, array in arrays.items()}
