"""Vectors of texts by an embedding model. Texts of equal length are batched, as many as the stages have memory for and as a frame between
them has room for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import numpy as np
from numpy.typing import NDArray

from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.serving.answers.served_model import ServedModel
from fusion.runtime.serving.graphs.arrays import Array
from fusion.runtime.serving.graphs.gateway import GraphGateway
from fusion.swarm.transport import PeerId

INPUT = "input_ids"


def check_texts(model: ServedModel, texts: Sequence[Sequence[int]]) -> None:
    """JobError, in one line, where the model cannot take these token ids."""
    longest, vocabulary = model.serve.max_sequence, model.serve.vocabulary
    for text in texts:
        if not text:
            raise JobError("input: a text without a token has no embedding")
        if len(text) > longest:
            raise JobError(f"input: {len(text)} tokens; the model takes {longest} positions")
        if max(text) >= vocabulary or min(text) < 0:
            raise JobError(f"input: token ids are from 0 to {vocabulary - 1}")


async def embeddings(
    graphs: GraphGateway,
    model: ServedModel,
    texts: Sequence[Sequence[int]],
    client: PeerId,
    turns: asyncio.Semaphore,
) -> AsyncGenerator[tuple[list[int], NDArray[np.float32]]]:
    """Yields indices of some of `texts`, which `check_texts` must have accepted, and their vectors (indices, hidden), float32. Each run
    acquires `turns`. Raises as `GraphGateway.run`, and JobFailed for a model with other outputs."""
    by_length: dict[int, list[int]] = {}
    for place, text in enumerate(texts):
        by_length.setdefault(len(text), []).append(place)
    for length, places in by_length.items():
        batch = await graphs.samples_at_once(model, {"sequence": length})
        for at in range(0, len(places), batch):
            part = places[at : at + batch]
            ids = np.array([texts[place] for place in part], dtype="<i8")
            ids_array = Array(INPUT, "int64", (len(part), length), ids.tobytes())
            async with turns:
                outputs, _ = await graphs.run(model.job, [ids_array], client)
            array = outputs[0]
            if array.dtype != "float32" or len(array.shape) != 2 or array.shape[0] != len(part):
                raise JobFailed(f"{model.manifest.name} makes {array}, and no vector of each text")
            vectors = np.frombuffer(array.data, dtype="<f4").reshape(array.shape)
            if not np.isfinite(vectors).all():
                raise JobFailed(f"{model.manifest.name} makes vectors of numbers that are none")
            yield part, vectors
