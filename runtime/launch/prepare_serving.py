"""From a model's directory or file to the blobs and the manifest of a job that serves it: capture, place, shard.

Blocking, for seconds; everything ends up in the local store, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from fusion.dag.ir.errors import UnsupportedModel
from fusion.runtime.capture import sources
from fusion.runtime.capture.quantised_weights import quantised_model, stored_model
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.job.admission import AdmissionSpec
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.job.model_files import check_model, is_exported_directory
from fusion.runtime.job.spec import HuggingFaceConfig
from fusion.runtime.launch.draft import prepare_draft
from fusion.runtime.launch.shard import GraphJob, Prepared, Say, parameter_count, prepare_graph, silent
from fusion.runtime.placing.place_experts import place_model
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.directory.records import LinkRecord, PeerRecord
from fusion.swarm.identity import Identity

OPEN = AdmissionSpec()


def prepare_serving(
    path: Path,
    name: str,
    peers: Sequence[PeerRecord],
    store: BlobStore,
    *,
    stages: int | None = None,
    links: Sequence[LinkRecord] = (),
    author: Identity | None = None,
    admission: AdmissionSpec = OPEN,
    draft: Path | None = None,
    quantization: Literal["int8", "int4"] | None = None,
    say: Say = silent,
) -> Prepared:
    """A Hugging Face model directory, one written by `jobs export`, or a GGUF file, as a job that serves it under `name`. A
    model whose attention is not recognised is served by computing the whole prefix anew for each token, which is exact. `draft`:
    the directory or file of a small model of the same tokens that guesses for it. `quantization`: how its large matrices are
    stored; JobError for a model without any."""
    say("reading the model")
    model = _model(path)
    about = model.about
    say("rewriting its graph for decoding")
    try:
        graph, cached = serving_graph(model.inference, cache="kv", maximum_sequence=about.max_sequence), True
    except UnsupportedModel as reason:
        if draft is not None:
            raise JobError(
                f"draft: nothing can be guessed for a model without a KV cache ({reason})"
            ) from None
        say(f"no KV cache for this model ({reason}): each token will compute the whole prefix")
        graph, cached = serving_graph(model.inference, cache="recompute"), False
    read, parameters = model.read, parameter_count(graph)
    if quantization is not None:
        say(f"storing its matrices as {quantization}")
        graph, read = quantised_model(graph, model.read, quantization)
    elif model.blocks is not None:
        graph, read = stored_model(graph, model.read, model.blocks)
    config = ServeConfig(
        cache="kv" if cached else "recompute",
        max_sequence=about.max_sequence,
        vocabulary=about.vocabulary,
        end_tokens=about.end_tokens,
    )
    drafted = None
    if draft is not None:
        say("reading its draft model")
        drafted = prepare_draft(_model(draft), model, config)
    admitted = admission.among(peers, lambda peer: peer.peer)
    say(f"placing it on {len(admitted)} peers")
    beside = 0 if drafted is None else drafted.memory_bytes
    graph, placed = place_model(beside, graph, config, admitted, links, stages)
    job = GraphJob(
        name=name,
        graph=graph,
        variables=read,
        parameters=parameters,
        files={**model.chat, **(drafted.files if drafted is not None else {})},
        tokenizer=model.tokenizer,
        byte_level=about.byte_level,
        author=author or Identity.generate(),
        admission=admission,
    )
    return prepare_graph(job, placed, store, say)


def _model(path: Path) -> sources.LanguageModel:
    check_model(path)
    if path.is_file():
        return sources.gguf(path)
    if is_exported_directory(path):
        return sources.exported(path)
    return sources.huggingface(HuggingFaceConfig(path=path), training=False)
