"""A model that answers in one run, over stages on peers of the in-memory swarm, against the module itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.any_modules import unet
from support.captured_once import once
from support.instant_loop import run
from support.training import Peer, Swarm, swarm
from support.uploads import Silent, Upload

from fusion.dag.cutting.cuts import legal_cuts
from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Graph, Input, Ref, TensorType
from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture.capture import capture_module, variables_from_module
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.job.protocol import RUN
from fusion.runtime.job.stage_graphs import StageGraphs
from fusion.runtime.launch.launch import launch
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.launch.shard import GraphJob, prepare_graph
from fusion.runtime.placing.placed_job import as_requested
from fusion.runtime.planes.torch_plane import TorchPlane
from fusion.runtime.serving.answers.catalog import Catalog
from fusion.runtime.serving.graphs.arrays import Array
from fusion.runtime.serving.graphs.client import RunResult, run_model
from fusion.runtime.serving.graphs.gateway import GraphGateway
from fusion.runtime.serving.graphs.stages import GraphStages
from fusion.runtime.serving.stage_loader import StageLoader
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import RemoteError, StreamBroken
from fusion.swarm.transport import PeerId, call

OUTPUTS = ("mask", "area")


@dataclass
class Served:
    swarm: Swarm
    prepared: Prepared
    module: torch.nn.Module
    stages: list[GraphStages]

    async def host(self, peer: int, stage: int) -> None:
        context, manifest = self.swarm.peers[peer].context, self.prepared.manifest
        context.leases.know(manifest.law(self.prepared.job))
        assert await context.leases.claim(self.prepared.job, stage, 1.0) is not None
        task = asyncio.create_task(self.stages[peer].host(self.prepared.job, manifest, stage))
        self.swarm.peers[peer].tasks[stage] = task
        while self.stages[peer].held(self.prepared.job, stage) is None:
            assert not task.done(), task
            await asyncio.sleep(0.01)

    async def ask(self, images: Any) -> RunResult:
        asker, gateway = self.swarm.peers[-1].context, self.swarm.peers[0].context
        await launch(
            self.swarm.peers[0].context, self.prepared
        )  # its word runs out, and nobody else says it here
        given = Array("images", images.dtype.name, images.shape, images.tobytes())
        return await run_model(asker.transport, gateway.peer_id, "unet", [given])


@asynccontextmanager
async def served(root: Path, peers: int) -> AsyncIterator[Served]:
    """A U-Net in three stages, none of them hosted yet; every peer is a gateway."""
    torch.manual_seed(1)
    case = unet()
    with torch.no_grad():
        case.module(case.arrays["images"])  # statistics that are none of a new module's
    images = {"images": case.arrays["images"]}

    def shown(made: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(made.values())

    graph = clean(
        once(
            "a U-Net in one run",
            lambda: capture_module(case.module, images, shown, training=False, loss_inputs=()),
        )
    )
    legal = legal_cuts(graph)
    cuts = (legal[len(legal) // 3], legal[2 * len(legal) // 3])
    config = ServeConfig(cache="recompute", max_sequence=1, vocabulary=1, outputs=OUTPUTS, batch=4)
    async with swarm(root, peers) as made:
        first: Peer = made.peers[0]
        job = GraphJob(name="unet", graph=graph, variables=variables_from_module(case.module))
        prepared = prepare_graph(job, as_requested(graph, config, cuts), first.context.blobs.store)
        stages = []
        for peer in made.peers:
            graphs = StageGraphs(peer.context)
            stages.append(
                GraphStages(
                    peer.context,
                    TorchPlane(),
                    graphs,
                    StageLoader(peer.context, TorchPlane(), graphs).fetch,
                )
            )
            gateway = GraphGateway(peer.context, stages[-1], graphs, Catalog(peer.context, fresh_seconds=0.0))
            await gateway.start()
        await launch(first.context, prepared)
        yield Served(made, prepared, case.module.eval(), stages)


def numbers(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(array.data, array.dtype).reshape(array.shape).copy())


def test_outputs_are_the_module_s_and_go_on_when_an_owner_is_killed(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path, 5) as model:
            for stage in range(3):
                await model.host(stage, stage)
            images = torch.randn(3, 1, 16, 16)
            with torch.no_grad():
                wanted = model.module(images)
            made = await model.ask(images.numpy())
            assert [a.name for a in made.arrays] == list(OUTPUTS)
            assert made.route == tuple(peer.context.peer_id for peer in model.swarm.peers[:3])
            for array in made.arrays:
                torch.testing.assert_close(numbers(array), wanted[array.name])
            successor = model.swarm.peers[3].context
            await model.swarm.kill(model.swarm.peers[1])
            del model.stages[1]
            asked = asyncio.create_task(model.ask(images.numpy()))
            while await model.swarm.peers[0].context.leases.owner(model.prepared.job, 1) is not None:
                await asyncio.sleep(0.05)
            successor.leases.observe(model.prepared.job, 1, 1)
            await model.host(2, 1)
            again = await asked
            assert again.route[1] == successor.peer_id
            for array, before in zip(again.arrays, made.arrays, strict=True):
                assert bytes(array.data) == bytes(before.data)

    asyncio.run(main())


def test_what_cannot_be_is_one_line(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path, 2) as model:
            for stage in range(3):
                await model.host(0, stage)
            for images, says in (
                (np.zeros((5, 1, 16, 16), np.float32), "input: 5 samples; at most 4 at once"),
                (np.zeros((2, 1, 16, 16), np.float64), "the model takes images float32[batch, 1, 16, 16]"),
                (np.zeros((2, 1, 16, 15), np.float32), "does not fit"),
            ):
                with pytest.raises(RemoteError) as error:
                    await model.ask(images)
                assert says in str(error.value)
            transport, peer = model.swarm.peers[1].context.transport, model.swarm.peers[0].context.peer_id
            job = model.prepared.job
            for kind, header in (
                ("sing", {}), ("run", {"model": 3}), ("run", {"model": "unet", "arrays": 3}), ("stage", {}),
                ("stage", {"job": job, "stage": "0"}), ("stage", {"job": job, "stage": 0, "arrays": []}),
                ("run", {"model": "unet", "arrays": [], "grants": 3}), ("run", {"model": "other", "arrays": []}),
            ):  # fmt: skip
                with pytest.raises(RemoteError):
                    await call(transport, peer, RUN.name, kind, header)
            header = {"job": "a" * 64, "stage": 0, "arrays": []}
            assert (await call(transport, peer, RUN.name, "stage", header)).kind == "absent"
            assert len((await model.ask(np.zeros((4, 1, 16, 16), np.float32))).arrays) == 2  # it lives

    asyncio.run(main())


def test_a_run_whose_client_has_gone_or_gave_way_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusion.runtime.serving.graphs.gateway.AT_ONCE", 2)
    begun, ended = asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def endless(*_: object) -> None:
        begun.release()
        try:
            await asyncio.Event().wait()
        finally:
            ended.release()

    monkeypatch.setattr(GraphGateway, "run", endless)

    async def main() -> None:
        async with served(tmp_path, 3) as model, asyncio.timeout(30):
            gateway, one, other = (peer.context for peer in model.swarm.peers)
            asking = []
            for asker in (one, one, other):  # the last has fewer than the first, which gives way
                asked = run_model(asker.transport, gateway.peer_id, "unet", [])
                asking.append(asyncio.create_task(asked))
                await begun.acquire()
            await ended.acquire()
            with pytest.raises(RemoteError, match="as many runs as it can"):
                await asking[1]
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            for _ in range(2):
                await ended.acquire()

    asyncio.run(main())


def test_what_several_stages_made_fits_one_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them sends no more; else an owner, or the client, hangs up on what is too large, and is asked again."""

    async def main() -> None:
        async with served(tmp_path, 2) as model:
            for stage in range(3):
                await model.host(0, stage)
            images = np.zeros((3, 1, 16, 16), np.float32)
            made = await model.ask(images)
            most = max(images.nbytes, *(len(a.data) for a in made.arrays))
            monkeypatch.setattr("fusion.runtime.serving.graphs.gateway.MAX_RUN_BYTES", most)
            with pytest.raises(
                RemoteError, match=r"^input: what (stage \d reads|the model makes) of so many"
            ):
                await model.ask(images)

    asyncio.run(main())


def alone(seconds: float = 0.0) -> GraphGateway:
    """A gateway whose runs take so long, and give nothing."""
    clock = SimpleNamespace(monotonic=asyncio.get_running_loop().time)
    context: Any = SimpleNamespace(clock=clock, peer_id=PeerId("gateway"))
    nothing: Any = SimpleNamespace(routes=SimpleNamespace(forget=None))
    made = GraphGateway(context, nothing, nothing, nothing)

    async def answer(*_: object) -> Any:
        await asyncio.sleep(seconds)
        return [], []

    made.run = answer  # type: ignore[method-assign]
    return made


async def attended(gateway: GraphGateway, uploads: list[Upload], apart: float) -> list[asyncio.Task[None]]:
    tasks = []
    for upload in uploads:
        tasks.append(asyncio.create_task(gateway._attend(upload)))
        await asyncio.sleep(apart)
    return tasks


def test_uploads_that_take_long_do_not_end_each_other() -> None:
    async def main() -> None:
        uploads = [Upload(peer, 80.0) for peer in ("a", "a", "a", "a", "b")]
        await asyncio.gather(*await attended(alone(), uploads, 3.0))
        assert [[kind for kind, _ in upload.said] for upload in uploads] == [["done"]] * 4 + [["busy"]]

    run(main())


def test_who_says_nothing_takes_no_place_of_an_upload() -> None:
    async def main() -> None:
        gateway, upload = alone(), Upload("honest", 50.0)
        silent: list[Upload] = [Silent("stranger", 1.0) for _ in range(30)]
        waiting = await attended(gateway, silent[:10], 0.5)
        attending = asyncio.create_task(gateway._attend(upload))
        waiting += await attended(gateway, silent[10:], 0.5)
        await attending
        assert [kind for kind, _ in upload.said] == ["done"]
        for each in silent:
            each.abort()
        await asyncio.gather(*waiting, return_exceptions=True)

    run(main())


def test_who_had_its_answers_is_no_newcomer() -> None:
    async def main() -> None:
        gateway = alone(seconds=5.0)
        await gateway._attend(Upload("known", 1.0))
        strangers = [Upload(f"stranger {number}", 0.1) for number in range(4)]
        running = await attended(gateway, strangers, 0.2)
        known = Upload("known", 0.1)
        await gateway._attend(known)
        assert [kind for kind, _ in known.said] == ["done"]
        await asyncio.gather(*running)
        assert sorted(kind for each in strangers for kind, _ in each.said) == ["done"] * 3 + ["error"]

    run(main())


def test_a_client_that_does_not_read_what_was_made_is_dropped() -> None:
    async def main() -> None:
        client = Upload("a", 1.0)
        client.reads = False
        with pytest.raises(StreamBroken, match="does not read its answer"):
            async with asyncio.timeout(500.0):
                await alone()._attend(client)

    run(main())


def test_an_index_beyond_a_table_is_the_fault_of_the_request() -> None:
    ids = Input("ids", TensorType((symbol("batch"), 3), "int64"))
    stage = Stage(0, Graph((ids,), (), (), (Ref("ids"),)), (), (), (0,))
    table = torch.randn(10, 4)

    class Worker:
        async def run(self, function: Any) -> Any:
            return function()

    def evaluate(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"result/0": torch.nn.functional.embedding(values["ids"], table)}

    async def main() -> None:
        context: Any = SimpleNamespace(on_behalf_of=lambda *_, **__: SimpleNamespace(compute=Worker()))
        nothing: Any = None
        stages, job = GraphStages(context, TorchPlane(), nothing, nothing), JobId("job")
        serve = ServeConfig(cache="recompute", max_sequence=1, vocabulary=1, outputs=("rows",), batch=4)
        held: Any = SimpleNamespace(
            stage=stage,
            manifest=SimpleNamespace(serve=serve, author=PeerId("a"), name="table"),
            plane=SimpleNamespace(evaluate=evaluate),
        )
        stages._held[job, 0] = held
        for index in (9, 10):
            given = [Array("ids", "int64", (1, 3), np.full(3, index).tobytes())]
            if index < len(table):
                assert (await stages.compute(job, 0, given))[0].shape == (1, 3, 4)
            else:
                with pytest.raises(JobError, match="input: an index beyond a table of the model"):
                    await stages.compute(job, 0, given)

    run(main())
