"""From a job file, a model directory or a graph to the blobs and the manifest of a job: capture, place, cut, shard, pack.

Blocking, for seconds; everything ends up in the local store, nothing is sent.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from tokenizers import Tokenizer

from fusion.dag.ir import serialise
from fusion.dag.ir.errors import UnsupportedModel
from fusion.dag.ir.graph import Graph
from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture import sources
from fusion.runtime.capture.capture import is_exported
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.capture.sources import LanguageModel, Read
from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import DataConfig, Manifest, ServeConfig, TrainConfig
from fusion.runtime.job.model_files import ABOUT_FILE, GRAPH_FILE, check_directory, is_exported_directory
from fusion.runtime.job.spec import DataSpec, HuggingFaceConfig, JobSpec
from fusion.runtime.placing.placed_job import as_asked, place_job
from fusion.runtime.placing.plan import Plan
from fusion.runtime.training.data.batches import pack_text, token_bytes
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.directory.records import Digest, JobId, LinkRecord, PeerRecord
from fusion.swarm.identity import friendly_name
from fusion.swarm.transport import PeerId

Say = Callable[[str], None]  # gets one line each time the work enters another phase


def _silent(line: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A job whose blobs all lie in the local store."""

    job: JobId
    manifest: Manifest
    blobs: tuple[Digest, ...]  # everything that peers will fetch, the manifest included
    predicted_seconds: (
        float  # a step, or the longest prompt once through, by the placement's model; 0: not known
    )
    parameters: int
    plan: Plan | None = None  # of a training job that was placed here: what launching it will set going


def prepare_training(
    spec: JobSpec,
    peers: Sequence[PeerRecord],
    store: BlobStore,
    *,
    links: Sequence[LinkRecord] = (),
    trainer: str = "",
    say: Say = _silent,
) -> Prepared:
    """Capture the model, place it on `peers`, shard weights, pack data; `links` is what they have measured. Raises
    JobError, CaptureError, PlacementError. Blocking, for seconds: run it in a thread."""
    tokenizer = _tokenizer(spec.data.tokenizer)
    say("capturing the model")
    if isinstance(spec.model, HuggingFaceConfig):
        model = sources.huggingface(spec.model, training=True, seed=spec.train.seed)
        tokenizer = tokenizer or _tokenizer(model.tokenizer)
    else:
        model = sources.builtin(
            spec.model, spec.train.seed, byte_level=tokenizer is None, tokenizer=spec.data.tokenizer
        )
    assert model.training is not None
    if spec.train.sequence > model.about.max_sequence:
        raise JobError(
            f"train.sequence must be at most {model.about.max_sequence}, what the model was built for"
        )
    say("packing the data")
    data = _pack(spec.data, tokenizer, model.about.vocabulary, spec.train.sequence, store)
    train = spec.train
    config = TrainConfig(
        steps=train.steps,
        microbatches=train.microbatches,
        microbatch_size=train.microbatch_size,
        sequence=train.sequence,
        seed=train.seed,
        optimizer=spec.optimizer,
        data=data,
        schedule=train.schedule,
        snapshot_every=train.snapshot_every,
        evaluate_every=train.evaluate_every,
        evaluate_batches=train.evaluate_batches,
        compression=spec.compression,
    )
    return prepare_graph(
        spec.name,
        clean(model.training),
        model.read,
        config,
        store,
        peers=_chosen(peers, spec.placement.peers),
        links=links,
        stages=spec.placement.stages,
        files=_export_files(model),
        tokenizer=model.tokenizer,
        byte_level=model.about.byte_level,
        trainer=trainer,
        say=say,
    )


def prepare_serving(
    directory: Path,
    name: str,
    peers: Sequence[PeerRecord],
    store: BlobStore,
    *,
    stages: int | None = None,
    links: Sequence[LinkRecord] = (),
    trainer: str = "",
    say: Say = _silent,
) -> Prepared:
    """A Hugging Face model directory or one written by `jobs export`, as a job that serves it under `name`. A model
    whose attention is not recognised is served by computing the whole prefix anew for each token, which is exact."""
    check_directory(directory)
    say("reading the model")
    if is_exported_directory(directory):
        model = sources.exported(directory)
    else:
        model = sources.huggingface(HuggingFaceConfig(path=directory), training=False)
    about = model.about
    say("rewriting its graph for decoding")
    try:
        graph, cached = serving_graph(model.inference, cache="kv", maximum_sequence=about.max_sequence), True
    except UnsupportedModel as reason:
        say(f"no KV cache for this model ({reason}): each token will compute the whole prefix")
        graph, cached = serving_graph(model.inference, cache="recompute"), False
    config = ServeConfig(
        cache="kv" if cached else "recompute",
        max_sequence=about.max_sequence,
        vocabulary=about.vocabulary,
        end_tokens=about.end_tokens,
    )
    return prepare_graph(
        name,
        graph,
        model.read,
        config,
        store,
        peers=peers,
        links=links,
        stages=stages,
        tokenizer=model.tokenizer,
        byte_level=about.byte_level,
        trainer=trainer,
        say=say,
    )


def prepare_graph(
    name: str,
    graph: Graph,
    variables: Mapping[str, torch.Tensor] | Read,
    config: TrainConfig | ServeConfig,
    store: BlobStore,
    *,
    peers: Sequence[PeerRecord] = (),
    links: Sequence[LinkRecord] = (),
    cuts: Sequence[int] | None = None,
    stages: int | None = None,
    proposed: Sequence[PeerId] = (),
    replicas: Sequence[Sequence[PeerId]] = (),
    files: Mapping[str, bytes | Path] | None = None,
    tokenizer: Path | None = None,
    byte_level: bool = False,
    trainer: str = "",
    say: Say = _silent,
) -> Prepared:
    """The part that both share: any captured graph with its variables by name. With `cuts` (and `proposed`, `replicas`, if
    anybody) the placement is the caller's own; otherwise the graph is placed on `peers`, whose links `links` tells of."""
    if cuts is None:
        say(f"placing it on {len(peers)} peers")
        placed = place_job(graph, config, peers, links, stages)
    else:
        placed = as_asked(graph, config, cuts, proposed, peers, replicas)
    config, parts = placed.config, placed.parts
    say(f"sharding its weights into {len(parts)} stages")
    read = variables if callable(variables) else _reader(variables)
    data = config.data if isinstance(config, TrainConfig) else None
    manifest = Manifest(
        name=name,
        kind="train" if isinstance(config, TrainConfig) else "serve",
        graph=store.put(serialise.encode(graph)),
        cuts=placed.cuts,
        weights=tuple(store.put(save(_contiguous(read(part.graph.variables)))) for part in parts),
        proposed=placed.proposed,
        replicas=placed.replicas,
        memory_bytes=placed.memory_bytes,
        train=config if isinstance(config, TrainConfig) else None,
        serve=config if isinstance(config, ServeConfig) else None,
        tokenizer=store.put(tokenizer) if tokenizer is not None else None,
        byte_level=byte_level,
        files=tuple((file, store.put(content)) for file, content in (files or {}).items()),
        trainer=trainer,
        salt=secrets.token_hex(8),
    )
    job = JobId(store.put(manifests.encode(manifest)))
    blobs = [Digest(job), manifest.graph, *manifest.weights, *(digest for _, digest in manifest.files)]
    blobs += [d for d in (manifest.tokenizer, data and data.train, data and data.held_out) if d]
    trained = {v.name: v for v in graph.variables if v.kind == "parameter"}
    return Prepared(
        job=job,
        manifest=manifest,
        blobs=tuple(dict.fromkeys(blobs)),
        predicted_seconds=placed.predicted_seconds,
        parameters=sum(
            math.prod(int(d) for d in v.type.shape if isinstance(d, int)) for v in trained.values()
        ),
        plan=placed.plan,
    )


def _chosen(peers: Sequence[PeerRecord], names: Sequence[str]) -> list[PeerRecord]:
    """The peers of these ids or friendly names; all where none is named. JobError for one that is not there."""
    if not names:
        return list(peers)
    known = {name: peer for peer in peers for name in (peer.peer, peer.name, friendly_name(peer.peer))}
    for name in names:
        if name not in known:
            raise JobError(f"placement.peers: {name!r:.80} is not in the swarm now")
    return list({known[name].peer: known[name] for name in names}.values())


def _reader(values: Mapping[str, torch.Tensor]) -> Read:
    return lambda variables: {v.name: values[v.name] for v in variables}


def _contiguous(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # A copy each: safetensors refuses tensors that share memory, as tied ones of a module do.
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in values.items()}


def _tokenizer(path: Path | None) -> Tokenizer | None:
    if path is None:
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for every kind of bad file
        raise JobError(f"data.tokenizer: {path} cannot be read: {str(error)[:200]}") from None


def _pack(
    data: DataSpec, tokenizer: Tokenizer | None, vocabulary: int, sequence: int, store: BlobStore
) -> DataConfig:
    digests: list[Digest | None] = []
    held_out_limit = data.limit_bytes // 10
    for files, limit in ((data.files, data.limit_bytes - held_out_limit), (data.held_out, held_out_limit)):
        row = pack_text(files, tokenizer, limit, vocabulary)
        if len(row) <= sequence and files:
            raise JobError(f"data: {len(row)} tokens in {len(files)} files; one sample needs {sequence + 1}")
        digests.append(store.put(row.tobytes()) if files else None)
    train, held_out = digests
    assert train is not None  # a spec has at least one file
    return DataConfig(kind="tokens", train=train, held_out=held_out, token_bytes=token_bytes(vocabulary))


def _export_files(model: LanguageModel) -> dict[str, bytes | Path]:
    """What makes an exported directory one that can be served: see `fusion.runtime.capture.sources`."""
    files: dict[str, bytes | Path] = {path.name: path for path in model.config}
    files[GRAPH_FILE] = serialise.encode(clean(model.inference))
    files[ABOUT_FILE] = model.about.to_json()
    constants = [v for v in model.inference.variables if not is_exported(v.name)]
    if constants:
        files[sources.CONSTANTS_FILE] = save(_contiguous(model.read(constants)))
    return files
