"""From a model's directory or file to the blobs and the manifest of a job that serves it: capture, place, shard.

Blocking, for seconds; everything ends up in the local store, nothing is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fusion.runtime.capture.generation import ignored_settings
from fusion.runtime.capture.lowering.captured_before import CapturedBefore
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.launch.servable import Servable, read_servable
from fusion.runtime.launch.serving_spec import ServingSpec
from fusion.runtime.launch.shard import GraphJob, ReportLine, prepare_graph, silent
from fusion.runtime.placing.placed_before import PlacementsBefore
from fusion.runtime.serving.requests.chat_trial import chat_fault
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.directory.records import LinkRecord, PeerRecord
from fusion.swarm.identity import Identity


def prepare_serving(
    spec: ServingSpec,
    peers: Sequence[PeerRecord],
    store: BlobStore,
    *,
    links: Sequence[LinkRecord] = (),
    author: Identity | None = None,
    home: Path | None = None,
    report: ReportLine = silent,
    note: ReportLine = silent,
    now: Callable[[], float] = time.time,
) -> Prepared:
    """A job that serves the model. One whose attention is not recognised is served without a KV cache: each token computes the whole
    prefix, which is exact. `home`: of the last placements and captured graphs, if they are to count (`PlacementsBefore`, `CapturedBefore`). `note` gets the lines of
    `remarks`. `now`: unix seconds. Raises JobError, CaptureError, PlacementError."""
    found = servable(spec, report, home)
    for line in remarks(spec.path, found):
        note(line)
    model, drafted = found.model, found.draft
    admitted = spec.admission.among(peers, lambda peer: peer.peer)
    report(f"placing it on {len(admitted)} peers")
    graph, placed = found.placed(admitted, links, spec.stages, home)
    if home is not None:
        PlacementsBefore(home).remember(graph, placed)
    job = GraphJob(
        name=spec.name,
        graph=graph,
        variables=found.read,
        parameters=found.parameters,
        files={**model.chat, **(drafted.files if drafted is not None else {})},
        tokenizer=model.tokenizer,
        byte_level=model.about.byte_level,
        author=author or Identity.generate(),
        admission=spec.admission,
    )
    return prepare_graph(job, placed, store, report, now=now)


def servable(spec: ServingSpec, report: ReportLine, home: Path | None) -> Servable:
    """As `read_servable`; with a `home`, of a graph that was captured before."""
    return read_servable(spec, report, None if home is None else CapturedBefore(home).of)


def remarks(path: Path, found: Servable) -> list[str]:
    """Lines on settings of a model's files that serving ignores, on a chat template that fails, and on a tokenizer that is not the
    model's. Blocking: the template is rendered once."""
    fault, unknown = chat_fault(found.model.chat), found.model.unknown_tokens
    tokens = f"its tokenizer has tokens that the model does not have ({unknown}): a text with one of them is refused"
    lines = [*ignored_settings(path, found.config, found.model.unread), fault, tokens if unknown else ""]
    return [line for line in lines if line]
