"""A training job's data as blobs in the local store: texts as token ids, samples as named arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from fusion.dag.ir.graph import TensorType, Variable
from fusion.runtime.datasets.dataset import Array, Dataset, ReportLine, with_progress
from fusion.runtime.datasets.sources import json_lines
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import DataConfig
from fusion.runtime.job.spec import DatasetSpec, DataSpec, spread
from fusion.runtime.launch.weights import put_weights
from fusion.runtime.training.data.batches import TOKEN_TYPES, pack_text, pack_texts, token_bytes
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.directory.records import Digest


def pack_data(
    data: DataSpec | DatasetSpec,
    tokenizer: Tokenizer | None,
    vocabulary: int,
    sequence: int,
    store: BlobStore,
    report: ReportLine,
    note: ReportLine,
) -> DataConfig:
    """Concatenated texts for a language model; `note` gets lines on text that is not trained on. JobError where they do not make one
    sample of `sequence` tokens."""
    rows = (
        _pack_files(data, tokenizer, vocabulary, note)
        if isinstance(data, DataSpec)
        else _pack_lines(data, tokenizer, vocabulary, report)
    )
    digests: list[Digest | None] = []
    for row, what in rows:
        if row is not None and len(row) <= sequence:
            raise JobError(f"data: {len(row)} tokens in {what}; one sample needs {sequence + 1}")
        digests.append(None if row is None else store.put(row.tobytes()))
    train, held_out = digests
    assert train is not None  # a spec has at least one file
    return DataConfig(kind="tokens", train=train, held_out=held_out, token_bytes=token_bytes(vocabulary))


Rows = tuple[tuple[Array | None, str], tuple[Array | None, str]]  # training, held-out; and what they are of


def _pack_files(data: DataSpec, tokenizer: Tokenizer | None, vocabulary: int, note: ReportLine) -> Rows:
    held_out_limit = data.limit_bytes // 10 if data.held_out else 0

    def read(files: Sequence[Path], limit_bytes: int, what: str) -> Array:
        odd = list[Path]()
        row = pack_text(files, tokenizer, limit_bytes, vocabulary, odd.append)
        if odd:
            named = f"{odd[0]} is" if len(odd) == 1 else f"{odd[0]} and {len(odd) - 1} more are"
            note(f"{named} not in UTF-8: U+FFFD stands for what cannot be read")
        total = sum(file.stat().st_size for file in files)
        if total > limit_bytes:
            note(f"read {limit_bytes:,} of {total:,} bytes of {what} (data.limit_bytes)")
        return row

    train = read(data.files, data.limit_bytes - held_out_limit, "text")
    held_out = read(data.held_out, held_out_limit, "held-out text") if data.held_out else None
    return (train, f"{len(data.files)} files"), (held_out, f"{len(data.held_out)} files")


def _pack_lines(data: DatasetSpec, tokenizer: Tokenizer | None, vocabulary: int, report: ReportLine) -> Rows:
    def read(path: Path) -> list[str]:
        lines = json_lines(data, path, tokenizer, 0)
        texts, size = list[str](), 0
        for text in with_progress(lines.texts(data.text), len(lines), "lines", report):
            texts.append(text)
            size += len(text)
            if size > data.limit_bytes:  # no more of it: a corpus may be larger than the memory
                raise JobError(f"{path}: more than data.limit_bytes = {data.limit_bytes} characters of text")
        return texts

    texts = read(data.path)
    if isinstance(data.held_out, Path):
        held_out = read(data.held_out)
    else:
        chosen = frozenset(spread(len(texts), data.held_out))
        held_out = [text for i, text in enumerate(texts) if i in chosen]
        texts = [text for i, text in enumerate(texts) if i not in chosen]
    train = pack_texts(texts, tokenizer, vocabulary)
    held = pack_texts(held_out, tokenizer, vocabulary) if held_out else None
    return (train, f"{len(texts)} lines"), (held, f"{len(held_out)} lines")


def text_held_out(data: DataConfig, sequence: int, store: BlobStore) -> int:
    """The samples of `pack_data` that are held out."""
    if data.held_out is None:
        return 0
    return (store.path(data.held_out).stat().st_size // data.token_bytes - 1) // sequence


def numbers_of_text(data: DataConfig, sequence: int, store: BlobStore) -> Dataset:
    """All that the samples of `pack_data` hold, by the input of a model that reads it: one row each, not yet in samples."""

    def arrays(digest: Digest) -> dict[str, Array]:
        row = np.memmap(store.path(digest), dtype=TOKEN_TYPES[data.token_bytes], mode="r")
        return {"input_ids": row, "targets": row, "position_ids": np.arange(sequence)}

    return Dataset(arrays(data.train), None if data.held_out is None else arrays(data.held_out))


def pack_samples(data: Dataset, store: BlobStore) -> DataConfig:
    """Named arrays, as the first and the last stage read them."""
    train = _put(data.train, store)
    return DataConfig(
        kind="arrays", train=train, held_out=None if data.held_out is None else _put(data.held_out, store)
    )


def _put(arrays: Mapping[str, Array], store: BlobStore) -> Digest:
    types = {name: TensorType(array.shape, array.dtype.name) for name, array in arrays.items()}
    variables = [Variable(name, type_, "buffer", False) for name, type_ in types.items()]
    return put_weights(
        store, variables, lambda wanted: {v.name: torch.from_numpy(arrays[v.name]) for v in wanted}
    )
