"""Escape sequences for a user's terminal, in records, answers, progress and errors, as real commands in a terminal of their
own show them."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import select
import sys
import time
from contextlib import suppress
from typing import Any

from attacks.ground import Ground
from attacks.hold import Attack
from attacks.stranger import Stranger, store_request, stranger
from attacks.verdict import Verdict
from support.directory_records import digest, job_record, peer_record

from fusion.runtime.job.progress import Progress
from fusion.runtime.job.protocol import GENERATE, JOB, STATUS
from fusion.swarm.dht.directory import DhtConfig, HivemindDirectory
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import SwarmError
from fusion.swarm.protocol import PROBE
from fusion.swarm.transport import Stream

RECORD_SECONDS = 12.0
COMMAND_SECONDS = 60.0
HOSTILE = JobId(digest("a job with a hostile lead"))
MARK = "owned"  # in every hostile text
PAINT = (
    f"\x1b]0;{MARK}\x07", f"\x1b]52;c;{MARK}\x07", "\x1b[2J\x1b[1;1H", "\x9b31m", "\x1bP1$r\x1b\\", "\r\x1b[K",
    "\b\b\b", "\u202e", "\u2066", "\x07", "\x0e", "\u200b", "\x85",
)  # fmt: skip
TEXT = MARK + "".join(f"{paint}x" for paint in PAINT)
# What the commands themselves write: colours, and a status line that is rewritten.
OWN = re.compile(r"\x1b\[[0-9;]*m|\r\x1b\[2K|\r\n|\n|\t")


async def terminal_escapes(one: Stranger) -> dict[str, Any]:
    """Publish records with escape sequences in every text, and a job whose lead answers with them."""
    sent = 0
    while one.time_left:
        offers = [
            one.sealed(job_record(one.identity, job=JobId(digest(f"e{n}")), name=TEXT[:100], message=TEXT), RECORD_SECONDS)
            for n in range(16)
        ]  # fmt: skip
        offers.append(one.sealed(peer_record(one.identity, name=TEXT[:60], device=TEXT[:99]), RECORD_SECONDS))
        offers.append(one.sealed(_led_by(one), RECORD_SECONDS))
        await one.everywhere("store", store_request(offers))
        sent += len(offers)
        await asyncio.sleep(1.0)
    return {"sent": sent}


def _led_by(one: Stranger) -> Any:
    return job_record(
        one.identity, job=HOSTILE, name="hostile", state="running", stages=1, message="all is well"
    )


async def commands_stay_clean(ground: Ground, verdict: Verdict) -> None:
    """Check `generate`, `status`, `jobs` and `jobs watch` in a terminal, some of them connected to a hostile peer."""
    async with stranger(ground.scene, COMMAND_SECONDS) as one:
        await one.transport.serve(GENERATE.name, _answer)
        await one.transport.serve(JOB.name, _tell)
        for protocol in (STATUS.name, PROBE.name):
            await one.transport.serve(protocol, _refuse)
        one.begin()
        directory = await HivemindDirectory.start(one.transport.p2p, one.identity, DhtConfig())
        await directory.join(one.peers[0])  # so that commands may join through the hostile peer
        renewing = asyncio.create_task(_renew(one))
        try:
            hostile = next(each for each in one.transport.addresses if "127.0.0.1" in each)
            honest = ground.peers[0].address
            for name, command in {
                "answer": ("generate", "def ", "--model", "answers", "--peer", hostile),
                "status": ("status", "--peer", honest),
                "jobs": ("jobs", "--peer", honest),
                "watch": ("jobs", "watch", HOSTILE, "--peer", honest),
            }.items():
                shown = await asyncio.to_thread(in_a_terminal, command, ground.fleet.root / "terminal")
                verdict.notes[f"{name}_characters"] = len(shown)
                wild = sorted({c for c in OWN.sub("", shown) if not c.isprintable()})
                if wild:
                    verdict.notes[f"fault: {name}"] = f"{wild!r} reached a terminal"
                if name in ("answer", "watch") and MARK not in shown:
                    verdict.notes[f"fault: reach of {name}"] = f"nothing hostile was shown: {shown[-300:]!r}"
        finally:
            renewing.cancel()
            await directory.aclose()


async def _renew(one: Stranger) -> None:
    while True:
        await one.everywhere("store", store_request([one.sealed(_led_by(one), RECORD_SECONDS)]))
        await asyncio.sleep(2.0)


async def _answer(stream: Stream) -> None:
    await stream.receive()
    for index in range(3):
        await stream.send("token", {"index": index, "id": index, "text": TEXT})
    await stream.send("error", {"message": TEXT})


async def _tell(stream: Stream) -> None:
    await stream.receive()
    progress = Progress(job=HOSTILE, state="running", message=TEXT, codecs=TEXT, step=1, steps=2)
    await stream.send("progress", progress.to_header())
    await asyncio.sleep(1.0)
    header = Progress(job=HOSTILE, state="failed", message=TEXT, error=TEXT).to_header()
    with suppress(SwarmError):
        await stream.send("progress", header)


async def _refuse(stream: Stream) -> None:
    await stream.receive()
    await stream.send("error", {"message": TEXT})


def in_a_terminal(command: tuple[str, ...], home: Any) -> str:
    """The output of `fusion-peer COMMAND` in a terminal of its own, until it ends or the time is up."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS="200")
        os.execv(sys.executable, [sys.executable, "-m", "fusion.cli.main", *command, "--home", str(home)])
    shown = b""
    try:
        os.set_blocking(terminal, False)
        until = time.monotonic() + COMMAND_SECONDS
        while time.monotonic() < until:
            if select.select([terminal], [], [], 0.5)[0]:
                try:
                    data = os.read(terminal, 1 << 16)
                except OSError:  # it has ended
                    break
                if not data:
                    break
                shown += data
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)
    return shown.decode("utf-8", "replace")


ATTACKS = {"terminal_escapes": Attack(terminal_escapes, seconds=6.0, check=commands_stay_clean)}
