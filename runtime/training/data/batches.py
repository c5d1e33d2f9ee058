"""Training data: text packed once into a blob of token ids, and the samples of a microbatch read from it."""

from __future__ import annotations

import os
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import DataConfig, TrainConfig
from fusion.runtime.planes.weights_file import check_header
from fusion.runtime.training.data.samples import held_out_indices, sample_indices

TOKEN_TYPES: Mapping[int, Any] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
MOST_ARRAYS, MOST_NAME = 1024, 64  # that the header of a blob has room for, and characters of each name
SEPARATOR = 0  # the byte between two files of byte-level text

Tokens = npt.NDArray[Any]


# --- packing


def pack_text(
    files: Iterable[Path],
    tokenizer: Tokenizer | None,
    limit_bytes: int,
    vocabulary: int,
    not_utf8: Callable[[Path], None] = lambda path: None,
) -> Tokens:
    """The files' text as one row of token ids, little-endian unsigned of the smallest width that `vocabulary` needs.

    Bytes where `tokenizer` is None. `not_utf8` is called with each file whose invalid UTF-8 a tokenizer gets as U+FFFD. Stops at
    `limit_bytes` of text. JobError for a file that cannot be read or a token id that the model does not have.
    """
    return _row(_texts_of(files, limit_bytes, None if tokenizer is None else not_utf8), tokenizer, vocabulary)


def _texts_of(
    files: Iterable[Path], limit_bytes: int, not_utf8: Callable[[Path], None] | None
) -> Iterator[bytes]:
    left = limit_bytes
    for path in files:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                # Bounded by the size: the limit may be larger than the memory, and a read of it would allocate that.
                data = file.read(min(left, size or left))
        except OSError as error:
            raise JobError(f"data.files: {path}: {error.strerror or error}") from None
        left -= len(data)
        if not_utf8 is not None and not _is_utf8(data, cut=len(data) < size):
            not_utf8(path)
        yield data
        if left <= 0:
            break


def _is_utf8(data: bytes, *, cut: bool) -> bool:
    try:
        getincrementaldecoder("utf-8")().decode(data, final=not cut)
    except UnicodeDecodeError:
        return False
    return True


def pack_texts(texts: Iterable[str], tokenizer: Tokenizer | None, vocabulary: int) -> Tokens:
    """`pack_text`, of strings."""
    return _row((text.encode() for text in texts), tokenizer, vocabulary)


def _row(texts: Iterable[bytes], tokenizer: Tokenizer | None, vocabulary: int) -> Tokens:
    kind = TOKEN_TYPES[token_bytes(vocabulary)]
    rows, largest = [np.zeros(0, kind)], 0
    for text in texts:
        row = _tokens(text, tokenizer)
        largest = max(largest, int(row.max(initial=0)))
        # Narrowed at once: 8 bytes an id would take several times the memory
        rows.append(row.astype(kind, copy=False))
    if largest >= vocabulary:
        raise JobError(f"model.vocabulary must be above the largest token id in the data ({largest})")
    return np.concatenate(rows)


def _tokens(data: bytes, tokenizer: Tokenizer | None) -> Tokens:
    if tokenizer is None:
        return np.frombuffer(data + bytes((SEPARATOR,)), np.uint8)
    text = data.decode("utf-8", errors="replace")
    return np.array(tokenizer.encode(text).ids, dtype=np.int64)


def token_bytes(vocabulary: int) -> int:
    """Bytes that hold every id of a vocabulary: 1, 2 or 4."""
    return next(width for width in (1, 2, 4) if vocabulary <= 256**width)


# --- reading


class Batches:
    """Reads the model inputs of one stage, for training and held-out microbatches, from blobs on disk.

    `inputs`: their names. Raises JobError for blobs that do not hold them. A stage that reads only `position_ids` opens no blob.
    """

    def __init__(
        self, config: TrainConfig, inputs: Sequence[str], train: Path | None, held_out: Path | None
    ) -> None:
        self._config = config
        self._inputs = tuple(inputs)
        unknown = sorted(set(inputs) - {"input_ids", "position_ids", "targets"})
        if config.data.kind == "tokens" and unknown:
            raise JobError(f"the graph reads {unknown[0]!r}, which data of kind tokens does not have")
        self._train = _source(config.data, config, self._inputs, train)
        self._held_out = _source(config.data, config, self._inputs, held_out)

    @staticmethod
    def needs_blobs(config: TrainConfig, inputs: Iterable[str]) -> bool:
        """Whether a stage with these inputs reads the data blobs at all."""
        return bool(set(inputs) - ({"position_ids"} if config.data.kind == "tokens" else set()))

    @property
    def samples(self) -> int | None:
        """The number of samples in the training data; None where the stage reads none of it."""
        return None if self._train is None else self._train.samples

    def train(self, step: int, microbatch: int) -> dict[str, torch.Tensor]:
        """Tensors by input name, the first dimension `microbatch_size`."""
        return self.read(self.indices(step, microbatch))

    def indices(self, step: int, microbatch: int) -> list[int]:
        """The indices of a microbatch's samples; empty where the stage reads none."""
        if self._train is None:
            return []
        return sample_indices(self._config.seed, step, microbatch, self._config, self._train.samples)

    def read(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """As `train`, for these samples."""
        return self._positions() if self._train is None else self._train.read(indices, self._inputs)

    def held_out(self, batch: int) -> dict[str, torch.Tensor]:
        if self._held_out is None:
            return self._positions()
        return self._held_out.read(
            held_out_indices(batch, self._config, self._held_out.samples), self._inputs
        )

    def _positions(self) -> dict[str, torch.Tensor]:
        return {name: _positions(self._config) for name in self._inputs}


def _positions(config: TrainConfig) -> torch.Tensor:
    return torch.arange(config.sequence).repeat(config.microbatch_size, 1)


def _source(
    data: DataConfig, config: TrainConfig, inputs: tuple[str, ...], path: Path | None
) -> _Windows | _Arrays | None:
    if path is None:
        return None
    return _Windows(path, config) if data.kind == "tokens" else _Arrays(path, inputs)


class _Windows:
    """Windows of sequence + 1 tokens at a stride of `sequence`: inputs, and the targets one further."""

    def __init__(self, path: Path, config: TrainConfig) -> None:
        kind = TOKEN_TYPES[config.data.token_bytes]
        size = path.stat().st_size
        self.samples = (size // kind.itemsize - 1) // config.sequence
        if size % kind.itemsize or self.samples < 1:
            raise JobError(f"a data blob of {size} bytes holds no sample of {config.sequence + 1} tokens")
        self._config = config
        self._row = np.memmap(path, dtype=kind, mode="r")

    def read(self, indices: Sequence[int], inputs: Sequence[str]) -> dict[str, torch.Tensor]:
        length = self._config.sequence
        windows = np.stack([self._row[i * length : i * length + length + 1] for i in indices]).astype(
            np.int64
        )
        readers = {
            "input_ids": lambda: torch.from_numpy(windows[:, :-1].copy()),
            "targets": lambda: torch.from_numpy(windows[:, 1:].copy()),
            "position_ids": lambda: _positions(self._config),
        }
        return {name: readers[name]() for name in inputs}


class _Arrays:
    """Rows of tensors in a safetensors file, under the names of the model's inputs."""

    def __init__(self, path: Path, inputs: Sequence[str]) -> None:
        check_header(path, [*inputs, *["x" * MOST_NAME] * MOST_ARRAYS])
        try:
            with safe_open(path, framework="pt") as file:
                missing = sorted(set(inputs) - set(file.keys()))
                if missing:
                    raise JobError(f"the data blob has no array {missing[0]!r}")
                self._arrays = {name: file.get_tensor(name) for name in inputs}
        except SafetensorError as error:
            raise JobError(f"the data blob is not safetensors: {error}") from None
        sizes = {len(array) if array.dim() else 0 for array in self._arrays.values()}
        if len(sizes) != 1 or 0 in sizes:
            raise JobError("the arrays of a data blob must have one first dimension, of at least 1")
        self.samples = sizes.pop()

    def read(self, indices: Sequence[int], inputs: Sequence[str]) -> dict[str, torch.Tensor]:
        chosen = torch.tensor(indices)
        return {name: self._arrays[name].index_select(0, chosen) for name in inputs}
