"""Which samples a microbatch holds: a pure function of (seed, step, microbatch), so that the stages which read data (the
first for `input_ids`, the last for `targets`) agree without a word, and a step that is run again sees the same samples.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

from fusion.runtime.job.manifest import TrainConfig


def sample_indices(seed: int, step: int, microbatch: int, config: TrainConfig, samples: int) -> list[int]:
    """The samples of one microbatch: every sample once an epoch, in an order that (seed, epoch) shuffles."""
    first = (step * config.microbatches + microbatch) * config.microbatch_size
    return list(_window(seed, first, config.microbatch_size, samples))


@lru_cache(maxsize=1024)  # the lead asks again, to check what was fed
def _window(seed: int, first: int, count: int, samples: int) -> tuple[int, ...]:
    return tuple(_shuffled(seed, *divmod(first + i, samples), samples) for i in range(count))


def held_out_indices(batch: int, config: TrainConfig, samples: int) -> list[int]:
    """The samples of one microbatch of evaluation, spread evenly over the held-out data, the same every time."""
    wanted = config.evaluate_batches * config.microbatch_size
    first = batch * config.microbatch_size
    return [((first + i) * samples // wanted) % samples for i in range(config.microbatch_size)]


def _shuffled(seed: int, epoch: int, index: int, samples: int) -> int:
    """The image of `index` under a permutation of range(samples): a Feistel network over the next power of four,
    walked until it lands inside (Black and Rogaway 2002, "cycle-walking cipher"). No table, whatever the size."""
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
