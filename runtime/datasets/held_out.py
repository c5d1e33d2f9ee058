"""Which of the held-out samples an evaluation reads. Peers read a number of microbatches, spread evenly over the samples that the
launcher packed (`fusion.runtime.training.data.samples.held_out_indices`): the launcher chooses the number, and the order. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from fusion.runtime.datasets.dataset import Array
from fusion.runtime.job.spec import somewhere


def even_batches(samples: int, size: int, most: int) -> int:
    """The number of microbatches of `size`, at most `most`, that reads the samples most equally often, since each read counts in the
    mean. Where there are enough samples: `most`, with each sample once at most."""

    def unlike(count: int) -> float:
        """The variance of how often a sample is read, in units of the mean squared."""
        read = count * size
        return (read % samples) * (samples - read % samples) / read**2

    return min(range(1, most + 1), key=lambda count: (unlike(count), count))


def in_unlike_places(arrays: Mapping[str, Array], wanted: int) -> dict[str, Array]:
    """The same samples in another order: the first of each of `wanted` equal pieces, which are those that are read, is drawn from its
    piece. At even distances, samples in order of alternating classes would all be of one class."""
    total = len(next(iter(arrays.values())))
    if wanted >= total:
        return dict(arrays)
    order = np.arange(total)
    for begin, end in pairwise([i * total // wanted for i in range(wanted + 1)]):
        chosen = somewhere(begin, end)
        order[begin], order[chosen] = chosen, begin
    return {name: array[order] for name, array in arrays.items()}
