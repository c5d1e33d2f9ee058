"""The options of `serve`, as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fusion.runtime.job.admission import AdmissionSpec


@dataclass(frozen=True, kw_only=True)
class ServingSpec:
    path: Path  # a Hugging Face model directory, one written by `jobs export`, or a GGUF file
    name: str = ""  # of the model
    stages: int | None = None  # over how many peers; None: as few as pay
    admission: AdmissionSpec = AdmissionSpec()  # noqa: RUF009 - frozen
    # The directory or file of a small model of the same tokenizer that guesses for it
    draft: Path | None = None
    dtype: str | None = None  # that it runs in (`open_model`); None: that of its files
    quantization: Literal["int8", "int4"] | None = None  # how its large matrices are stored
    context: int | None = None  # tokens of the longest text; None: as many as the model supports
