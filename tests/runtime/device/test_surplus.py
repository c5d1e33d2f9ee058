from __future__ import annotations

from fusion.runtime.device.surplus import SPARE_BYTES, Surplus

MIB = 1 << 20


def test_what_is_set_aside_is_kept_and_what_is_above_goes_back() -> None:
    surplus = Surplus(500 * MIB)
    assert not surplus.is_due(740 * MIB, 240 * MIB)
    assert not surplus.is_due(740 * MIB + SPARE_BYTES, 240 * MIB)
    assert surplus.is_due(741 * MIB + SPARE_BYTES, 240 * MIB)
    surplus.returned(600 * MIB)
    assert surplus.is_due(741 * MIB + SPARE_BYTES, 240 * MIB), "and again, once it has grown back"


def test_a_stage_takes_little_more_than_what_is_set_aside_for_it() -> None:
    """Its values lie in holes that its next ones do not fit: it was let grow by 64 MiB beyond 240 (`attacks`: `long_calls`)."""
    assert Surplus(500 * MIB).is_due((740 + 17) * MIB, 240 * MIB)


def test_what_does_not_help_is_not_done_again_until_more_is_held() -> None:
    surplus = Surplus(500 * MIB)
    assert surplus.is_due(900 * MIB, 0)
    surplus.returned(890 * MIB)
    assert not surplus.is_due(900 * MIB, 0)
    assert not surplus.is_due(890 * MIB + SPARE_BYTES, 0)
    assert surplus.is_due(891 * MIB + SPARE_BYTES, 0)


def test_once_less_is_held_it_is_looked_after_again() -> None:
    surplus = Surplus(500 * MIB)
    surplus.returned(890 * MIB)
    assert not surplus.is_due(550 * MIB, 0)
    assert surplus.is_due(551 * MIB + SPARE_BYTES, 0)
