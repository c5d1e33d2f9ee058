from __future__ import annotations

import time

import pytest

from fusion.swarm.recent import SECONDS, recent


def test_results_are_kept_up_to_a_number_and_for_a_time() -> None:
    made: list[int] = []

    @recent(2)
    def double(number: int) -> int:
        made.append(number)
        if number < 0:
            raise ValueError(number)
        return 2 * number

    assert [double(1), double(1), double(2)] == [2, 2, 4] and made == [1, 2]
    assert [double(3), double(1)] == [6, 2] and made == [1, 2, 3, 1]
    held = double.cache  # type: ignore[attr-defined]
    held.expire(time.monotonic() + SECONDS / 2)
    assert len(held) == 2
    held.expire(time.monotonic() + SECONDS + 1)
    assert len(held) == 0
    for _ in range(2):
        with pytest.raises(ValueError, match="-1"):
            double(-1)
    assert made[-2:] == [-1, -1]
