"""The weights of a stage as a blob of the local store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fusion.dag.ir.graph import Variable
from fusion.runtime.capture.sources import Read
from fusion.runtime.planes.weights_file import weights_bytes_of
from fusion.swarm.blobs.index import chunks_of, index_of
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.directory.records import Digest


def put_weights(store: BlobStore, variables: Iterable[Variable], read: Read) -> Digest:
    """Store them, read, written and hashed one variable after the other; gives the digest. Raises JobError, QuotaExceeded, BlobError."""
    found = weights_bytes_of(variables, read)
    return store.put_pieces(found.size_bytes, found.pieces)


def weights_digest(variables: Iterable[Variable], read: Read) -> Digest:
    """The digest that `put_weights` would give; nothing is stored. Raises JobError."""
    return index_of(chunks_of(weights_bytes_of(variables, read).pieces)).digest


def contiguous(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As safetensors saves them."""
    # A copy each: safetensors refuses tensors that share memory, as tied ones of a module do.
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in values.items()}
