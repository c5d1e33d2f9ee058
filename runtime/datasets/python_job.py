"""The model of a Python file and the samples that it is trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from fusion.runtime.capture.python.python_model import PythonModel
from fusion.runtime.datasets.dataset import Dataset, ReportLine, parted
from fusion.runtime.datasets.sources import source
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.spec import DatasetSpec, JobSpec, PythonConfig

TEXT_INPUTS = ("input_ids", "position_ids", "targets")  # of samples of text, int64 (sequence) each


def python_job(spec: JobSpec, tokenizer: Tokenizer | None, report: ReportLine) -> tuple[PythonModel, Dataset]:
    """With a model of kind python. Of texts, two samples are made up for the capture. Raises JobError. Blocking: it reads the
    samples."""
    assert isinstance(spec.model, PythonConfig)
    data, sequence, seed = spec.data, spec.train.sequence, spec.train.seed
    if not isinstance(data, DatasetSpec):
        model = PythonModel(spec.model, TEXT_INPUTS, seed)
        return model, Dataset({name: np.zeros((2, sequence), np.int64) for name in TEXT_INPUTS}, None)
    samples = source(data, data.path, tokenizer, sequence)
    model = PythonModel(spec.model, samples.names, seed)
    arrays = samples.read(model.inputs, data.limit_bytes, report)
    if not isinstance(data.held_out, Path):
        return model, parted(arrays, data.held_out, str(data.path))
    others = source(data, data.held_out, tokenizer, sequence, samples.classes)
    for name in model.inputs:
        if name not in others.names:
            raise JobError(
                f"data.held_out: {data.held_out} has no {name!r} (it has: {', '.join(others.names)})"
            )
    left = data.limit_bytes - sum(array.nbytes for array in arrays.values())
    return model, parted(arrays, others.read(model.inputs, left, report), str(data.path))
