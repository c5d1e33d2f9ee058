"""A thread that runs trio, beside the asyncio event loop of everything else: py-libp2p needs trio.

Each call runs in a trio task of its own, and its asyncio caller gets the result. Streams do not pass through here: each has a
socket pair, one end in either loop (`fusion.swarm.thin.transport`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent import futures
from contextlib import suppress
from typing import Any, TypeVar

import trio

logger = logging.getLogger(__name__)

T = TypeVar("T")
CLOSE_SECONDS = 2.0
ENDED = "the thread has ended"


class TrioThread:
    """`start`, then `call`s, then `aclose`. `nursery`: for tasks that live as long as the thread."""

    def __init__(self) -> None:
        self.nursery: trio.Nursery
        self._token: trio.lowlevel.TrioToken
        self._ending: trio.Event
        self._running: futures.Future[None] = futures.Future()
        # A daemon: library code that hangs must not keep the command from ending.
        self._thread = threading.Thread(target=self._main, name="trio", daemon=True)

    async def start(self) -> None:
        self._thread.start()
        await asyncio.wrap_future(self._running)

    async def call(
        self, work: Callable[..., Awaitable[T]], *arguments: Any, unused: Callable[[T], object] | None = None
    ) -> T:
        """Run `work` in trio, and return its result or raise its error. Cancelling the call cancels the work; a result that it still
        returns is passed to `unused`."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        scope = trio.CancelScope()

        def deliver(result: T | None, error: Exception | None) -> None:
            if answer.done():
                if error is None and unused is not None:
                    unused(result)  # type: ignore[arg-type]
            elif error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        async def run() -> None:
            result: T | None = None
            error: Exception | None = RuntimeError(ENDED)  # where it is cancelled from within
            try:
                with scope:
                    try:
                        result, error = await work(*arguments), None
                    except Exception as caught:  # raised in the caller, not in the thread
                        error = caught
            finally:
                with suppress(RuntimeError):  # the other loop is closed
                    loop.call_soon_threadsafe(deliver, result, error)

        try:
            self._token.run_sync_soon(self.nursery.start_soon, run)
        except trio.RunFinishedError:
            raise RuntimeError(ENDED) from None
        try:
            return await answer
        except asyncio.CancelledError:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(scope.cancel)
            raise

    async def aclose(self) -> None:
        """End the thread and all that runs there. Idempotent."""
        if not self._thread.is_alive():
            return
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._ending.set)
        async with asyncio.timeout(CLOSE_SECONDS):
            while self._thread.is_alive():  # not joined in another thread: that wait could not be cancelled
                await asyncio.sleep(0.002)

    def _main(self) -> None:
        try:
            trio.run(self._until_ending)
        except BaseException as error:  # raised in `start`, if that still waits
            if not self._running.done():
                self._running.set_exception(error)
            logger.debug("trio ended: %r", error)

    async def _until_ending(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._ending = trio.Event()
        async with trio.open_nursery() as self.nursery:
            self._running.set_result(None)
            await self._ending.wait()
            self.nursery.cancel_scope.cancel()
