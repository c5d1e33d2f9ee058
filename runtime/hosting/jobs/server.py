"""Serves /fusion/job/1: requests of other peers and of clients about a job.

The frames of /fusion/job/1: docs/protocols.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from fusion.runtime.belief.shared_work import SharedWork
from fusion.runtime.hosting.jobs.board import STOPPED, JobBoard
from fusion.runtime.hosting.jobs.gossip import JobGossip
from fusion.runtime.hosting.jobs.watchers import BUSY, Turn, Watchers
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.progress import Progress
from fusion.runtime.job.protocol import JOB, SAVE_SECONDS
from fusion.swarm.authority.access import chain_of
from fusion.swarm.authority.statements import open_statements
from fusion.swarm.claims.election import winner
from fusion.swarm.directory.job_order import ENDED
from fusion.swarm.directory.records import JobId, JobRecord, is_digest
from fusion.swarm.errors import StreamBroken, SwarmError
from fusion.swarm.transport import PeerId, Stream

WATCH_SECONDS = 0.25
READ_SECONDS = 0.5  # for which a job's lead, once read, is the answer to all who request it
READS = 8  # of leads, at once: strangers may request any number of jobs
UNREAD_SECONDS = 30.0  # for a watcher to read a frame


class JobServer:
    """`nudged` is called when a peer requests that we look at the jobs now, `finish` to end a job that we lead at its next
    snapshot (whether that began), `stopped` when its author has stopped it at once."""

    def __init__(
        self,
        context: Context,
        board: JobBoard,
        gossip: JobGossip,
        nudged: Callable[[], None],
        finish: Callable[[JobId], bool],
        stopped: Callable[[JobId], None],
    ) -> None:
        self._context = context
        self._board = board
        self._gossip = gossip
        self._nudged = nudged
        self._finish = finish
        self._stopped = stopped
        self._watchers = Watchers(context.clock.monotonic)
        self._leads: SharedWork[JobId, PeerId | None] = SharedWork(context.clock.monotonic, READ_SECONDS)
        self._reading = asyncio.Semaphore(READS)

    async def start(self) -> None:
        """Answer from now on."""
        await self._context.transport.serve(JOB.name, self._handle)

    async def _handle(self, stream: Stream) -> None:
        frame = await stream.receive()
        job = JobId(str(frame.header.get("job", ""))[:64])
        if frame.kind == "launch":
            self._invited(frame.header.get("grants"))
            self._nudged()
            await stream.send("ok")
        elif frame.kind == "watch":
            await self._watch(stream, job)
        elif frame.kind == "stop":
            saving = partial(stream.send, "saving") if frame.header.get("save") is True else None
            record = await self._stop(job, frame.header.get("statement"), saving)
            await self._gossip.publish_job(job)
            try:
                ended = {"state": record.state, "step": record.step, "snapshot_step": record.snapshot_step}
                await stream.send("ok", ended)
            finally:  # the client may have gone
                await self._gossip.notify_owners(record)
        elif frame.kind == "revoke":
            new = self._revoke(job, frame.header.get("revocation"))
            await stream.send("ok")
            if new is not None:
                await self._gossip.publish_job(job)
                await self._gossip.forward_revocation(job, new)
        elif frame.kind == "snapshot":
            self._gossip.receive_snapshot(stream.remote, frame.header.get("record"))
            await stream.send("ok")
        else:
            raise ValueError(
                f"{JOB.name} knows launch, watch, stop, revoke and snapshot, not {frame.kind[:40]!r}"
            )

    def _invited(self, grants: object) -> None:
        """The author of a job grants us a part in it."""
        wallet = self._context.access.wallet
        chain = chain_of(grants)
        if chain and wallet is not None:
            wallet.add(chain, requested=False, law_of=self._context.access.law)

    async def _watch(self, stream: Stream, job: JobId) -> None:
        if not (self._board.leads(job) or self._board.final(job)):
            lead = await self._leads.get(job, lambda: self._lead(job)) if is_digest(job) else None
            await stream.send("redirect", {"lead": lead})
            return
        with self._watchers.turn(stream.remote) as turn:
            await self._follow(stream, job, turn)

    async def _lead(self, job: JobId) -> PeerId | None:
        async with self._reading:
            lead = winner(await self._context.leases.claims(job, 0))
        return None if lead is None else lead.peer

    async def _follow(self, stream: Stream, job: JobId, turn: Turn) -> None:
        """Send the job's progress until it ends, the watcher goes or another one needs its turn."""
        gone = asyncio.ensure_future(stream.receive())  # a watcher sends nothing more
        last: Progress | None = None
        try:
            while self._board.leads(job) or self._board.final(job):
                progress = self._gossip.progress(job)
                if progress is not None and progress != last:
                    if progress.finished:
                        # A watcher that sees the end reads the directory next: it must have the end and the last snapshot.
                        await self._gossip.publish_job(job)
                    await _send_progress(stream, progress)
                    self._watchers.notified(turn)
                    last = progress
                if (progress is not None and progress.finished) or gone.done():
                    return
                if turn.done():
                    raise ValueError(BUSY)
                ends: list[asyncio.Future[Any]] = [gone, turn]
                await asyncio.wait(ends, timeout=WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    def _revoke(self, job: JobId, data: object) -> bytes | None:
        """Revoke the grants on the list, for us and for readers of our records; gives the list, if new. JobError where it is
        not one, or not signed by a peer that gives grants in the job."""
        access = self._context.access
        if access.law(job) is None:
            raise JobError(f"this peer does not know the job {job[:12]}")
        if isinstance(data, bytes) and data in access.revocations(job):
            return None
        if not isinstance(data, bytes) or not access.revoke(job, data):
            raise JobError("revoke needs a newer list, signed by whoever gives grants in the job")
        return data

    async def _stop(
        self, job: JobId, sealed: object, saving: Callable[[], Awaitable[None]] | None
    ) -> JobRecord:
        """Stop the job, by the author's signed statement `sealed`; gives its last record. With `saving`, which is called when
        that begins, at a snapshot of the step under way, if that takes no longer than SAVE_SECONDS. JobError where the
        statement is not the author's, or we do not lead the job."""
        self._check_led(job)
        given = [sealed] if isinstance(sealed, bytes) else []
        statement = next(
            (each for each, _ in open_statements(given, job, self._context.directory.verify)), None
        )
        if not isinstance(sealed, bytes) or statement is None or statement.state != "stopped":
            raise JobError("stop needs the signed statement that the job is stopped")
        if statement.signer != self._board.author(job):
            raise JobError("only whoever launched the job may stop it")
        if saving is not None:
            self._board.stop_at_end(job, (sealed,))
            if self._finish(job):
                with suppress(SwarmError):  # the client may have gone
                    await saving()
                if (ended := await self._end_of(job)) is not None:
                    return ended
            self._check_led(job)
        # Readers of the record verify the statement, too.
        progress = self._gossip.progress(job)
        record = self._board.cut_short(job, "stopped", STOPPED, progress, proof=(sealed,))
        self._stopped(job)
        return record

    def _check_led(self, job: JobId) -> None:
        """JobError for a job that has ended, or that we do not lead."""
        self._gossip.progress(job)  # updates the board
        record = self._board.record(job)
        if record is not None and record.state in ENDED:
            raise JobError(f"the job {record.name} is {record.state} already")
        if record is None or not self._board.leads(job):
            raise JobError(f"this peer does not lead the job {job[:12]}: ask its lead")

    async def _end_of(self, job: JobId) -> JobRecord | None:
        """The record of a job that we led to its end; None where it has not come to one in SAVE_SECONDS, or we lead it no more."""
        clock = self._context.clock
        until = clock.monotonic() + SAVE_SECONDS
        while clock.monotonic() < until:
            self._gossip.progress(job)  # updates the board
            record = self._board.record(job)
            if record is not None and record.state in ENDED:
                return record
            if not self._board.leads(job):
                return None
            await asyncio.sleep(WATCH_SECONDS)
        return None


async def _send_progress(stream: Stream, progress: Progress) -> None:
    """StreamBroken for a watcher that reads nothing for UNREAD_SECONDS."""
    try:
        async with asyncio.timeout(UNREAD_SECONDS):
            await stream.send("progress", progress.to_header())
    except TimeoutError:
        stream.abort()
        raise StreamBroken(f"{stream.remote} follows a job and reads nothing") from None
