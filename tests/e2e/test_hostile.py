"""A stranger with a key of its own against a working peer: whatever it sends, the peer says no and goes on."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import psutil
import pytest
import torch
from support.examples import FEWER
from support.jobs import with_client
from support.text_job import write_job

from fusion.cli.client import working_peers
from fusion.cli.job_client import trainer_identity
from fusion.runtime.capture.capture import capture_language_model, variables_from_module
from fusion.runtime.capture.models import GPT
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job import spec
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobFailed
from fusion.runtime.job.manifest import Manifest, ServeConfig
from fusion.runtime.job.protocol import GENERATE, JOB, RING, RUN, STAGE, STATUS
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.launch.launch import launch, wait_until_held
from fusion.runtime.launch.prepare import prepare_training
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.launch.shard import GraphJob, prepare_graph
from fusion.runtime.placing.placed_job import as_requested
from fusion.runtime.serving.requests.client import generate
from fusion.runtime.serving.requests.request import Answer, GenerateRequest
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.errors import TransportError
from fusion.swarm.identity import Identity
from fusion.swarm.protocol import BLOB
from fusion.swarm.streams.frame_stream import FrameStream
from fusion.swarm.streams.p2p import P2PTransport
from fusion.swarm.streams.p2p_config import P2PConfig
from fusion.swarm.transport import Frame, PeerId, call

if TYPE_CHECKING:
    from conftest import Peers

    from fusion.cli.local.fleet import LocalPeer

pytestmark = pytest.mark.e2e

GROWTH_BYTES = 40 << 20
FIRST_GROWTH_BYTES = 128 << 20  # modules, caches and blocks that the allocator keeps: only the first time
ANSWER_SECONDS = 120.0
PAGE_BYTES = os.sysconf("SC_PAGESIZE")
HALF = "half a frame"  # to be waited for: the other half may come
WAIT_SECONDS = 0.5  # for an answer to nonsense, of which there may be none
TINY = GPTConfig(vocabulary=256, blocks=1, width=16, heads=2, sequence=32)
PROTOCOLS = tuple(each.name for each in (STAGE, RING, GENERATE, RUN, BLOB, JOB, STATUS))

AUTHOR = Identity.generate()


# --- what is sent


def raw(kind: object, header: object, payload: bytes = b"") -> bytes:
    packed = msgpack.packb([kind, header])
    return struct.pack(">IQ", len(packed), len(payload)) + packed + payload


def _no_frames() -> Iterator[tuple[str, bytes]]:
    """Bytes that are no frame, or one that nobody may send, for any protocol."""
    noise = random.Random(7)
    yield "noise", noise.randbytes(5000)
    yield "http", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield "zeros", bytes(4096)
    yield "a header of 4 GiB", struct.pack(">IQ", 2**32 - 1, 0) + b"x" * 100
    yield "a payload of 16 EiB", struct.pack(">IQ", 20, 2**64 - 1) + b"x" * 100
    yield "a payload that nobody asked for", struct.pack(">IQ", 8, 400 << 20) + msgpack.packb(["hello", {}])
    yield "no header", struct.pack(">IQ", 0, 77)
    yield "a header that is not msgpack", struct.pack(">IQ", 64, 0) + b"\xc1" * 64
    yield "a header of noise", struct.pack(">IQ", 256, 0) + noise.randbytes(256)
    yield "a header that is no list", struct.pack(">IQ", 1, 0) + b"\x80"
    yield "a kind that is no text", raw(7, {})
    yield "a kind without end", raw("x" * 1000, {})
    yield "a header that is no map", raw("hello", [1, 2, 3])
    yield "keys that are no text", raw("hello", {1: 2})
    yield "a deep header", struct.pack(">IQ", 5000, 0) + b"\x92\xa1x" + b"\x91" * 4997
    yield "a wide header", struct.pack(">IQ", 200_000, 0) + b"\xdd\x00\x03\x0d\x40" * 40_000
    yield HALF, raw("hello", {"job": "x"}, b"y" * 1000)[:-500]


NO_FRAMES = dict(_no_frames())
HUGE = 2**63 - 1
WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    HUGE,
    1e308,
    float("nan"),
    "x\nimport os",
    b"\xff",
    [],
    [[1]],
    {"a": 1},
)


def fuzzed(kind: str, header: dict[str, Any], payload: bytes = b"") -> Iterator[Message]:
    """The message, then with each of its fields wrong in many ways, or missing; in the gate in every third way, others for each field."""
    yield kind, header, payload
    for number, field in enumerate(header):
        yield kind, {k: v for k, v in header.items() if k != field}, payload
        for value in WRONG[number % 3 :: 3] if FEWER in os.environ else WRONG:
            yield kind, {**header, field: value}, payload


Message = tuple[str, dict[str, Any], bytes]
NOWHERE = JobId("0" * 64)


NEWER = {
    "min_p": 0.1, "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1, "logit_bias": [[1, 1.0]],
}  # fmt: skip


def stage_messages(job: JobId, peer: PeerId) -> Iterator[Sequence[Message]]:
    hello = {"job": job, "source": 1, "target": 0, "term": 1, "target_term": 1}
    for message in fuzzed("hello", hello):
        yield [message]
    tensor = {
        "term": 1, "attempt": [1, 1], "step": 0, "microbatch": 0, "edge": "x", "dtype": "float32",
        "shape": [2**40, 2**40], "codec": "none",
    }  # fmt: skip
    for kind in ("activation", "gradient", "tie", "begin", "commit", "finish", "ready", "eval", "exec"):
        yield [("hello", hello, b""), (kind, tensor, b"z" * 64)]
        yield [(kind, tensor, b"z" * 64)]


def ring_messages(job: JobId, peer: PeerId) -> Iterator[Sequence[Message]]:
    sampling = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, **NEWER}
    opening = {
        "session": "s", "route": [[peer, 1]], "prompt_length": 4, "max_tokens": 4, "sampling": sampling, "logits": False,
        "top_logprobs": 1, "answered": 1,
    }  # fmt: skip
    gateway = ("hello", {"job": job, "from": -1, "to": 0}, b"")
    for message in fuzzed("hello", {"job": job, "from": -1, "to": 0}):
        yield [message]
    for message in fuzzed("open", opening, struct.pack("<4q", 1, 2, 3, 4)):
        yield [gateway, message]
    for payload in (b"odd", struct.pack("<4q", -1, HUGE, 300, 5), bytes(8 << 20)):
        yield [gateway, ("open", opening, payload)]
    for name in sampling:
        for value in WRONG:
            yield [gateway, ("open", {**opening, "sampling": {**sampling, name: value}}, b"")]
    for message in fuzzed("prompt", {"session": "s"}, struct.pack("<4q", -1, HUGE, 300, 5)):
        yield [gateway, ("open", opening, b""), message]
    for message in fuzzed("chunk", {"session": "s", "start": 0, "length": HUGE, "sample": True}, b"z" * 64):
        yield [("hello", {"job": job, "from": 0, "to": 0}, b""), message]
    for message in fuzzed("token", {"session": "s", "position": HUGE, "id": HUGE}):
        yield [("hello", {"job": job, "from": 0, "to": 0}, b""), message]
    yield [gateway, ("eval", {"session": "s"}, b"")]


def generate_messages(job: JobId, peer: PeerId) -> Iterator[Sequence[Message]]:
    request = {
        "model": "answers", "prompt": "ids", "max_tokens": 10**12, "temperature": 0.0, "top_k": 0, "top_p": 1.0,
        "seed": 0, "logits": False, "top_logprobs": 1, "stop": ["x"], **NEWER,
    }  # fmt: skip
    ids = struct.pack("<2q", 1, 2)
    for message in fuzzed("generate", request, ids):
        yield [message]
    for payload in (b"", b"odd", struct.pack("<2q", -1, HUGE), struct.pack("<2q", 256, 1), bytes(8 << 20)):
        yield [("generate", {**request, "max_tokens": 4}, payload)]
    yield [("generate", {**request, "prompt": "text", "max_tokens": 4}, b"\xff\xfe\x00")]
    yield [("exec", request, ids)]


def run_messages(job: JobId, peer: PeerId) -> Iterator[Sequence[Message]]:
    arrays = [["x", "float32", [1, 4]]]
    for kind, header in (
        ("run", {"model": "answers", "arrays": arrays, "grants": []}),
        ("stage", {"job": job, "stage": 0, "arrays": arrays, "grants": []}),
    ):
        for message in fuzzed(kind, header, bytes(16)):
            yield [message]
        for described in (
            [["x", "float32", [2**40, 2**40]]],
            [["x", "float32", [0] * 9]],
            [["x", "object", [4]]],
            [["x", "float32", [-4]]],
            [["x\nimport os", "float32", [4]]],
            arrays * 2,
            arrays * 257,
            [["x", "float32"]],
        ):
            yield [(kind, {**header, "arrays": described}, bytes(16))]
        yield [(kind, header, b"odd")]
    yield [("exec", {"model": "answers", "arrays": arrays}, bytes(16))]


def blob_messages(job: JobId, peer: PeerId) -> Iterator[Sequence[Message]]:
    for digest in (NOWHERE, "../../identity", "x" * 70, "", job.upper(), "x\nimport os"):
        yield [("index", {"digest": digest}, b"")]
        yield [("get", {"digest": digest, "chunks": [0]}, b"")]
    for message in fuzzed("get", {"digest": job, "chunks": [0]}):
        yield [message]
    for chunks in ([HUGE], [-1], [-HUGE], ["0"], [None], [[0]], [1.5], list(range(65)), [0, HUGE]):
        yield [("get", {"digest": job, "chunks": chunks}, b"")]
    yield [("put", {"digest": job}, b"z" * 1000)]


def job_messages(job: JobId, peer: PeerId) -> Iterator[Sequence[Message]]:
    stop = {"job": job, "time": 1e9, "signature": b"x" * 64}
    for message in fuzzed("stop", stop):
        yield [message]
    for value in (*WRONG, NOWHERE):
        yield [("watch", {"job": value}, b"")]
        yield [("launch", {"job": value}, b"")]
    yield [("exec", {"job": job}, b"")]


def status_messages(job: JobId, peer: PeerId) -> Iterator[Sequence[Message]]:
    for kind in ("stat", "exec", "status\n", "x" * 64):
        yield [(kind, {"all": HUGE}, b"z" * 1000)]


MESSAGES: dict[str, Callable[[JobId, PeerId], Iterator[Sequence[Message]]]] = {
    STAGE.name: stage_messages,
    RING.name: ring_messages,
    GENERATE.name: generate_messages,
    RUN.name: run_messages,
    BLOB.name: blob_messages,
    JOB.name: job_messages,
    STATUS.name: status_messages,
}


# --- who sends it


@dataclass
class Stranger:
    transport: P2PTransport
    victim: PeerId

    async def throw(self, protocol: str, data: bytes, seconds: float) -> str:
        """Bytes on a stream of their own. What came of it: the kind of an answer, "ended" or "waits"."""
        stream = await self.transport.open(self.victim, protocol)
        assert isinstance(stream, FrameStream)
        try:
            await stream.write_message(data)
            async with asyncio.timeout(seconds):
                return (await stream.receive()).kind
        except TimeoutError:
            return "waits"
        except TransportError:
            return "ended"
        finally:
            stream.abort()

    async def dump(self, protocol: str, first: Sequence[Message], size_bytes: int) -> int:
        """Really send a payload of that size after some messages; how much of it was taken before the stream ended."""
        stream = await self.transport.open(self.victim, protocol)
        assert isinstance(stream, FrameStream)
        taken = 0
        head = msgpack.packb([first[-1][0] if first else "hello", {}])
        try:
            for kind, header, payload in first:
                await stream.send(kind, header, [payload])
            async with asyncio.timeout(ANSWER_SECONDS):
                await stream.write_message(struct.pack(">IQ", len(head), size_bytes) + head)
                while taken < size_bytes:
                    await stream.write_message(bytes(1 << 20))
                    taken += 1 << 20
        except TransportError:
            pass
        finally:
            stream.abort()
        return taken

    async def say(self, protocol: str, messages: Sequence[Message]) -> list[Frame]:
        """What the victim answered before it ended the stream, or had nothing more to say for a moment."""
        heard: list[Frame] = []
        stream = await self.transport.open(self.victim, protocol)
        try:
            with suppress(TransportError, TimeoutError):
                for kind, header, payload in messages:
                    await stream.send(kind, header, [payload])
                while True:
                    async with asyncio.timeout(WAIT_SECONDS):
                        heard.append(await stream.receive())
        finally:
            stream.abort()
        return heard


@asynccontextmanager
async def stranger(victim: LocalPeer) -> AsyncIterator[Stranger]:
    config = P2PConfig(identity=Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",))
    async with P2PTransport.start(config) as transport:
        await transport.connect(victim.address)
        yield Stranger(transport, PeerId(victim.peer_id))


@contextmanager
def unharmed(peers: Peers, victim: LocalPeer, growth_bytes: int = GROWTH_BYTES) -> Iterator[None]:
    """Afterwards the peer lives, has not grown, and has logged lines and no tracebacks."""
    process = psutil.Process(victim.process.pid)
    log = peers.root / f"{victim.name}.log"
    before, said = process.memory_info().rss, len(log.read_text())
    yield
    assert victim.process.returncode is None
    grown = process.memory_info().rss - before
    lines = log.read_text()[said:].splitlines()
    print(f"grew {grown >> 20} MiB, {len(lines)} lines", *lines[::20], sep="\n")
    assert grown < growth_bytes, f"grew by {grown >> 20} MiB"
    assert not [line for line in lines if "Traceback" in line or line.startswith(" ")], lines[:20]
    assert all(line[:2] == "20" and len(line) < 700 for line in lines), [
        line for line in lines if line[:2] != "20"
    ]


async def answers(context: Context, victim: LocalPeer) -> None:
    """Good requests still get what they ask for."""
    status = await call(context.transport, PeerId(victim.peer_id), STATUS.name, "status")
    assert status.kind == "status" and len(status.header["hosted"]) == 2
    request = GenerateRequest(model="answers", prompt_ids=(1, 2, 3), max_tokens=8)
    pieces = [piece async for piece in generate(context.transport, PeerId(victim.peer_id), request)]
    assert isinstance(pieces[-1], Answer) and len(pieces[-1].tokens) == 8


async def put_to_work(context: Context, victim: LocalPeer, tmp_path: Path) -> dict[str, JobId]:
    """An endless training job and a served model, on the victim alone."""
    found = spec.load(write_job(tmp_path / "job.toml", "endless", steps=10**6, stages=1, snapshot_every=1000))
    peers = await working_peers(context)
    trainer = trainer_identity(tmp_path)
    training = await asyncio.to_thread(prepare_training, found, peers, context.blobs.store, author=trainer)
    serving = await asyncio.to_thread(served_model, context, PeerId(victim.peer_id))
    async with asyncio.timeout(ANSWER_SECONDS):
        for job in (training, serving):
            await launch(context, job)
        for job in (training, serving):
            await wait_until_held(context, job)
    return {"train": training.job, "serve": serving.job}


def served_model(
    context: Context, owner: PeerId, name: str = "answers", config: GPTConfig = TINY
) -> Prepared:
    torch.manual_seed(3)
    module = GPT(config)
    captured = capture_language_model(module, training=False, maximum_sequence=config.sequence)
    graph = serving_graph(captured, cache="kv", maximum_sequence=config.sequence)
    serve = ServeConfig(cache="kv", max_sequence=config.sequence, vocabulary=config.vocabulary)
    return prepare_graph(
        GraphJob(name=name, graph=graph, variables=variables_from_module(module), byte_level=True),
        as_requested(graph, serve, (), [owner]),
        context.blobs.store,
    )


async def no_frames(enemy: Stranger) -> None:
    for protocol in MESSAGES:
        outcomes = await asyncio.gather(
            *(
                enemy.throw(protocol, data, WAIT_SECONDS if name == HALF else ANSWER_SECONDS)
                for name, data in NO_FRAMES.items()
            )
        )
        found = dict(zip(NO_FRAMES, outcomes, strict=True))
        waiting = {name for name, outcome in found.items() if outcome == "waits"}
        print(protocol, found)
        assert waiting == {HALF}, (protocol, found)
        assert set(outcomes) <= {"error", "ended", "waits"}, (protocol, found)


async def no_end(enemy: Stranger, serving: JobId) -> None:
    """Bytes without end, to every protocol."""
    gateway = ("hello", {"job": serving, "from": -1, "to": 0}, b"")
    for protocol in MESSAGES:
        first = [gateway] if protocol == RING.name else []
        size = 400 << 20
        taken = await asyncio.gather(*(enemy.dump(protocol, first, size) for _ in range(4)))
        assert max(taken) < size // 4, (protocol, taken)


async def wrong_messages(enemy: Stranger, jobs: dict[str, JobId]) -> None:
    for protocol, messages in MESSAGES.items():
        job = jobs["serve" if protocol in (RING.name, GENERATE.name, RUN.name) else "train"]
        every = list(messages(job, enemy.victim))
        kinds = Counter[str]()
        for at in range(0, len(every), 64):
            heard = await asyncio.gather(*(enemy.say(protocol, m) for m in every[at : at + 64]))
            kinds.update(frame.kind for frames in heard for frame in frames)
        print(protocol, len(every), kinds)


def test_a_stranger_on_every_protocol(peers: Peers, tmp_path: Path) -> None:
    victim = peers.start("victim", "--threads", "1")

    async def attack(context: Context) -> None:
        jobs = await put_to_work(context, victim, tmp_path)
        await answers(context, victim)
        async with stranger(victim) as enemy:
            with unharmed(peers, victim, FIRST_GROWTH_BYTES):
                await no_frames(enemy)
                await answers(context, victim)
                await no_end(enemy, jobs["serve"])
                await answers(context, victim)
                await wrong_messages(enemy, jobs)
                await answers(context, victim)
            with unharmed(peers, victim):
                await wrong_messages(enemy, jobs)
                await answers(context, victim)

    with_client(peers.root / "client", victim.address, attack)


# --- hostile jobs


def graph_variants(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Bytes in place of a graph, most of them a sound graph in which one thing is wrong."""
    yield "noise", random.Random(1).randbytes(3000)
    yield "pickle", pickle.dumps(Mischief())
    yield "half", good[: len(good) // 2]
    yield "huge", good[:40] + b"\xdf\x3b\x9a\xca\x00" * 50

    def changed(change: Callable[[list[Any]], None]) -> bytes:
        value = msgpack.unpackb(good)
        change(value)
        data: bytes = msgpack.packb(value)
        return data

    nodes = 6  # symbols 3, inputs 4, variables 5, nodes 6: see fusion.dag.ir.serialise

    def name(value: list[Any]) -> None:
        value[nodes][0][0] = "x\nimport os"

    def op(value: list[Any]) -> None:
        value[nodes][0][1] = "aten.system"

    def shape(value: list[Any]) -> None:
        value[nodes][0][3][0][1] = [1, 2, 3, 4, 5]

    def constant(value: list[Any]) -> None:
        value[nodes][0][2].append("__import__('os').system('true')")

    def cycle(value: list[Any]) -> None:
        value[nodes][0][2][0] = [0, len(value[nodes]) + 1, 0]

    def symbol(value: list[Any]) -> None:
        value[3][0] = "batch\nimport os"

    for change in (name, op, shape, constant, cycle, symbol):
        yield change.__name__, changed(change)


class Mischief:
    """What a pickle could do to whoever loads it."""

    path = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def with_graph(store: BlobStore, prepared: Prepared, name: str, graph: bytes) -> Prepared:
    return with_manifest(store, replace(prepared.manifest, name=name, graph=store.put(graph)))


def with_manifest(store: BlobStore, manifest: Manifest) -> Prepared:
    manifest = replace(manifest, author=AUTHOR.peer_id)
    job = JobId(store.put(manifests.encode(manifest)))
    blobs = (Digest(job), manifest.graph, *manifest.weights)
    return Prepared(
        job=job, manifest=manifest, author=AUTHOR, blobs=blobs, predicted_seconds=0.0, parameters=0
    )


async def refused(context: Context, traps: Sequence[Prepared], log: Path) -> dict[str, str]:
    """What the peer said of each, once it has of all. They are published until then, as a launcher would: a peer with work
    of others takes up one after the other. No peer alone ends a job whose graph it refuses, but all hear of bad weights."""

    async def launcher(trap: Prepared) -> None:
        with suppress(JobFailed):
            await wait_until_held(context, trap)

    tasks = [asyncio.create_task(launcher(trap)) for trap in traps]
    said: dict[str, str] = {}
    try:
        async with asyncio.timeout(ANSWER_SECONDS * 2):
            while len(said) < len(traps):
                await asyncio.sleep(0.5)
                lines = [
                    line for line in log.read_text().splitlines() if "refused" in line or "failed" in line
                ]
                for trap in traps:
                    for line in lines:
                        if f" {trap.manifest.name}" in line:
                            said.setdefault(trap.manifest.name, line)
    finally:
        print(*said.items(), sep="\n")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return said


@pytest.mark.slow
def test_jobs_that_are_traps_are_refused(peers: Peers, tmp_path: Path) -> None:
    victim = peers.start("victim")
    Mischief.path = str(tmp_path / "mischief")

    async def attack(context: Context) -> None:
        jobs = await put_to_work(context, victim, tmp_path)
        store, us = context.blobs.store, PeerId(victim.peer_id)
        good = {
            kind: Prepared(
                job=job,
                manifest=manifests.decode(store.path(job).read_bytes()),
                author=AUTHOR,
                blobs=(),
                predicted_seconds=0.0,
                parameters=0,
            )
            for kind, job in jobs.items()
        }
        with unharmed(peers, victim):
            traps: list[Prepared] = []
            for kind, prepared in good.items():
                graph = store.path(prepared.manifest.graph).read_bytes()
                for name, data in graph_variants(graph):
                    traps.append(with_graph(store, prepared, f"{kind}-{name}", data))
                far = replace(
                    prepared.manifest,
                    name=f"{kind}-cut",
                    cuts=(10**9,),
                    weights=prepared.manifest.weights * 2,
                    proposed=(us, us),
                    memory_bytes=(),
                )
                traps.append(with_manifest(store, far))
            weights = replace(
                good["serve"].manifest, name="serve-weights", weights=(store.put(pickle.dumps(Mischief())),)
            )
            traps.append(with_manifest(store, weights))
            for trap in traps:
                await launch(context, trap)
            for number, data in enumerate((b"", b"\x00" * 100_000, pickle.dumps(Mischief()), b"\x9f" * 3000)):
                lure = replace(good["serve"], job=JobId(store.put(data)), blobs=())
                await launch(context, replace(lure, manifest=replace(lure.manifest, name=f"lure-{number}")))
            await refused(context, traps, peers.root / f"{victim.name}.log")
            await answers(context, victim)

    with_client(peers.root / "client", victim.address, attack)
    assert not Path(Mischief.path).exists()


# --- a disk that is full


@contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[None]:
    """A file system of its own, of that size, at `path`."""
    path.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("this needs the right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path: Path) -> None:
    with suppress(OSError), path.open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root mounts file systems")
@pytest.mark.parametrize("pages", [0, 1])
def test_a_full_disk_at_start_is_said_in_one_line(traces: str, tmp_path: Path, pages: int) -> None:
    home = tmp_path / "home"
    with small_disk(home, 16 * PAGE_BYTES):
        fill(home / "big")
        os.truncate(home / "big", (16 - pages) * PAGE_BYTES)  # one is enough for the identity alone
        done = subprocess.run(
            [sys.executable, "-m", "fusion.cli.main", "start", "--home", str(home), "--bootstrap", os.devnull, "--json"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        [line] = done.stderr.splitlines()
        assert done.returncode in (1, 2) and done.stdout == ""
        assert "No space left" in line or "disk is full" in line


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root mounts file systems")
def test_a_disk_that_fills_up_costs_a_job_and_not_the_peer(peers: Peers, tmp_path: Path) -> None:
    with small_disk(peers.root / "victim", 4 << 20):
        victim = peers.start("victim")

        async def attack(context: Context) -> None:
            us = PeerId(victim.peer_id)
            large = GPTConfig(vocabulary=256, blocks=2, width=256, heads=2, sequence=32)
            big = await asyncio.to_thread(served_model, context, us, "big", large)
            assert sum(context.blobs.store.size(digest) for digest in big.manifest.weights) > 4 << 20
            warm = await asyncio.to_thread(served_model, context, us, "warm")
            async with asyncio.timeout(
                ANSWER_SECONDS
            ):  # its first model has a peer import what it runs models with
                await launch(context, warm)
                await wait_until_held(context, warm)
            with unharmed(peers, victim):
                await launch(context, big)
                log = peers.root / "victim.log"
                async with asyncio.timeout(ANSWER_SECONDS):
                    while "disk is full" not in log.read_text():
                        await asyncio.sleep(0.1)
                small = await asyncio.to_thread(served_model, context, us, "answers")
                async with asyncio.timeout(ANSWER_SECONDS):
                    await launch(context, small)
                    await wait_until_held(context, small)
                request = GenerateRequest(model="answers", prompt_ids=(1, 2, 3), max_tokens=8)
                pieces = [piece async for piece in generate(context.transport, us, request)]
                assert isinstance(pieces[-1], Answer)

        try:
            with_client(peers.root / "client", victim.address, attack)
        finally:
            peers.stop(victim)
