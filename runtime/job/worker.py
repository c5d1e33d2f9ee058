"""The one thread that runs torch work of one device, so that the asyncio loop never waits for arithmetic.

Calls run one at a time in the order in which they were made. Cancelling an awaiting task does not stop a call
that has begun (arithmetic cannot be interrupted); a call that has not begun is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """A thread that computes on `device` ("cpu", "cuda", "cuda:1") with `threads` threads inside an operator.

    ValueError for a thread count below one, or a device that this machine does not have.
    """

    def __init__(self, threads: int = 1, device: str = "cpu") -> None:
        if threads < 1:
            raise ValueError(f"threads: at least 1, not {threads}")
        self.device = checked_device(device)
        self.threads = threads
        self._closed = False
        self._pool = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix=f"fusion-{device}",
            initializer=_prepare,
            initargs=(threads, torch.device(device).type == "cuda"),
        )

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(*args, **kwargs)` in the worker thread; its exception is raised here."""
        future = self._pool.submit(function, *args, **kwargs)
        return await asyncio.wrap_future(future)

    async def aclose(self) -> None:
        """Drop what has not begun and wait for what has. Idempotent."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _prepare(threads: int, cuda: bool) -> None:
    """Run in the worker thread: the thread count of an operator belongs to the thread that calls it."""
    torch.set_num_threads(threads)
    if cuda:
        # The same numbers as on a CPU, to float32's precision, and the same from run to run.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True, warn_only=True)


def checked_device(name: str) -> str:
    """`name`, if torch can compute on that device here; ValueError in one line otherwise."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f'device: "cpu", "cuda" or "cuda:<index>", not "{name}"') from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f'device: this machine has {count} CUDA devices; "{name}" is not one of them')
    elif device.type != "cpu":
        raise ValueError(f'device: "cpu", "cuda" or "cuda:<index>", not "{name}"')
    return name
