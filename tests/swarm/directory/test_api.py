"""The directory: rules that need no network, and a directory of one process."""

from __future__ import annotations

import asyncio
from itertools import permutations

import pytest
from support.directory_records import (
    ALICE,
    BOB,
    JOB,
    MALLORY,
    claim_record,
    digest,
    hostile_offers,
    job_record,
)

from fusion.swarm.directory.job_order import newest_jobs
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork


def test_of_several_authors_a_job_has_the_highest_term_then_the_last_state_then_step() -> None:
    launched = job_record(MALLORY, state="launching", term=0, step=0)
    waiting = job_record(ALICE, state="launching", term=1, step=0)
    running = job_record(ALICE, term=1, step=0)
    further = job_record(BOB, term=1, step=20)
    done = job_record(ALICE, term=1, step=20, state="done")
    taken_over = job_record(BOB, term=2, step=15)
    order = [launched, waiting, running, further, done, taken_over]
    other = job_record(ALICE, job=digest("other"))
    for last in range(1, len(order) + 1):
        for shuffled in permutations(order[:last][-3:]):
            found = newest_jobs([other, *shuffled])
            assert {record.job: record for record in found}[JOB] == order[last - 1]
            assert len(found) == 2


@pytest.mark.parametrize("number", range(len(hostile_offers(0.0))))
def test_a_memory_directory_drops_hostile_records(number: int) -> None:
    clock, network = ManualClock(), MemoryNetwork()
    reader = MemoryDirectory(network, BOB, clock)
    offer = hostile_offers(clock.now)[number]

    async def scenario() -> None:
        await MemoryDirectory(network, ALICE, clock).publish(claim_record(ALICE))
        network.store(ALICE.peer_id, offer.key, offer.subkey, offer.data, clock.now)  # past a storing node
        network.replicas[BOB.peer_id].setdefault(offer.key, {})["x"] = (offer.expires_at, offer.data)
        assert await reader.claims(JOB, 0) == (claim_record(ALICE),)
        assert await reader.peers() == ()
        assert await reader.claims(JOB, 1) == ()

    asyncio.run(scenario())
