"""Vectors of texts through a gateway: texts of one length together, and what no model takes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.embedding_model import embedded, save
from support.training import swarm

from fusion.runtime.capture import sources
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import EMBEDDING, ServeConfig
from fusion.runtime.job.stage_graphs import StageGraphs
from fusion.runtime.launch.launch import launch
from fusion.runtime.launch.shard import GraphJob, prepare_graph
from fusion.runtime.placing.placed_job import as_asked
from fusion.runtime.planes.torch_plane import TorchPlane
from fusion.runtime.serving.answers.catalog import Catalog, ServedModel
from fusion.runtime.serving.graphs.embeddings import check_texts, embeddings
from fusion.runtime.serving.graphs.gateway import GraphGateway
from fusion.runtime.serving.graphs.stages import GraphStages
from fusion.runtime.serving.stage_loader import StageLoader

BATCH = 2


def config(**said: Any) -> ServeConfig:
    return ServeConfig(
        **{
            "cache": "recompute",
            "max_sequence": 130,
            "vocabulary": 200,
            "outputs": (EMBEDDING,),
            "batch": BATCH,
            **said,
        }
    )


def test_each_text_has_its_own_vector_wherever_it_stands(tmp_path: Path) -> None:
    own = save(tmp_path / "model", "bert", "mean_tokens", normalized=True)
    graph = (model := sources.in_files(tmp_path / "model")).inference
    texts = [[5, 6], [7, 8, 9], [3, 2], [9, 9, 9], [4, 4], [11]]

    async def main() -> None:
        async with swarm(tmp_path, 1) as made:
            context = made.peers[0].context
            job = GraphJob(name="vectors", graph=graph, variables=lambda v: model.read(v))
            prepared = prepare_graph(job, as_asked(graph, config(), ()), context.blobs.store)
            graphs, catalog = StageGraphs(context), Catalog(context, fresh_seconds=0.0)
            stages = GraphStages(
                context, TorchPlane(), graphs, StageLoader(context, TorchPlane(), graphs).fetch
            )
            gateway = GraphGateway(context, stages, graphs, catalog)
            await launch(context, prepared)
            context.leases.know(prepared.manifest.law(prepared.job))
            assert await context.leases.claim(prepared.job, 0, 1.0) is not None
            hosting = asyncio.create_task(stages.host(prepared.job, prepared.manifest, 0))
            while stages.held(prepared.job, 0) is None:
                assert not hosting.done(), hosting
                await asyncio.sleep(0.01)
            found, together = np.zeros((len(texts), 32)), list[int]()
            served = await catalog.find("vectors")
            async for places, vectors in embeddings(
                gateway, served, texts, context.peer_id, asyncio.Semaphore(1)
            ):
                found[places] = vectors
                together.append(len(places))
            assert together == [
                2,
                1,
                2,
                1,
            ]  # two of three texts of two tokens, the third, those of three, that of one
            assert np.abs(found - embedded(own, "mean_tokens", True, texts).numpy()).max() < 1e-5
            hosting.cancel()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "says"),
    [([], "without a token"), ([1] * 131, "131 tokens"), ([200], "0 to 199"), ([1, -1], "0 to 199")],
)
def test_texts_that_no_model_takes_are_refused_in_one_line(text: list[int], says: str) -> None:
    model = cast(ServedModel, SimpleNamespace(serve=config()))
    check_texts(model, [[1] * 130])
    with pytest.raises(JobError, match=f"input: .*{says}"):
        check_texts(model, [[1], text])
