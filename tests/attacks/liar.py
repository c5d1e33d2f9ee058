"""`fusion-peer` that lies about every step of the stages that it owns: python tests/attacks/liar.py KIND ARGUMENTS...

KIND is `nan` (the numbers of its gradients are none) or `failed` (its arithmetic failed).
"""

from __future__ import annotations

import sys
from dataclasses import replace

from fusion.cli.main import main
from fusion.runtime.training.stage_messages import Outbox
from fusion.runtime.training.step.messages import Failed, Message, Ready


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


if __name__ == "__main__":
    lie(sys.argv.pop(1))
    main()
