from __future__ import annotations

import pytest

from fusion.runtime.job import cool_down
from fusion.runtime.job.cool_down import CoolDown
from fusion.swarm.memory.clock import ManualClock


def lasted(failed: CoolDown[str], clock: ManualClock) -> int:
    seconds = 0
    while failed.lasts("x"):
        clock.advance(1.0)
        seconds += 1
    return seconds


def test_it_lasts_twice_as_long_each_time_up_to_the_longest() -> None:
    clock = ManualClock()
    failed: CoolDown[str] = CoolDown(5.0, 30.0, clock)
    assert not failed.lasts("x")
    seconds = []
    for _ in range(5):
        failed.start("x")
        assert not failed.lasts("y")
        seconds.append(lasted(failed, clock))
    assert seconds == [5, 10, 20, 30, 30]
    failed.start("x")
    failed.forget("x")
    assert not failed.lasts("x")
    failed.start("x")
    assert lasted(failed, clock) == 5


def test_it_remembers_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cool_down, "REMEMBERED", 3)
    failed: CoolDown[int] = CoolDown(5.0, 5.0, ManualClock())
    for key in range(5):
        failed.start(key)
    assert [key for key in range(5) if failed.lasts(key)] == [2, 3, 4]


def test_a_wrong_length_is_named() -> None:
    with pytest.raises(ValueError, match="first_seconds"):
        CoolDown(5.0, 1.0, ManualClock())
