"""Which samples a microbatch holds: a pure function of (seed, step, microbatch), so that the stages which read data (the
first for `input_ids`, the last for `targets`) agree without communication, and a repeated step sees the same samples.
"""

from __future__ import annotations

import hashlib
import math
from threading import Lock

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache, cached
from cachetools.keys import hashkey

from fusion.runtime.job.manifest import TrainConfig

REMEMBERED_SAMPLES = 1 << 20  # 8 bytes each

Indices = npt.NDArray[np.int64]


def sample_indices(seed: int, step: int, microbatch: int, config: TrainConfig, samples: int) -> list[int]:
    """The sample indices of one microbatch: every sample once per epoch, in an order shuffled by (seed, epoch)."""
    first = (step * config.microbatches + microbatch) * config.microbatch_size
    indices: list[int] = _window(seed, first, config.microbatch_size, samples).tolist()
    return indices


@cached(  # the lead asks again, to check what was fed
    LRUCache[object, Indices](REMEMBERED_SAMPLES, getsizeof=len), key=hashkey, lock=Lock()
)
def _window(seed: int, first: int, count: int, samples: int) -> Indices:
    parts = []
    while count > 0:
        epoch, begin = divmod(first, samples)
        length = min(count, samples - begin)
        parts.append(_shuffled(seed, epoch, np.arange(begin, begin + length), samples))
        first, count = first + length, count - length
    return np.concatenate(parts)


def held_out_indices(batch: int, config: TrainConfig, samples: int) -> list[int]:
    """The sample indices of one microbatch of evaluation, spread evenly over the held-out data, the same every time."""
    wanted = config.evaluate_batches * config.microbatch_size
    first = batch * config.microbatch_size
    return [((first + i) * samples // wanted) % samples for i in range(config.microbatch_size)]


def _shuffled(seed: int, epoch: int, indices: Indices, samples: int) -> Indices:
    """The images of `indices` under a permutation of range(samples): a Feistel network over the next power of four,
    walked until it lands inside (Black and Rogaway 2002, "cycle-walking cipher"). No table of samples, whatever their
    number: a hash for each half of an index that occurs, of which there are about as many as the root of `samples`."""
    half = max(1, math.ceil(math.log2(max(2, samples)) / 2))
    mask = (1 << half) - 1
    found = indices.copy()
    outside = np.arange(len(found))  # places whose index is still on its walk
    while len(outside):
        left, right = found[outside] >> half, found[outside] & mask
        for turn in range(4):
            halves, places = np.unique(right, return_inverse=True)
            hashed = [_hashed(f"{seed}/{epoch}/{turn}/{value}") & mask for value in halves.tolist()]
            left, right = right, left ^ np.array(hashed, np.int64)[places]
        found[outside] = (left << half) | right
        outside = outside[found[outside] >= samples]
    return found


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
