"""`fusion-peer start`: lend this machine to the swarm until Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusion.cli import grants
from fusion.cli.terminal import options
from fusion.cli.terminal.extras import need_peer_extra, need_plane
from fusion.cli.terminal.fast_imports import lean_imports
from fusion.cli.terminal.loop import run_until_stopped
from fusion.cli.terminal.output import LastingOutput, Output, bytes_text, flops_text
from fusion.swarm.errors import DaemonDied, SwarmKeyError, TransportError
from fusion.swarm.streams.reachable import is_loopback, is_public

if TYPE_CHECKING:
    from fusion.runtime.peer.config import PeerConfig
    from fusion.runtime.peer.peer import Peer
    from fusion.runtime.serving.http.config import HttpConfig

log = logging.getLogger(__name__)

STATUS_SECONDS = 1.0
HAND_OVER_SECONDS = 15.0
FIRST_PAUSE_SECONDS = 0.2  # before a peer whose p2pd died is opened anew, doubling while it keeps dying
LONGEST_PAUSE_SECONDS = 60.0
STEADY_SECONDS = 60.0  # a p2pd that ran for so long did not die at once
# More threads do not speed any machine up, and libraries crash where the system has no room for theirs
MOST_THREADS = 1024


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class PlaneName(StrEnum):
    torch = "torch"
    jax = "jax"


def start(
    bootstrap: options.Bootstrap = None,
    home: options.Home = options.DEFAULT_HOME,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            "--listen", metavar="MULTIADDR", help="Address to listen at, such as /ip4/0.0.0.0/tcp/31337."
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, max=MOST_THREADS, help="Computing threads (default: one per core)."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="SIZE", help="Memory to lend, e.g. 4GiB (default: half of what is free)."
        ),
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(
            "--disk",
            metavar="SIZE",
            help="Disk to lend for weights, data and snapshots, e.g. 20GiB (default: 50GiB).",
        ),
    ] = None,
    device: Annotated[Device, typer.Option("--device", help="The device that computes.")] = Device.cpu,
    plane: Annotated[
        PlaneName, typer.Option("--plane", help='The library that computes: jax needs "fusion-peer[jax]".')
    ] = PlaneName.torch,
    upload: Annotated[
        float | None,
        typer.Option(
            "--upload-mbps",
            min=0.1,
            metavar="MBPS",
            help="Limit of the uplink for sending weights and snapshots, in megabits a second (default: none).",
        ),
    ] = None,
    http: Annotated[
        str,
        typer.Option(
            "--http",
            metavar="HOST:PORT",
            help="Address of OpenAI's API on this peer; port 0: any that is free; off: no API.",
        ),
    ] = "127.0.0.1:0",
    http_key: Annotated[
        Path | None,
        typer.Option(
            "--http-key",
            metavar="FILE",
            parser=options.a_path,
            help="API keys, one a line; each HTTP request must have one of them.",
        ),
    ] = None,
    swarm_key: options.SwarmKey = None,
    invite: Annotated[
        list[str] | None,
        typer.Option(
            "--invite", metavar="INVITE", help="Take part in a job by an invite, as `jobs invite` prints it."
        ),
    ] = None,
    json: options.Json = False,
    debug: options.Debug = False,
    stop_with: options.StopWith = None,
    print_steps: Annotated[
        bool,
        typer.Option("--tell-steps", hidden=True, help="Print each committed step of the jobs led here."),
    ] = False,
) -> None:
    """Lend this machine to the swarm until Ctrl-C, which hands its work over and leaves nothing behind."""
    from fusion.swarm.swarm_key import find_key

    need_peer_extra("start")
    need_plane(plane.value)
    output = LastingOutput(as_json=json)
    chosen: dict[str, Any] = {"listen": options.listen_addresses(listen)} if listen else {}
    if upload is not None:
        chosen["upload_mbps"] = options.checked_rate(upload, "--upload-mbps")
    if memory is not None:
        chosen["memory_bytes"] = options.parse_lent(memory, "--memory")
    if http != "off":
        api = options.http_config(http, http_key)
        api.listen().close()  # report a taken port now, and not seconds later
        chosen["http"] = api
    elif http_key is not None:
        raise ValueError("--http-key: there is no HTTP API with --http off")
    if disk is not None:
        chosen["blob_quota_bytes"] = options.parse_lent(disk, "--disk")
    folder = options.peer_home(home)  # before what takes seconds to load
    closed = find_key(folder, swarm_key) is not None
    addresses = options.bootstrap_addresses(bootstrap, closed=closed)
    for text in invite or ():
        grants.keep(text, folder)
    output.status("starting ...")
    with lean_imports():
        from fusion.runtime.peer.config import PeerConfig

    config = PeerConfig(
        home=folder,
        bootstrap=addresses,
        threads=threads,
        device=device.value,
        plane=plane.value,
        swarm_key=swarm_key,
        **chosen,
    )
    lending = Lending(config, output, print_steps=print_steps)
    run_until_stopped(
        lending.run(), parent=stop_with, debug=debug, extra_seconds=lambda: lending.hand_over_seconds
    )
    output.print_line("stopped")
    output.emit({"event": "stopped"})


class Lending:
    """A peer that is opened anew when its p2pd died: same home and ports, so that it is the same peer to the others,
    without the stages it had, which its standbys have taken over meanwhile."""

    def __init__(self, config: PeerConfig, output: Output, *, print_steps: bool = False) -> None:
        """`print_steps`: print what `fusion.cli.local.chaos_trace` reads, for tests that watch each step."""
        self._config = config
        self._print_steps = print_steps
        self._output = output
        self._peer: Peer | None = None

    @property
    def hand_over_seconds(self) -> float:
        """What stopping now may take beyond closing: a stage is handed over between two steps, however long one is."""
        return HAND_OVER_SECONDS if self._peer is not None and self._peer.parts.hosting.hosted else 0.0

    async def run(self) -> None:
        """Until cancelled, or until something ends that cannot be started anew. Raises as `open_peer` does."""
        from fusion.runtime.peer.peer import open_peer

        loop = asyncio.get_running_loop()
        config, pause, ran = self._config, FIRST_PAUSE_SECONDS, False
        while True:
            began, runs = loop.time(), False
            try:
                async with open_peer(config) as peer:
                    ran, runs, self._peer = True, True, peer
                    ports = same_ports(self._config.listen, peer.network.transport.all_addresses)
                    config = replace(self._config, listen=ports, http=_same_http(peer))
                    await self._attend(peer)
            except DaemonDied as error:
                reason = str(error)
            except (TransportError, OSError) as error:
                if not ran or (runs and isinstance(error, OSError)):
                    raise
                reason, config = str(error), self._config  # perhaps a port was taken meanwhile
            finally:
                self._peer = None
            gc.collect()  # before what is left of that peer is taken for what stays
            if loop.time() - began >= STEADY_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            log.warning("%s; starting it again in %.1f s", reason, pause)
            self._output.emit({"event": "restarting", "reason": reason, "seconds": pause})
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _attend(self, peer: Peer) -> None:
        from fusion.cli.local.chaos_trace import print_steps

        output = self._output
        _introduce(peer, self._config, output)
        failing = asyncio.create_task(peer.failed())
        telling = [asyncio.create_task(_report_announced(peer, self._config, output))]
        if self._print_steps:
            telling.append(asyncio.create_task(print_steps(peer, output)))
        last: dict[str, Any] = {}
        invited: tuple[str, ...] = ()
        try:
            while not failing.done():
                # Networks come and go, and how others see us is learnt from them.
                lines = invitation(peer.context.transport.addresses, self._config.listen)
                if lines != invited:
                    invited = lines
                    for line in lines:
                        output.print_line(line)
                now = activity(peer)
                if now != last:
                    output.emit({"event": "status", **now})
                    output.status(status_line(now), important=now["stages"] != last.get("stages"))
                    last = now
                await asyncio.wait([failing], timeout=STATUS_SECONDS)
            raise failing.result()
        finally:
            for task in (failing, *telling):
                task.cancel()
            output.status("handing over ...", important=True)


def same_ports(listen: tuple[str, ...], addresses: Sequence[str]) -> tuple[str, ...]:
    """`listen` with each port that was left to the system replaced by the one that it chose."""
    chosen: list[str] = []
    open_ports = [parts for parts in (address.split("/") for address in addresses) if len(parts) > 4]
    # Behind a router an address may be the router's, with a port of its own.
    open_ports.sort(key=lambda parts: parts[2] not in ("127.0.0.1", "::1"))
    for wanted in listen:
        parts = wanted.split("/")
        for found in open_ports if parts[4] == "0" else ():
            tried = "/".join([*parts[:4], found[4], *parts[5:]])
            if (found[1], found[3]) == (parts[1], parts[3]) and tried not in chosen:
                wanted = tried
                break
        chosen.append(wanted)
    return tuple(chosen)


def _same_http(peer: Peer) -> HttpConfig | None:
    """The HTTP API again at the port that it has."""
    return None if peer.http is None else replace(peer.http.config, port=peer.http.port)


async def _report_announced(peer: Peer, config: PeerConfig, output: Output) -> None:
    await peer.announcement.done.wait()
    from fusion.swarm.swarm_key import keep_key, load_key

    if config.swarm_key is not None:  # it is right: the next start needs no option
        try:
            keep_key(config.home, load_key(config.swarm_key))
        except SwarmKeyError as error:  # a full disk, a key that lay on a stick
            log.warning("%s; the next start needs --swarm-key again", error)
    output.emit({"event": "announced", "peer_id": peer.context.peer_id})
    output.print_line("announced: the swarm knows this peer")


def _introduce(peer: Peer, config: PeerConfig, output: Output) -> None:
    record = peer.announcement.record()
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
            "http": None if peer.http is None else peer.http.url,
        }
    )
    output.print_line(f"{record.name} is up: {record.device}, {flops_text(record.flops_per_second)}, "
                      f"lends {bytes_text(record.memory_bytes)}")  # fmt: skip
    if peer.unused_gpu:
        output.print_line("nothing is computed on this machine's GPU: `fusion-peer start --device cuda` does")
    if peer.http is not None:
        output.print_line(f"programs ask it over OpenAI's API at {peer.http.url}")


def invitation(addresses: Sequence[str], listen: Sequence[str]) -> tuple[str, ...]:
    """The lines that tell how others join a peer that they reach at `addresses` (see `reachable`), which was told to
    `listen` there: one address for those in the same network, and one for all others where there is one."""
    if not addresses or is_loopback(addresses[0]):
        if addresses and all(map(is_loopback, listen)):
            return ("only peers on this machine can join, as it listens on loopback:", _join(addresses[0]))
        if any(address.startswith("/ip6/") for address in listen):
            return ("others cannot join yet: this machine has no address that they could reach",)
        return (
            "others cannot join yet: this machine has no IPv4 address that they could reach; "
            "where it has one of IPv6, start with --listen /ip6/::/tcp/0",
        )
    near = next((a for a in addresses if not is_public(a)), None)
    public = next((a for a in addresses if is_public(a)), None)
    if near is None:
        return ("others join with", _join(addresses[0]))
    invited = ("others in the same network join with", _join(near))
    return invited if public is None else (*invited, "others elsewhere join with", _join(public))


def _join(address: str) -> str:
    return f"  fusion-peer start --bootstrap {address}"


def activity(peer: Peer) -> dict[str, Any]:
    """What the peer does now, in plain values: it changes only when there is something to say."""
    traffic = peer.context.transport.traffic()
    jobs = []
    for job, stage in peer.parts.hosting.hosted:
        progress = next(filter(None, (s.progress(job) for s in peer.parts.services.values())), None)
        jobs.append({"job": job, "stage": stage, "step": progress.step if progress else None,
                     "loss": progress.loss if progress else None})  # fmt: skip
    return {
        "neighbours": len(traffic),
        "stages": [[each["job"], each["stage"]] for each in jobs],
        "jobs": jobs,
        "free_memory_bytes": peer.context.memory.free_bytes,
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
