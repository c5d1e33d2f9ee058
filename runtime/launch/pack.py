"""A training job's text as blobs of token ids in the local store."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import DataConfig
from fusion.runtime.job.spec import DataSpec
from fusion.runtime.training.data.batches import pack_text, token_bytes
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.directory.records import Digest


def read_tokenizer(source: Path | bytes | None) -> Tokenizer | None:
    """A tokenizer.json, or what would stand in it. JobError where it cannot be read."""
    if source is None:
        return None
    try:
        return (
            Tokenizer.from_buffer(source) if isinstance(source, bytes) else Tokenizer.from_file(str(source))
        )
    except Exception as error:  # the library raises plain Exception for every kind of bad file
        where = source if isinstance(source, Path) else "the model's"
        raise JobError(f"data.tokenizer: {where} cannot be read: {str(error)[:200]}") from None


def pack_data(
    data: DataSpec, tokenizer: Tokenizer | None, vocabulary: int, sequence: int, store: BlobStore
) -> DataConfig:
    """JobError where the files do not make one sample of `sequence` tokens."""
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
