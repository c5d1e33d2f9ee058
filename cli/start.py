"""`fusion-peer start`: lend this machine to the swarm until Ctrl-C."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusion.cli import options
from fusion.cli.loop import run_until_stopped
from fusion.cli.output import Output, bytes_text, flops_text

if TYPE_CHECKING:
    from fusion.runtime.peer import Peer, PeerConfig

STATUS_SECONDS = 1.0


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


def start(
    bootstrap: options.Bootstrap = None,
    home: options.Home = options.DEFAULT_HOME,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            "--listen", metavar="MULTIADDR", help="Where to listen, such as /ip4/0.0.0.0/tcp/31337."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Threads for arithmetic (one per core).")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="Memory to lend, e.g. 4GiB (half of what is free)."),
    ] = None,
    device: Annotated[Device, typer.Option("--device", help="What computes.")] = Device.cpu,
    json: options.Json = False,
    debug: options.Debug = False,
    stop_with: options.StopWith = None,
) -> None:
    """Lend this machine to the swarm until Ctrl-C, which hands its work over and leaves nothing behind."""
    output = Output(as_json=json)
    chosen: dict[str, Any] = {"listen": tuple(map(options.checked_listen, listen))} if listen else {}
    if memory is not None:
        chosen["memory_bytes"] = options.parse_size(memory)
    folder, addresses = options.home_folder(home), options.bootstrap_addresses(bootstrap)
    output.status("starting ...")
    from fusion.runtime.peer import PeerConfig

    config = PeerConfig(home=folder, bootstrap=addresses, threads=threads, device=device.value, **chosen)
    run_until_stopped(_lend(config, output), parent=stop_with, debug=debug)
    output.say("stopped")
    output.emit({"event": "stopped"})


async def _lend(config: PeerConfig, output: Output) -> None:
    from fusion.runtime.peer import open_peer

    async with open_peer(config) as peer:
        _introduce(peer, config, output)
        announcing = asyncio.create_task(_tell_announced(peer, output))
        failing = asyncio.create_task(peer.failed())
        last: dict[str, Any] = {}
        try:
            while not failing.done():
                now = activity(peer)
                if now != last:
                    output.emit({"event": "status", **now})
                    output.status(status_line(now), important=now["stages"] != last.get("stages"))
                    last = now
                await asyncio.wait([failing], timeout=STATUS_SECONDS)
            raise failing.result()
        finally:
            announcing.cancel()
            failing.cancel()
            output.status("handing over ...", important=True)


async def _tell_announced(peer: Peer, output: Output) -> None:
    await peer.membership.announced.wait()
    output.emit({"event": "announced", "peer_id": peer.context.peer_id})
    output.say("announced: the swarm knows this peer")


def _introduce(peer: Peer, config: PeerConfig, output: Output) -> None:
    record = peer.record()
    output.emit(
        {
            "event": "ready",
            "name": record.name,
            "peer_id": record.peer,
            "addresses": list(record.addresses),
            "device": record.device,
            "flops_per_second": record.flops_per_second,
            "memory_bytes": record.memory_bytes,
            "home": str(config.home),
        }
    )
    output.say(f"{record.name} is up: {record.device}, {flops_text(record.flops_per_second)}, "
               f"lends {bytes_text(record.memory_bytes)}")  # fmt: skip
    output.say("others join with")
    for address in record.addresses[:1]:
        output.say(f"  fusion-peer start --bootstrap {address}")


def activity(peer: Peer) -> dict[str, Any]:
    """What the peer does now, in plain values: it changes only when there is something to say."""
    traffic = peer.context.transport.traffic()
    jobs = []
    for job, stage in peer.hosting.hosted:
        progress = peer.training.progress(job) or peer.serving.progress(job)
        jobs.append({"job": job, "stage": stage, "step": progress.step if progress else None,
                     "loss": progress.loss if progress else None})  # fmt: skip
    return {
        "neighbours": len(traffic),
        "stages": [[each["job"], each["stage"]] for each in jobs],
        "jobs": jobs,
        "free_memory_bytes": peer.hosting.free_memory_bytes,
        "sent_bytes": sum(t.sent_bytes for t in traffic.values()),
        "received_bytes": sum(t.received_bytes for t in traffic.values()),
    }


def status_line(now: dict[str, Any]) -> str:
    """One line of `activity`, e.g. "2 stages · a1b2c3/0 step 120 loss 2.31 · sent 1.2 GiB, received 1.1 GiB"."""
    if not now["jobs"]:
        return f"idle: waiting for work · spoken with {now['neighbours']} others"
    parts = []
    for each in now["jobs"]:
        text = f"stage {each['stage']} of {each['job'][:8]}"
        if each["step"] is not None:
            text += f" step {each['step']}"
        if each["loss"] is not None:
            text += f" loss {each['loss']:.3f}"
        parts.append(text)
    wire = f"sent {bytes_text(now['sent_bytes'])}, received {bytes_text(now['received_bytes'])}"
    return " · ".join([*parts, wire])
