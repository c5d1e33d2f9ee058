"""Each attack against real peers (`python tests/attacks --list`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from attacks.catalog import ATTACKS
from attacks.ground import open_ground
from attacks.hold import hold

pytestmark = pytest.mark.alone

# The gate tries a short one of each kind on the same peers, `make test-all` each on peers of its own.
GATE = ("extensions", "dictionary", "refused_streams")
GATE_QUIET_SECONDS = 4.0


def withstood(names: Sequence[str], quiet_seconds: float) -> None:
    async def scenario() -> None:
        async with open_ground(closed=any(ATTACKS[name].closed for name in names)) as ground:
            quiet = None
            for name in names:
                verdict, quiet = await hold(
                    ground, name, ATTACKS[name], quiet_seconds=quiet_seconds, quiet_before=quiet
                )
                assert not verdict.faults, str(verdict.to_json())

    asyncio.run(scenario())


def test_the_short_ones_are_withstood() -> None:
    withstood(GATE, GATE_QUIET_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_each_is_withstood(name: str) -> None:
    withstood([name], 8.0)
