"""Jobs on a running swarm, launched from the test's own process through the Python interface."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file

from fusion.cli.job_client import watch
from fusion.cli.local.fleet import LocalPeer
from fusion.runtime.job.context import Context
from fusion.runtime.job.progress import Progress
from fusion.runtime.launch.export import export
from fusion.runtime.launch.launch import launch, wait_until_held
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.peer.client import ClientConfig, open_client
from fusion.runtime.serving.requests.client import generate
from fusion.runtime.serving.requests.request import Answer, GenerateRequest
from fusion.swarm.transport import PeerId

T = TypeVar("T")
JOB_SECONDS = 400.0


def with_client(home: Path, peer: str, work: Callable[[Context], Awaitable[T]]) -> T:
    """Run `work` with a client that joined the swarm through the peer at this address."""

    async def main() -> T:
        async with open_client(ClientConfig(home=home, peer=peer)) as context:
            return await work(context)

    return asyncio.run(main())


async def run_to_end(
    context: Context,
    prepared: Prepared,
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    seconds: float = JOB_SECONDS,
) -> Progress:
    """Launch a training job, wait up to `seconds` for its end, and return its last progress."""
    async with asyncio.timeout(seconds):
        job = await launch(context, prepared)
        held = asyncio.create_task(wait_until_held(context, prepared))
        try:
            last = None
            async for progress in watch(context, job):
                last = progress
                on_progress(progress)
        finally:
            held.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await held
    assert last is not None and last.state == "done", last
    return last


def answer_across_a_kill(
    home: Path, gateway: LocalPeer, request: GenerateRequest, victim: LocalPeer, after: int
) -> Answer:
    """The gateway's answer. The victim, a peer of its route, is killed after so many pieces of the answer."""

    async def asking(context: Context) -> Answer:
        pieces = 0
        async for piece in generate(context.transport, PeerId(gateway.peer_id), request):
            if isinstance(piece, Answer):
                return piece
            pieces += 1
            if pieces == after:
                victim.process.send_signal(signal.SIGKILL)
        raise AssertionError("no answer")

    return with_client(home, gateway.address, asking)


async def exported(context: Context, prepared: Prepared, directory: Path) -> dict[str, torch.Tensor]:
    """The final weights of a finished job, by original name."""
    await export(context, prepared.job, directory)
    return load_file(directory / "model.safetensors")
