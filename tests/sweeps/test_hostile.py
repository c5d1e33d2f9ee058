"""The traffic and the verdict of the hostile sweep, and a short run."""

from __future__ import annotations

import argparse
import asyncio
import struct

import pytest
from sweeps.endurance.flatness import FLAT, rise
from sweeps.endurance.recording import recorded
from sweeps.endurance.traffic import NOBODYS, PROTOCOLS, RIGHTS, Talk, Targets, Traffic
from sweeps.hostile import feed

from fusion.swarm.directory.records import JobId
from fusion.swarm.directory.sealing import unseal
from fusion.swarm.errors import FrameError, RecordError
from fusion.swarm.streams.frames import HEAD_BYTES, decode_header

JOBS = (JobId("a" * 64), JobId("b" * 64))
NOW = 1_800_000_000.0


def traffic(seed: int = 1, number: int = 0, *, spared: bool = False) -> Traffic:
    return Traffic(seed, number, Targets(JOBS, ("12D3KooWx",), "12D3KooWy", spared), [])


def talks(of: Traffic, count: int = 400) -> list[Talk]:
    return [of.talk() for _ in range(count)]


def test_a_seed_says_what_is_sent() -> None:
    assert talks(traffic()) == talks(traffic())
    assert talks(traffic()) != talks(traffic(seed=2))
    assert talks(traffic()) != talks(traffic(number=1))
    one, other = traffic(), traffic()
    assert [one.record(NOW) for _ in range(50)] == [other.record(NOW) for _ in range(50)]


def test_every_protocol_is_spoken_from_recordings_and_whole_frames_are_among_what_is_said() -> None:
    said = talks(traffic())
    assert {talk.protocol for talk in said} == set(PROTOCOLS)
    assert len({protocol for protocol, _ in recorded()}) >= 4
    kinds = {kind for talk in said for frame in talk.frames if (kind := _kind(frame))}
    assert {"hello", "activation", "commit", "open", "generate", "launch", "take", "get", "want"} <= kinds
    assert any(not _kind(frame) for talk in said for frame in talk.frames)


def test_records_are_rightly_sealed_and_not() -> None:
    of = traffic()
    sound = 0
    for _ in range(300):
        made = of.record(NOW)
        try:
            unseal(made.data, made.key, made.subkey, NOW)
        except RecordError:
            continue
        sound += 1
    assert 20 < sound < 280


def test_spared_jobs_are_not_claimed_taken_or_ended() -> None:
    of = traffic(spared=True)
    rights = [frame for talk in talks(of) if talk.protocol in RIGHTS for frame in talk.frames]
    assert not any(job.encode() in frame for job in JOBS for frame in rights)
    assert any(job.encode() in frame for job in NOBODYS for frame in rights)
    claims = [made for _ in range(300) if (made := of.record(NOW)).key.startswith(("claims/", "jobs/"))]
    assert claims and not any(job in made.key + made.subkey for job in JOBS for made in claims)


def _kind(frame: bytes) -> str:
    try:
        header, _ = struct.unpack_from(">IQ", frame)
        return decode_header(frame[HEAD_BYTES : HEAD_BYTES + header])[0]
    except (FrameError, struct.error):
        return ""


def test_what_rises_is_told_from_what_came_to_rest() -> None:
    rested = [(float(at), 100.0 + min(at, 50)) for at in range(100)]
    assert rise(rested) == pytest.approx(0.0)
    assert rise([(float(at), 100.0 + at) for at in range(100)]) > FLAT
    assert rise([(float(at), 100.0 - at / 2) for at in range(100)]) < 0.0
    assert rise([]) == rise([(1.0, 5.0)]) == 0.0
    assert rise([(at, 0.0) for at in (1.0, 2.0, 3.0, 4.0)]) == 0.0


@pytest.mark.slow
@pytest.mark.alone
def test_a_peer_that_is_fed_believes_nothing_and_goes_on() -> None:
    options = argparse.Namespace(frames=4000, minutes=0.2, seed=5, spare_rights=True, logs=False)
    report = asyncio.run(feed(options))
    assert not report["broken"], report["verdict"]
    assert report["looked_at"]["frames"] > 300 and report["looked_at"]["records"] > 300, report["fed"]
