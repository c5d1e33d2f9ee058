"""The graph of a job file without its weights in memory, for a plan."""

from __future__ import annotations

import torch

from fusion.dag.ir.graph import Graph
from fusion.runtime.capture.capture import capture_language_model
from fusion.runtime.capture.huggingface import open_model, parameters_on_meta
from fusion.runtime.capture.model_dtype import FLOAT32
from fusion.runtime.capture.models import GPT
from fusion.runtime.capture.trained_graph import check_normalised, trained_graph
from fusion.runtime.datasets.numbered import check_numbered
from fusion.runtime.datasets.python_job import python_job
from fusion.runtime.datasets.sources import read_tokenizer
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.spec import HuggingFaceConfig, JobSpec, PythonConfig


def training_graph(spec: JobSpec) -> Graph:
    """The graph that launching the job would place. Raises JobError, CaptureError."""
    if isinstance(spec.model, HuggingFaceConfig):
        with parameters_on_meta():
            model = open_model(spec.model.path, weights=False, dtype=FLOAT32)
        if spec.train.sequence > model.max_sequence:
            raise JobError(
                f"train.sequence must be at most {model.max_sequence}, what the model was built for"
            )
        return trained_graph(model.capture(training=True), spec.train.precision)
    if isinstance(spec.model, PythonConfig):
        python, data = python_job(spec, read_tokenizer(spec.data.tokenizer), lambda line: None)
        example = {name: torch.from_numpy(array) for name, array in data.example().items()}
        graphs = python.capture(example, evaluated=bool(spec.data.held_out))
        graph = trained_graph(graphs.training, spec.train.precision)
        check_numbered(graph, data)
        check_normalised(graph, spec.train.sizes)
        return graph
    with torch.device("meta"):
        module = GPT(spec.model)
    captured = capture_language_model(module, training=True, maximum_sequence=spec.model.sequence)
    return trained_graph(captured, spec.train.precision)
