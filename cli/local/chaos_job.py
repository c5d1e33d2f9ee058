"""The training job of a chaos run: prepared once, without a swarm, so that every run of it has the same plan bit for
bit; then launched as often as wanted, each time as a job of its own. Loads torch: import it inside a command.
"""

from __future__ import annotations

import asyncio
import secrets
import sysconfig
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fusion.dag.ir.opset import OPSET_VERSION
from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job.manifest import Manifest, OptimizerConfig
from fusion.runtime.job.spec import DataSpec, GPTConfig, JobSpec, PlacementSpec, TrainSpec
from fusion.runtime.launch.launch import launch, wait_until_held
from fusion.runtime.launch.prepare import prepare_training
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.peer.client import ClientConfig, open_client
from fusion.runtime.training.snapshots import snapshot
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.directory.records import Digest, JobId, PeerRecord
from fusion.swarm.identity import Identity
from fusion.swarm.transport import PeerId

NAME = "chaos"
HANDOVER_SECONDS = 120.0
STORE_BYTES = 1 << 30
BLOCKS, WIDTH, HEADS, SEQUENCE = 4, 96, 4, 64
MICROBATCHES, MICROBATCH_SIZE = 4, 2
MODULES = ("argparse", "ast", "datetime", "inspect", "pathlib", "tarfile", "textwrap", "typing")


@dataclass(frozen=True)
class ChaosJob:
    """A prepared job; its blobs lie in `store`."""

    store: Path
    prepared: Prepared

    @property
    def stages(self) -> int:
        return self.prepared.manifest.stages


def prepare(store: Path, stages: int, *, seed: int = 0, **train: int) -> ChaosJob:
    """A byte-level GPT on a few modules of the standard library, in so many even stages. Blocking, for seconds.

    The peers that the placement is computed for are invented, all alike: what real ones measure differs from start to
    start, and other cuts would be another plan. `train` replaces settings of [train]."""
    library = Path(sysconfig.get_path("stdlib"))
    settings: dict[str, Any] = {
        "steps": 1, "sequence": SEQUENCE, "microbatches": MICROBATCHES, "microbatch_size": MICROBATCH_SIZE,
        "seed": seed, **train,
    }  # fmt: skip
    spec = JobSpec(
        name=NAME,
        model=GPTConfig(blocks=max(BLOCKS, stages), width=WIDTH, heads=HEADS, sequence=SEQUENCE),
        data=DataSpec(files=tuple(library / f"{module}.py" for module in MODULES)),
        train=TrainSpec(**settings),
        # Constant, so that the state at a step does not depend on how many steps there will be.
        optimizer=OptimizerConfig(learning_rate=1e-3, schedule="constant", weight_decay=0.01),
        placement=PlacementSpec(stages=stages),
    )
    blobs = BlobStore(store, STORE_BYTES)
    prepared = prepare_training(spec, [invented(i) for i in range(stages)], blobs, author=_author(store))
    return ChaosJob(store, prepared)


def _author(store: Path) -> Identity:
    return Identity.load_or_create(store.with_name(f"{store.name}-author"))


def invented(number: int) -> PeerRecord:
    """A peer that a placement is computed for before there is any."""
    return PeerRecord(
        peer=PeerId(f"invented-{number}"), name="", addresses=(), role="peer", device="cpu",
        flops_per_second=1e10, memory_bytes=4 << 30, free_memory_bytes=4 << 30, software="", opset=OPSET_VERSION,
        started_at=0.0,
    )  # fmt: skip


def another(plan: ChaosJob, name: str, steps: int, proposed: Sequence[str], **train: Any) -> ChaosJob:
    """The same plan as a new job for these peers, `steps` long; `train` replaces fields of its TrainConfig."""
    old = plan.prepared.manifest
    assert old.train is not None
    manifest: Manifest = replace(
        old,
        name=name,
        proposed=tuple(PeerId(peer) for peer in proposed),
        train=replace(old.train, steps=steps, **train),
        salt=secrets.token_hex(8),
    )
    job = JobId(BlobStore(plan.store, STORE_BYTES).put(manifests.encode(manifest)))
    blobs = (Digest(job), *plan.prepared.blobs[1:])
    return ChaosJob(plan.store, replace(plan.prepared, job=job, manifest=manifest, blobs=blobs))


def stored(store: Path, job: str) -> ChaosJob:
    """A job of `another` as another process finds it in the store."""
    blobs = BlobStore(store, STORE_BYTES)
    manifest = manifests.decode(blobs.path(Digest(job)).read_bytes())
    assert manifest.train is not None
    data = manifest.train.data
    named = (manifest.graph, *manifest.weights, *(digest for _, digest in manifest.files), data.train)
    needed = (Digest(job), *named, *([data.held_out] if data.held_out is not None else []))
    prepared = Prepared(job=JobId(job), manifest=manifest, blobs=tuple(dict.fromkeys(needed)),
                        author=_author(store), predicted_seconds=0.0, parameters=0)  # fmt: skip
    return ChaosJob(store, prepared)


@asynccontextmanager
async def launched(plan: ChaosJob, home: Path, peer: str) -> AsyncIterator[asyncio.Task[None]]:
    """Hand the job to the swarm through the peer at this address. The task ends once the swarm holds all of it; it is
    cancelled when the block ends, so that the launcher, whose blobs go with it, may leave whenever it likes."""
    async with open_client(ClientConfig(home=home, peer=peer)) as context:
        source = BlobStore(plan.store, STORE_BYTES)
        for digest in plan.prepared.blobs:
            await asyncio.to_thread(context.blobs.store.put, source.path(digest))
        await launch(context, plan.prepared)
        holding = asyncio.create_task(wait_until_held(context, plan.prepared), name="handing over")
        try:
            yield holding
        finally:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)


def shards(index: str, job: str, stages: int, homes: Sequence[Path]) -> tuple[str, ...] | None:
    """Digest of each stage's state in a snapshot, from whichever of these peers' homes has its index: equal digests
    are equal states, bit for bit, optimizers included. None where no home has it (any longer)."""
    for home in homes:
        try:
            data = (home / "blobs" / index).read_bytes()
        except OSError:
            continue
        return tuple(snapshot.decode_index(data, JobId(job), stages).shards)
    return None
