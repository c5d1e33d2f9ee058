"""The commands: they parse and print. What takes long is imported inside a command.

main              `fusion-peer`
start             lend this machine
status            who is there, what runs where
train             launch a training job
launch_progress   on whom a job is placed, how far the swarm has taken it over
follow            how a job goes on, live
jobs              what runs; watch, stop, export
grants            what keys and invites of a home allow
invites           `jobs invite`, `accept` and `revoke`
plan              where a job would run
serve             put a model on the swarm
models            which models are served
generate          ask a model
run               arrays to a model that answers in one run
chat              talk with a model
swarm_key         the key of a closed swarm
demo              all of it on this machine
client            how a command reaches the swarm, and who works in it
job_client        what commands ask about jobs, and of their leads
plans/            what `plan`, `train` and `serve --plan` show
asking/           what `generate` and `chat` share
terminal/         what commands share: options, output, errors, the loop
local/            peers as processes of this machine; `chaos`: all of it, with kills
"""

from __future__ import annotations

import os
import sys


def enter() -> int:
    """The installed command `fusion-peer`: `main`, and the same line for a Ctrl-C that comes while that is still imported."""
    try:
        _open_standard_streams()
        from fusion.cli.main import main
    except KeyboardInterrupt:
        print("fusion-peer: interrupted", file=sys.stderr)
        return 130
    return main()


def _open_standard_streams() -> None:
    """Of those that were closed when we began (`>&-`, as some supervisors do): the next file or socket would get their
    numbers, and what is printed; libuv ends a process that closes such a socket."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))
