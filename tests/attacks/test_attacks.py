"""Each attack against real peers (`python tests/attacks --list`)."""

from __future__ import annotations

import asyncio

import pytest
from attacks.catalog import ATTACKS
from attacks.ground import open_ground
from attacks.hold import hold

pytestmark = pytest.mark.alone

GATE = ("extensions", "dictionary", "empties")  # the gate tries one of each kind, `make test-all` all


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in GATE)) for name in ATTACKS]
)
def test_it_is_withstood(name: str) -> None:
    async def scenario() -> None:
        async with open_ground() as ground:
            verdict = await hold(ground, name, ATTACKS[name])
        assert not verdict.faults, str(verdict.to_json())

    asyncio.run(scenario())
