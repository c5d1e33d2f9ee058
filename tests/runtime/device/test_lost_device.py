from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.devices import NEEDS_GPU

from fusion.cli.terminal.errors import FAILED, explain
from fusion.runtime.device.lost_device import DeviceLost, is_device_error
from fusion.runtime.job import worker as workers
from fusion.runtime.job.worker import Worker
from fusion.runtime.peer.peer import Peer

ASSERTED = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.AcceleratorError(ASSERTED), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access"), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), False),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("a model's name with CUDA error in it"), False),
    ],
)
def test_which_errors_may_be_the_end_of_a_device(error: Exception, expected: bool) -> None:
    assert is_device_error(error) == expected


class Plane:
    """Its device has come to its end."""

    def run(self, *_: Any) -> None:
        raise torch.AcceleratorError(ASSERTED)


def peer_with(worker: Worker) -> Peer:
    async def never() -> None:
        await asyncio.Event().wait()

    made: Any = SimpleNamespace
    return Peer(
        context=made(compute=worker),
        network=made(transport=made(failed=never)),
        announcement=made(refused=asyncio.Event()),
        parts=made(work=asyncio.ensure_future(never())),
        http=None,
        unused_gpu=False,
    )


@pytest.mark.parametrize("kept", [False, True])
def test_a_peer_whose_device_computes_no_more_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """`kept`: who made the call does not raise its error, as a turn of several sessions."""
    plane = Plane()
    monkeypatch.setattr(workers, "probe", plane.run)

    async def main() -> None:
        async with Worker() as worker:
            peer = peer_with(worker)
            failing = asyncio.ensure_future(peer.failed())
            if kept:
                worker.doubt(RuntimeError(ASSERTED))
            else:
                with pytest.raises(RuntimeError):
                    await worker.run(plane.run)
            error = await asyncio.wait_for(failing, 10)
            assert isinstance(error, DeviceLost) and worker.is_lost
            verdict = explain(error)
            assert verdict.code == FAILED
            assert verdict.message.startswith(
                'the device "cpu" computes no more (AcceleratorError: CUDA error:'
            )
            assert verdict.message.endswith("start this peer again")
            peer.parts.work.cancel()

    asyncio.run(main())


LOSES = """
import asyncio, torch
from fusion.runtime.job.worker import Worker

def beyond_its_table():
    return torch.ones(3, device="cuda")[torch.tensor([1 << 30], device="cuda")].cpu()

async def main():
    worker = Worker(device="cuda")
    lost = asyncio.ensure_future(worker.lost())
    try:
        await worker.run(beyond_its_table)
    except RuntimeError:
        print(await asyncio.wait_for(lost, 10), flush=True)
    await worker.aclose()

asyncio.run(main())
"""


@pytest.mark.parametrize("script", [pytest.param(LOSES, marks=NEEDS_GPU)], ids=["cuda"])
def test_a_real_device_that_failed_an_assertion_is_lost(script: str) -> None:
    """In a process of its own, which computes no more afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.startswith('the device "cuda" computes no more (AcceleratorError: CUDA error:'), done


def test_a_device_that_still_computes_is_not_given_up() -> None:
    async def main() -> None:
        async with Worker() as worker:
            lost = asyncio.ensure_future(worker.lost())
            with pytest.raises(torch.AcceleratorError):
                await worker.run(Plane().run)
            for _ in range(3):
                await worker.run(lambda: None)
            assert not lost.done() and not worker.is_lost
            lost.cancel()

    asyncio.run(main())
