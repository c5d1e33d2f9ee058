"""What the parts of one peer process share. `fusion.runtime.peer.machine` makes it, tests make it over the in-memory transport."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from fusion.runtime.device.accounts import Accounts
from fusion.runtime.device.new_job_pace import NewJobPace
from fusion.runtime.job.memory_budget import MemoryBudget
from fusion.runtime.job.watch import Watch
from fusion.swarm.claims.owners_seen import OwnersSeen
from fusion.swarm.clock import Clock

if TYPE_CHECKING:  # a client has no worker, and should not load torch for its name
    from fusion.runtime.device.real_pace import RealPace
    from fusion.runtime.job.worker import Worker
    from fusion.swarm.authority.access import Access
    from fusion.swarm.blobs.blobs import Blobs
    from fusion.swarm.claims.leases import Leases
    from fusion.swarm.directory.api import Directory
    from fusion.swarm.directory.records import ClaimRecord, JobId
    from fusion.swarm.links.monitor import LinkMonitor
    from fusion.swarm.transport import PeerId, Transport


P = ParamSpec("P")
T = TypeVar("T")


class StageHolder(Protocol):
    """What hosts stages on this peer: `fusion.runtime.hosting.hosting`."""

    def holds(self, job: JobId, stage: int) -> int:
        """The term under which the stage runs here; 0 if it does not."""

    @property
    def occupied(self) -> bool:
        """Whether a stage runs here, or is about to."""

    async def take_over(
        self, job: JobId, stage: int, over: int, handover: Mapping[str, Any] | None, proof: tuple[bytes, ...]
    ) -> ClaimRecord | None:
        """Claim the stage above the term `over`, with votes that its holder is gone (`proof`), and begin to host it; gives our
        claim, or None where we did not get it."""

    def give_away(self, job: JobId, stage: int, peer: PeerId) -> None:
        """As in `Takeover`."""


class Takeover(Protocol):
    """Failover and handover of stages, for the services of an owner and of its neighbours.
    `fusion.runtime.hosting.takeover` implements it."""

    async def start(self, holder: StageHolder) -> None:
        """Serve other peers from now on, and let `holder` take stages over."""

    async def suspect(self, job: JobId, stage: int, peer: PeerId, term: int) -> ClaimRecord | None:
        """`peer`, which held the stage under `term`, does not answer us: report it to its standbys. Gives the claim of the new
        owner (which `Leases.owner` knows of then, too), or None where no standby can take over now."""

    def vote_against(self, job: JobId, stage: int, peer: PeerId, term: int, seconds: float) -> None:
        """`peer`, which holds the stage under `term` or a higher one, answers but does no work for it: for `seconds`, vote against
        it for any standby that is ready."""

    def needs_us(self, job: JobId, stage: int) -> bool:
        """Whether we have voted against the stage's owner for long, and no standby has taken over."""

    def withdraw_votes(self, job: JobId) -> None:
        """The job goes on: from now on vote against no owner of its stages."""

    def give_away(self, job: JobId, stage: int, peer: PeerId) -> None:
        """Begin to hand a stage that runs here to `peer`, at the next boundary where nothing is lost. It stays here if
        the peer does not take it."""

    async def holds(self, peer: PeerId, job: JobId, stage: int) -> bool:
        """Whether `peer` answers that it holds the stage, to a request made now."""

    async def attends(self, peer: PeerId, job: JobId, stage: int) -> bool:
        """Whether `peer` answers at all, and has not recently lost a stage of the job because it did no work."""

    async def hand_over(
        self, job: JobId, stage: int, term: int, handover: Mapping[str, Any], order: Sequence[PeerId]
    ) -> ClaimRecord | None:
        """Give the stage, which we own under `term`, to the first of these peers that takes it; gives that peer's claim."""


@dataclass(frozen=True, kw_only=True)
class Context:
    peer_id: PeerId
    transport: Transport
    directory: Directory
    blobs: Blobs
    leases: Leases
    worker: Worker | None  # None in a client: it computes nothing
    # The thread that tensors are encoded and decoded in, beside the device's.
    codec_worker: Worker | None = None
    plane: str = ""  # name of what computes; empty in a client
    lacks: frozenset[str] = frozenset()  # operators that the plane cannot run
    flops_per_second: float = 0.0  # of the device, as measured at start; 0: not measured
    real_pace: RealPace | None = None  # gets the time of every step; None where it is not needed
    memory: MemoryBudget = field(default_factory=lambda: MemoryBudget(4 << 30))  # that the volunteer lends
    accounts: Accounts = field(default_factory=Accounts)  # that the cost of jobs is charged to
    pace: NewJobPace = field(default_factory=NewJobPace)  # of jobs that are new to this peer
    home: Path = Path(".")
    # For which a step of a training job may stall at least, before its stages look for the owner at fault. A machine may sleep for
    # half of it, or do other work.
    stall_seconds: float = 60.0
    takeover: Takeover | None = None  # None in a client: it holds nothing
    seen: OwnersSeen = field(default_factory=OwnersSeen)  # the owners of jobs' stages until now
    links: LinkMonitor | None = None  # None in a client: it measures nothing
    clock: Clock = Clock()  # noqa: RUF009 - frozen
    watch: Watch = Watch()  # noqa: RUF009 - does nothing
    random: Random = field(default_factory=SystemRandom)  # what must not be guessed is drawn from it, too

    @property
    def access(self) -> Access:
        """Who may do what in the jobs that this process knows."""
        return self.leases.access

    @property
    def compute(self) -> Worker:
        """The device's worker thread; only peers have one."""
        assert self.worker is not None, "a client runs no stages"
        return self.worker

    def on_behalf_of(self, author: PeerId, job: JobId, *, serves: bool = False) -> Context:
        """The context of one job: its calls on the device are scheduled and charged as that job's."""
        caller = self.accounts.caller(job, author, serves=serves)
        codec_worker = None if self.codec_worker is None else self.codec_worker.of(caller)
        return replace(self, worker=self.compute.of(caller), codec_worker=codec_worker)

    async def work_for(
        self, job: JobId, author: PeerId, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`asyncio.to_thread` for a job, which is charged the processor time (`pace`), even if the caller is cancelled."""
        loop, account = asyncio.get_running_loop(), self.accounts.of(job, author)

        def timed() -> T:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self.pace.charge, job, account, time.thread_time() - began)

        return await asyncio.to_thread(timed)
