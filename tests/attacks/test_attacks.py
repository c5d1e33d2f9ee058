"""All attacks on real peers (`python tests/attacks --list`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from attacks.catalog import ATTACKS
from attacks.ground import open_ground
from attacks.hold import hold
from attacks.verdict import Verdict

# The gate runs three short ones on the same peers, beside other tests, and so does not judge the honest users' rates.
# `make test-all` runs each on peers of its own.
GATE = ("extensions", "dictionary", "refused_streams")
GATE_SECONDS, GATE_QUIET_SECONDS = 2.0, 1.0


def verdicts(names: Sequence[str], quiet_seconds: float, **how: float) -> list[Verdict]:
    async def scenario() -> list[Verdict]:
        found = []
        async with open_ground(closed=any(ATTACKS[name].closed for name in names)) as ground:
            quiet = None
            for name in names:
                verdict, quiet = await hold(
                    ground,
                    name,
                    ATTACKS[name],
                    quiet_seconds=quiet_seconds,
                    quiet_before=quiet,
                    **how,
                )
                found.append(verdict)
        return found

    return asyncio.run(scenario())


def test_the_short_ones_do_no_harm() -> None:
    for verdict in verdicts(GATE, GATE_QUIET_SECONDS, seconds=GATE_SECONDS, settle_seconds=0.0):
        assert not verdict.harm, str(verdict.to_json())
        assert verdict.during.steps > 0 and verdict.during.tokens > 0 and verdict.honest > 0


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_each_is_withstood(name: str) -> None:
    [verdict] = verdicts([name], 8.0)
    assert not verdict.faults, str(verdict.to_json())
