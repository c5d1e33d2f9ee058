"""From a job file to what is trained: the model as a graph, its data as blobs of the local store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fusion.dag.ir.graph import Graph
from fusion.runtime.capture import sources
from fusion.runtime.capture.trained_graph import check_normalised, trained_graph
from fusion.runtime.datasets.held_out import even_batches, in_unlike_places
from fusion.runtime.datasets.numbered import check_numbered
from fusion.runtime.datasets.python_job import python_job
from fusion.runtime.datasets.sources import read_tokenizer
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import DataConfig
from fusion.runtime.job.spec import DatasetSpec, HuggingFaceConfig, JobSpec, PythonConfig, TrainSpec
from fusion.runtime.launch.export_files import export_files, graph_files
from fusion.runtime.launch.pack import numbers_of_text, pack_data, pack_samples, text_held_out
from fusion.runtime.launch.shard import ReportLine, silent
from fusion.swarm.blobs.store import BlobStore

BYTES = 256  # token ids where there is no tokenizer


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """Of a job file: what is trained, on what, and what goes along."""

    graph: Graph
    data: DataConfig
    evaluate_batches: int  # that count the samples held out alike, no more than the file asks for
    read: sources.Read
    files: Mapping[str, bytes | Path]
    tokenizer: Path | bytes | None = None
    byte_level: bool = False


def training_job(
    spec: JobSpec, store: BlobStore, report: ReportLine, note: ReportLine = silent
) -> TrainingJob:
    """`note` gets a line on what of the data is not trained on. Raises JobError, CaptureError. Blocking, for seconds."""
    python = isinstance(spec.model, PythonConfig)
    made = (_python_job if python else _language_job)(spec, store, report, note)
    if spec.train.evaluate_every > 0 and made.data.held_out is None:
        raise JobError("train.evaluate_every needs data that is held out, and of one sample none can be")
    return made


def _language_job(spec: JobSpec, store: BlobStore, report: ReportLine, note: ReportLine) -> TrainingJob:
    assert not isinstance(spec.model, PythonConfig)
    tokenizer = read_tokenizer(spec.data.tokenizer)
    report("capturing the model")
    if isinstance(spec.model, HuggingFaceConfig):
        model = sources.huggingface(spec.model, training=True, seed=spec.train.seed)
        tokenizer = tokenizer or read_tokenizer(model.tokenizer)
        # Prompts of the trained model must be tokenized as its data were, whatever tokenizer lies beside the model.
        about = replace(model.about, byte_level=tokenizer is None)
        model = replace(model, about=about, tokenizer=spec.data.tokenizer or model.tokenizer)
    else:
        model = sources.builtin(
            spec.model, spec.train.seed, byte_level=tokenizer is None, tokenizer=spec.data.tokenizer
        )
    assert model.training is not None
    if spec.train.sequence > model.about.max_sequence:
        raise JobError(
            f"train.sequence must be at most {model.about.max_sequence}, what the model was built for"
        )
    report("packing the data")
    data = pack_data(spec.data, tokenizer, model.about.vocabulary, spec.train.sequence, store, report, note)
    return TrainingJob(
        graph=trained_graph(model.training, spec.train.precision),
        data=data,
        evaluate_batches=_evaluated(spec.train, text_held_out(data, spec.train.sequence, store)),
        read=model.read,
        files=export_files(model),
        tokenizer=model.tokenizer,
        byte_level=model.about.byte_level,
    )


def _python_job(spec: JobSpec, store: BlobStore, report: ReportLine, note: ReportLine) -> TrainingJob:
    assert isinstance(spec.model, PythonConfig)
    tokenizer = read_tokenizer(spec.data.tokenizer)
    report(f"running {spec.model.path.name}")
    model, data = python_job(spec, tokenizer, report)
    report("capturing the model")
    example = {name: torch.from_numpy(array) for name, array in data.example().items()}
    graphs = model.capture(example, evaluated=bool(spec.data.held_out))
    graph = trained_graph(graphs.training, spec.train.precision)
    check_numbered(graph, data)
    check_normalised(graph, spec.train.sizes)
    report("packing the data")
    evaluated = spec.train.evaluate_batches
    if data.held_out is not None:
        evaluated = _evaluated(spec.train, len(next(iter(data.held_out.values()))))
        wanted = evaluated * spec.train.microbatch_size
        data = replace(data, held_out=in_unlike_places(data.held_out, wanted))
    if isinstance(spec.data, DatasetSpec):
        packed = pack_samples(data, store)
    else:
        vocabulary = BYTES if tokenizer is None else tokenizer.get_vocab_size()
        packed = pack_data(spec.data, tokenizer, vocabulary, spec.train.sequence, store, report, note)
    if packed.kind == "tokens":
        check_numbered(graph, numbers_of_text(packed, spec.train.sequence, store))
        evaluated = _evaluated(spec.train, text_held_out(packed, spec.train.sequence, store))
    files: dict[str, bytes | Path] = {}
    if graphs.inference is not None:
        files = graph_files(graphs.inference, sources.About(outputs=graphs.outputs), graphs.read)
    return TrainingJob(
        graph=graph,
        data=packed,
        evaluate_batches=evaluated,
        read=graphs.read,
        files=files,
    )


def _evaluated(train: TrainSpec, samples: int) -> int:
    """Microbatches of an evaluation, of so many held-out samples."""
    most = train.evaluate_batches
    return even_batches(samples, train.microbatch_size, most) if samples else most
