"""The source of samples that a job file names, and the tokenizer for its texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from fusion.runtime.datasets.dataset import Source
from fusion.runtime.datasets.image_folders import ImageFolders
from fusion.runtime.datasets.jsonl import Encode, JsonLines
from fusion.runtime.datasets.npz import Npz
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.spec import DatasetSpec
from fusion.runtime.job.text import of_any_length


def read_tokenizer(source: Path | bytes | None) -> Tokenizer | None:
    """From a tokenizer.json, or its contents. JobError where it cannot be read."""
    if source is None:
        return None
    try:
        return of_any_length(
            Tokenizer.from_buffer(source) if isinstance(source, bytes) else Tokenizer.from_file(str(source))
        )
    except Exception as error:  # the library raises plain Exception for every kind of bad file
        where = source if isinstance(source, Path) else "the model's"
        raise JobError(f"data.tokenizer: {where} cannot be read: {str(error)[:200]}") from None


def source(
    spec: DatasetSpec,
    path: Path,
    tokenizer: Tokenizer | None,
    sequence: int,
    classes: Mapping[str, Sequence[str]] | None = None,
) -> Source:
    """Of the samples at `path`. `classes`: class names of another source, which its labels index as well. Raises JobError."""
    match spec.kind:
        case "npz":
            return Npz(path)
        case "images":
            return ImageFolders(path, spec.size, classes)
        case "jsonl":
            return json_lines(spec, path, tokenizer, sequence, classes)


def json_lines(
    spec: DatasetSpec,
    path: Path,
    tokenizer: Tokenizer | None,
    sequence: int,
    classes: Mapping[str, Sequence[str]] | None = None,
) -> JsonLines:
    """As `source`."""
    return JsonLines(path, spec.classes, encoder(tokenizer), sequence, classes)


def encoder(tokenizer: Tokenizer | None) -> Encode:
    """Bytes where there is no tokenizer."""
    if tokenizer is None:
        return lambda text: text.encode()
    return lambda text: tokenizer.encode(text).ids  # type: ignore[no-any-return]
