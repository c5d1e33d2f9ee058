"""Vectors of texts, by a model that makes them: texts of one length go together, as many as its stages have memory for, and as
what is sent between them has room in a frame."""

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
    """As they come: places of some of `texts`, which `check_texts` let pass, and their vectors (places, hidden). Each run
    takes one of `turns`. Raises as `GraphGateway.run`, and JobFailed for a model that makes something else."""
    by_length: dict[int, list[int]] = {}
    for place, text in enumerate(texts):
        by_length.setdefault(len(text), []).append(place)
    for length, places in by_length.items():
        most = await graphs.samples_at_once(model, {"sequence": length})
        for at in range(0, len(places), most):
            part = places[at : at + most]
            ids = np.array([texts[place] for place in part], dtype="<i8")
            given = Array(INPUT, "int64", (len(part), length), ids.tobytes())
            async with turns:
                made, _ = await graphs.run(model.job, [given], client)
            found = made[0]
            if found.dtype != "float32" or len(found.shape) != 2 or found.shape[0] != len(part):
                raise JobFailed(f"{model.manifest.name} makes {found}, and no vector of each text")
            vectors = np.frombuffer(found.data, dtype="<f4").reshape(found.shape)
            if not np.isfinite(vectors).all():
                raise JobFailed(f"{model.manifest.name} makes vectors of numbers that are none")
            yield part, vectors
