from __future__ import annotations

from fusion.runtime.device.surplus import SPARE_BYTES, Surplus

MIB = 1 << 20
LENT = 4096 * MIB
WORKING_BYTES = 256 * MIB


def test_what_is_set_aside_is_kept_and_what_is_above_goes_back() -> None:
    surplus = Surplus(500 * MIB, LENT, WORKING_BYTES)
    assert not surplus.is_due(840 * MIB, 340 * MIB)
    assert not surplus.is_due(840 * MIB + SPARE_BYTES, 340 * MIB)
    assert surplus.is_due(841 * MIB + SPARE_BYTES, 340 * MIB)
    surplus.returned(600 * MIB)
    assert surplus.is_due(841 * MIB + SPARE_BYTES, 340 * MIB), "and again, once it has grown back"


def test_a_stage_takes_little_more_than_what_is_set_aside_for_it() -> None:
    """Its values lie in holes that its next ones do not fit: one was let grow by 64 MiB beyond what it had (`attacks`: `long_calls`)."""
    assert Surplus(500 * MIB, LENT, WORKING_BYTES).is_due((840 + 17) * MIB, 340 * MIB)


def test_what_does_not_help_is_not_done_again_until_more_is_held() -> None:
    surplus = Surplus(500 * MIB, LENT, WORKING_BYTES)
    assert surplus.is_due(900 * MIB, 0)
    surplus.returned(890 * MIB)
    assert not surplus.is_due(900 * MIB, 0)
    assert not surplus.is_due(890 * MIB + SPARE_BYTES, 0)
    assert surplus.is_due(891 * MIB + SPARE_BYTES, 0)


def test_once_less_is_held_it_is_looked_after_again() -> None:
    surplus = Surplus(500 * MIB, LENT, WORKING_BYTES)
    surplus.returned(890 * MIB)
    assert not surplus.is_due(550 * MIB, 0)
    assert surplus.is_due(551 * MIB + SPARE_BYTES, 0)


def test_a_small_stage_is_left_what_it_takes_as_it_runs() -> None:
    surplus = Surplus(500 * MIB, LENT, WORKING_BYTES)
    assert not surplus.is_due(500 * MIB + WORKING_BYTES + SPARE_BYTES, 48 * MIB)
    assert surplus.is_due(501 * MIB + WORKING_BYTES + SPARE_BYTES, 48 * MIB)
    assert surplus.is_due(517 * MIB, 0), "and nothing once it has ended"


def test_no_stage_is_left_more_than_is_lent() -> None:
    surplus = Surplus(500 * MIB, 100 * MIB, WORKING_BYTES)
    assert not surplus.is_due(600 * MIB + SPARE_BYTES, 48 * MIB)
    assert surplus.is_due(601 * MIB + SPARE_BYTES, 48 * MIB)
