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

from fusion.dag.cutting.cuts import legal_cuts, split
from fusion.dag.ir.graph import Graph
from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture import sources
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import EMBEDDING, ServeConfig
from fusion.runtime.job.stage_graphs import StageGraphs
from fusion.runtime.launch.launch import launch
from fusion.runtime.launch.shard import GraphJob, prepare_graph
from fusion.runtime.placing.placed_job import as_requested
from fusion.runtime.planes.torch_plane import TorchPlane
from fusion.runtime.serving.answers.catalog import Catalog
from fusion.runtime.serving.answers.served_model import ServedModel
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, sources.LanguageModel, Graph]:
    """A model, and what is captured of its files."""
    folder = tmp_path_factory.mktemp("vectors") / "model"
    own = save(folder, "bert", "mean_tokens", normalized=True)
    model = sources.in_files(folder)
    return own, model, clean(model.inference)


@pytest.mark.parametrize("roomy", [True, False])
def test_each_text_has_its_own_vector_wherever_it_stands(
    tmp_path: Path,
    saved: tuple[Any, sources.LanguageModel, Graph],
    roomy: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not roomy:  # between the stages there is no room for two texts of three tokens
        for module in ("gateway", "stages"):
            monkeypatch.setattr(f"fusion.runtime.serving.graphs.{module}.MAX_RUN_BYTES", 2 * 3 * 32 * 4 - 1)
    own, model, graph = saved
    sends = {cut: split(graph, (cut,))[0].sends for cut in legal_cuts(graph)}
    cut = next(
        cut
        for cut, sent in sends.items()
        if [str(edge.type) for edge in sent] == ["float32[batch, sequence, 32]"]
    )
    texts = [[5, 6], [7, 8, 9], [3, 2], [9, 9, 9], [4, 4], [11]]

    async def main() -> None:
        async with swarm(tmp_path, 1) as made:
            context = made.peers[0].context
            job = GraphJob(name="vectors", graph=graph, variables=lambda v: model.read(v))
            placed = as_requested(graph, config(), (cut,))
            prepared = prepare_graph(job, placed, context.blobs.store)
            graphs, catalog = StageGraphs(context), Catalog(context, fresh_seconds=0.0)
            stages = GraphStages(
                context, TorchPlane(), graphs, StageLoader(context, TorchPlane(), graphs).fetch
            )
            gateway = GraphGateway(context, stages, graphs, catalog)
            await launch(context, prepared)
            context.leases.know(prepared.manifest.law(prepared.job))
            hosting = []
            for index in range(2):
                assert await context.leases.claim(prepared.job, index, 1.0) is not None
                host = stages.host(prepared.job, prepared.manifest, index)
                hosting.append(asyncio.create_task(host))
                while stages.held(prepared.job, index) is None:
                    assert not hosting[-1].done(), hosting
                    await asyncio.sleep(0.01)
            found, together = np.zeros((len(texts), 32)), list[int]()
            served = await catalog.find("vectors")
            async for places, vectors in embeddings(
                gateway, served, texts, context.peer_id, asyncio.Semaphore(1)
            ):
                found[places] = vectors
                together.append(len(places))
            # Two of three texts of two tokens, the third, those of three, that of one.
            assert together == ([2, 1, 2, 1] if roomy else [2, 1, 1, 1, 1])
            assert np.abs(found - embedded(own, "mean_tokens", True, texts).numpy()).max() < 1e-5
            for task in hosting:
                task.cancel()
            await asyncio.gather(*hosting, return_exceptions=True)

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
