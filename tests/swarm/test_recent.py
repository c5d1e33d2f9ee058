from __future__ import annotations

import pytest

from fusion.swarm.recent import recent


class Counted:
    """A function of one number that counts its calls, and a clock that stands."""

    def __init__(self, most: int) -> None:
        self.now = 0.0
        self.calls: list[int] = []

        @recent(most, seconds=60.0, clock=lambda: self.now)
        def double(number: int) -> int:
            self.calls.append(number)
            if number < 0:
                raise ValueError(number)
            return 2 * number

        self.double = double

    def held(self) -> int:
        return len(self.double._young) + len(self.double._old)  # type: ignore[attr-defined]


def test_what_is_asked_for_again_is_not_made_again() -> None:
    made = Counted(8)
    for turn in range(100):
        made.now = 50.0 * turn  # seldom, but within each span
        assert made.double(1) == 2
    assert made.calls == [1]


def test_what_nobody_asks_for_goes() -> None:
    made = Counted(1000)
    for number in range(500):
        made.double(number)
    for turn in range(1, 4):
        made.now = 61.0 * turn
        made.double(0)
    assert made.held() == 1
    made.double(7)
    assert made.calls == [*range(500), 7]


def test_after_a_long_silence_nothing_is_kept() -> None:
    made = Counted(1000)
    for number in range(500):
        made.double(number)
    made.now = 1e6
    made.double(501)
    assert made.held() == 1


def test_a_flood_pushes_out_what_is_older_and_not_what_is_in_use() -> None:
    made = Counted(10)
    for number in range(1000):
        made.double(number)
        made.double(0)
        assert made.held() <= 20
    assert made.calls == [*range(1000)]
    made.double(1)
    assert made.calls[-1] == 1


def test_what_is_raised_is_raised_again() -> None:
    made = Counted(10)
    for _ in range(2):
        with pytest.raises(ValueError, match="-1"):
            made.double(-1)
    assert made.calls == [-1, -1] and made.held() == 0
