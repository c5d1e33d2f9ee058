"""`fusion-peer` that lies about every step of the stages that it owns: python tests/attacks/liar.py KIND ARGUMENTS...

KIND is `nan` (it reports a gradient norm that is not finite), `failed` (it reports that its arithmetic failed) or `idle` (it stops
computing after some steps, and does not leave when the lead tells it to).
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

from fusion.cli.main import main
from fusion.runtime.training.compute.rad import Rad
from fusion.runtime.training.stage_messages import Mailbox, Outbox
from fusion.runtime.training.stall_watch import StallWatch
from fusion.runtime.training.step.messages import Discard, Failed, Message, Ready
from fusion.runtime.training.step.run_statistics import Attempt

WORKED = 5  # steps before it becomes idle, while others begin to stand by


def lie(kind: str) -> None:
    send = Outbox.send

    def send_lies(self: Outbox, target: int, message: Message) -> None:
        if isinstance(message, Ready):
            if kind == "nan":
                message = replace(message, squared_norm=float("nan"))
            else:
                message = Failed(message.attempt, "no memory")
        send(self, target, message)

    Outbox.send = send_lies  # type: ignore[method-assign]


def idle() -> None:
    step, receive = Rad.step, Mailbox.receive

    async def work_and_stop(self: Rad, attempt: Attempt, number: int, *, look: bool = False) -> Ready:
        if number >= WORKED:
            await asyncio.Event().wait()
        return await step(self, attempt, number, look=look)

    def stay(self: Mailbox, source: int, message: Message) -> None:
        if not isinstance(message, Discard):
            receive(self, source, message)

    async def blame_nobody(self: StallWatch) -> None:
        await asyncio.Event().wait()

    Rad.step, Mailbox.receive, StallWatch.run = work_and_stop, stay, blame_nobody  # type: ignore[method-assign]


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    idle() if kind == "idle" else lie(kind)
    main()
