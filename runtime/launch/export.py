"""Export of a trained job to a directory: `model.safetensors` with the original names, loadable strictly into the original
module, and beside it the files that make the directory servable (`fusion.runtime.capture.sources`)."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from fusion.runtime.belief.naming import Known
from fusion.runtime.belief.reading import read_belief
from fusion.runtime.capture.sources import TOKENIZER_FILE
from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.model_files import WEIGHTS_FILE, WRITTEN_AS, is_exported
from fusion.runtime.job.stage_graphs import MAX_GRAPH_BYTES, load_stages
from fusion.runtime.training.compute.stage_codecs import residual_shapes
from fusion.runtime.training.snapshots import snapshot
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.errors import BlobError, SwarmError
from fusion.swarm.transport import PeerId

MOST_HOLDERS = 256  # that are tried for a blob without a provider record
EXPORT_TRIES, EXPORT_PAUSE_SECONDS = 5, 1.0


async def export(context: Context, job: JobId, directory: Path, known: Known | None = None) -> int:
    """Write the newest snapshot of a job into `directory`, which must be new or empty; returns its step (0: the initial weights).
    `known`: the job, if it was inspected already. Raises JobError, BlobError, OSError."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise JobError(f"{directory} is there already and is not an empty directory")
    belief = await read_belief(context, job) if known is None else known.belief
    if belief is None:
        raise JobError(f"nobody in the swarm speaks for the job {job[:12]}")
    record = belief.record
    hints = [peer for peer in (record.lead, record.author) if peer is not None]
    manifest = manifests.decode(await context.blobs.read(Digest(job), manifests.MAX_MANIFEST_BYTES, hints))
    context.leases.know(manifest.law(job))
    hints = await _perhaps_holders(context, hints, manifest)
    blobs = context.blobs.of(job)
    if manifest.kind != "train":
        raise JobError(f"{manifest.name} serves a model: there is nothing to export")
    step, tensors = await _tensors(context, job, manifest, record.snapshot, hints)
    files = {WRITTEN_AS.get(name, name): await blobs.fetch(digest, hints) for name, digest in manifest.files}
    if manifest.tokenizer is not None:
        files[TOKENIZER_FILE] = await blobs.fetch(manifest.tokenizer, hints)

    await _written(directory, files, tensors)
    return step


async def export_newest(context: Context, known: Known, directory: Path) -> int:
    """As `export`, of a job that goes on. Tries again with the job's newest record, as peers drop a snapshot once there are newer
    ones, perhaps while we fetch its shards."""
    for _ in range(EXPORT_TRIES - 1):
        try:
            return await export(context, known.record.job, directory, known)
        except BlobError:
            await asyncio.sleep(EXPORT_PAUSE_SECONDS)
            with suppress(SwarmError):
                belief = await read_belief(context, known.record.job, manifest=known.manifest)
                known = known if belief is None else replace(known, belief=belief)
    return await export(context, known.record.job, directory, known)


async def _perhaps_holders(context: Context, likely: Iterable[PeerId], manifest: Manifest) -> list[PeerId]:
    """Peers that may hold the blobs of a job, likely ones first. After its end they stay for a day where its stages ran, but without
    provider records; and a stage may have moved to any peer since the launch."""
    peers = [peer.peer for peer in await context.directory.peers() if peer.role == "peer"]
    proposed = (peer for peer in manifest.proposed if peer)
    return list(dict.fromkeys([*likely, *proposed, *peers]))[:MOST_HOLDERS]


async def _written(directory: Path, files: Mapping[str, Path], tensors: Mapping[str, torch.Tensor]) -> None:
    """`_write` in a thread. A cancelled call waits for its end, too: otherwise it would go on after the caller removes the directory,
    or be cut off by the end of the process."""
    writing = asyncio.ensure_future(asyncio.to_thread(_write, directory, files, tensors))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        raise


def _write(directory: Path, files: Mapping[str, Path], tensors: Mapping[str, torch.Tensor]) -> None:
    """All of it, or where the disk is full nothing: half a model would block the next attempt. Raises OSError."""
    existed = directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        for name, path in files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, directory / name)
        snapshot.save(tensors, directory / WEIGHTS_FILE, {"format": "pt"})
    except OSError as error:
        for name in (*files, WEIGHTS_FILE):
            (directory / name).unlink(missing_ok=True)
        for folder in {(directory / name).parent for name in files} - {directory}:
            with suppress(OSError):  # it has other files, which stay
                folder.rmdir()
        if not existed:
            directory.rmdir()
        # The error itself names the file that was copied, or none.
        raise OSError(error.errno, error.strerror, str(directory)) from error


async def _tensors(
    context: Context, job: JobId, manifest: Manifest, newest: Digest | None, hints: list[PeerId]
) -> tuple[int, dict[str, torch.Tensor]]:
    """Every variable that the original module's state_dict has, under each of its names."""
    blobs = context.blobs.of(job)
    await blobs.fetch(manifest.graph, hints, max_bytes=MAX_GRAPH_BYTES)
    stages, _ = await load_stages(context, job, manifest)
    digests, step = manifest.weights, 0
    if newest is not None:
        data = await blobs.read(newest, snapshot.MAX_INDEX_BYTES, hints)
        index = snapshot.decode_index(data, job, manifest.stages)
        digests, step = index.shards, index.step
    found: dict[str, torch.Tensor] = {}
    for stage, digest in zip(stages, digests, strict=True):
        path = await blobs.fetch(digest, hints)
        if newest is None:
            values = await asyncio.to_thread(snapshot.load_weights, path, stage)
        else:
            left_out = {} if manifest.train is None else residual_shapes(stage, manifest.train)
            values = snapshot.variables(await asyncio.to_thread(snapshot.load_state, path, stage, left_out))
        for variable in stage.graph.variables:
            for name in (variable.name, *variable.aliases):
                if is_exported(name) and name not in found:
                    # A tied tensor is written under each name: safetensors keeps no ties.
                    value = values[variable.name]
                    found[name] = value if name == variable.name else value.clone()
    runs = 0 if manifest.train is None else step * manifest.train.microbatches
    snapshot.count_batches(found, stages, runs)
    return step, found
