"""The device memory of one stage's sessions: reserved as they open, retained or freed as they end.

The device's thread runs calls in the order in which they are decided here, so a prefix that is found is still there, and an evicted one
is not looked up again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from fusion.runtime.job.worker import Worker
from fusion.runtime.planes.kv_cache import BLOCK_POSITIONS as MEMORY_BLOCK
from fusion.runtime.serving.ring.prefix import BLOCK_POSITIONS, positions_of, shared_blocks
from fusion.runtime.serving.ring.retained import Retained, RetainedPrefixes
from fusion.runtime.serving.ring.session import SessionId
from fusion.runtime.serving.ring.stage_session import Kept, ReusedPrefix, StageRunner, StageSession

LEFT_BLOCKS = 1  # of a retained prefix that a session takes over instead of copying, which it does not need


class StageMemory:
    """`sessions`: that run. Sessions are opened one at a time and freed all together in the device's thread, so that computations there
    wait for one such call, not for a gateway's hundreds."""

    def __init__(
        self,
        worker: Worker,
        runner: StageRunner,
        sessions: Callable[[], Iterable[StageSession]],
        clock: Callable[[], float],
    ) -> None:
        self._worker = worker
        self._runner = runner
        self._sessions = sessions
        self._prefixes = RetainedPrefixes(clock)
        self._beginning = asyncio.Lock()
        # Pending work of the task `_freeing`.
        self._unneeded: list[SessionId] = []
        self._kept: list[Kept] = []
        self._forgotten: list[int] = []
        self._freeing: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Memory is freed in `tasks`."""
        self._tasks = tasks

    def stop(self) -> None:
        """Free no more in the background; `aclose` frees the rest."""
        self._tasks = None

    async def aclose(self) -> None:
        """Free all memory of sessions; the weights stay."""
        await self._worker.run(self._runner.clear)

    async def begin(self, session: StageSession) -> None:
        """Reserve memory for its prompt and the beginning of its completion, and give it its cached prefix. MemoryError where there is
        not enough and no retained prefix is left to evict."""
        opening = session.opening
        positions = min(opening.capacity, opening.prompt_length + MEMORY_BLOCK)
        while True:
            try:
                session.held = session.reached = await self._begin(session, opening.capacity, positions)
                break
            except MemoryError:
                if not await self.give_way():
                    raise
        if not self._runner.has_cache:
            session.held = positions_of(opening.prefix)

    async def _begin(self, session: StageSession, capacity: int, positions: int) -> int:
        async with self._beginning:
            prefix, taken = self._reused_prefix(session)
            try:
                encoded = session.opening.source
                return await self._worker.run(
                    self._runner.begin, session.id, capacity, positions, prefix, encoded
                )
            except MemoryError:
                if taken is not None:
                    self._prefixes.put_back(taken)
                raise
            except BaseException:
                if taken is not None:  # its memory may have been taken over already
                    self._forget([taken.name])
                raise

    def _reused_prefix(self, session: StageSession) -> tuple[ReusedPrefix | None, Retained | None]:
        """The longest cached prefix of a session, in a running session or retained, and the retained entry if the session takes it over."""
        chain, gateway = session.opening.prefix, session.gateway_peer
        best: ReusedPrefix | None = None
        if not self._runner.chunk_invariant:
            return None, None
        for other in self._sessions():
            if other is not session and other.gateway_peer == gateway:
                shared = shared_blocks(other.opening.prefix, chain) * BLOCK_POSITIONS
                positions = min(shared, other.reached)
                if positions > (0 if best is None else best.positions):
                    best = ReusedPrefix(other.id, positions)
        retained = self._prefixes.find(gateway, chain)
        if retained is None or (best is not None and best.positions > retained[1] * BLOCK_POSITIONS):
            return best, None
        entry, blocks = retained
        moved = entry.blocks - blocks <= LEFT_BLOCKS
        if moved:
            self._prefixes.remove(entry)
        return ReusedPrefix(entry.name, blocks * BLOCK_POSITIONS, moved), entry if moved else None

    def end(self, session: StageSession, chain: bytes) -> None:
        """The session has ended: retain the blocks of `chain`, if any, and free the rest."""
        keeps = chain and self._runner.chunk_invariant
        name, gone = self._prefixes.add(session.gateway_peer, chain) if keeps else (None, [])
        if name is None:
            self._unneeded.append(session.id)
        else:
            self._kept.append(Kept(session.id, name, positions_of(chain)))
        session.freed = self._forget(gone)

    def _forget(self, names: Iterable[int]) -> asyncio.Task[None] | None:
        self._forgotten += names
        if self._freeing is None and self._tasks is not None:
            # The worker runs calls in order: this follows all computations of the sessions.
            self._freeing = self._tasks.create_task(self._free())
        return self._freeing

    async def _free(self) -> None:
        self._freeing = None
        kept, self._kept = self._kept, []
        sessions, self._unneeded = self._unneeded, []
        names, self._forgotten = self._forgotten, []
        if kept:
            sizes = await self._worker.run(self._runner.retain, kept)
            names += [
                each.name
                for each, (positions, size) in zip(kept, sizes, strict=True)
                if not self._prefixes.sized(each.name, positions, size)
            ]
        if sessions:
            await self._worker.run(self._runner.free, sessions)
        if names:
            await self._worker.run(self._runner.forget, names)

    def shed(self, size_bytes: int) -> None:
        """Evict so many bytes of retained prefixes, or all."""
        gone = []
        while size_bytes > 0 and (entry := self._prefixes.evict()) is not None:
            size_bytes -= entry.size_bytes
            gone.append(entry.name)
        self._forget(gone)

    async def give_way(self) -> bool:
        """Evict a retained prefix and wait until its memory is free. False where there is none."""
        entry = self._prefixes.evict()
        if entry is None or (freeing := self._forget([entry.name])) is None:
            return False
        await asyncio.wait([freeing])
        return True

    def expire(self) -> None:
        """Evict retained prefixes that have not been used for long."""
        if gone := self._prefixes.expired():
            self._forget(gone)
