from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.instances import Builder, with_skips
from support.operations import operations
from support.served import swarm_of

from fusion.dag.cutting.cuts import split
from fusion.dag.cutting.stage import Stage
from fusion.dag.ir import serialise
from fusion.dag.ir.dims import poly, symbol
from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType
from fusion.runtime.device.overrun import LONGEST_SECONDS
from fusion.runtime.job import stage_graphs
from fusion.runtime.job.errors import Refused, Understated, Unsupported
from fusion.runtime.job.manifest import (
    CompressionConfig,
    DataConfig,
    Manifest,
    OptimizerConfig,
    ServeConfig,
    TrainConfig,
)
from fusion.runtime.job.stage_graphs import StageGraphs, longest_call, needed_bytes, whole_stage
from fusion.runtime.placing.stage_memory import fitted
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.transport import PeerId

TRAIN = TrainConfig(
    steps=5, microbatches=6, microbatch_size=2, sequence=4, seed=0, optimizer=OptimizerConfig(),
    data=DataConfig(kind="tokens", train=Digest("0" * 64)),
)  # fmt: skip
MANIFEST = Manifest(
    name="m", kind="train", graph=Digest("0" * 64), cuts=(), weights=(), proposed=(), author=PeerId("a")
)


def decodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the graphs that are decoded from now on."""
    decoded: list[int] = []
    decode = serialise.decode
    monkeypatch.setattr(serialise, "decode", lambda data: (decoded.append(len(data)), decode(data))[1])
    return decoded


def test_a_graph_is_decoded_once_however_many_stages_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = decodings(monkeypatch)

    async def main() -> None:
        async with swarm_of(3, tmp_path) as swarm:
            job = await swarm.serve("gpt2", 2)
            decoded.clear()
            successor = swarm.peers[2]
            await swarm.stand_by(successor, job, 0, 1)  # on disk, weighed, in memory
            assert len(decoded) == 1
            graphs = StageGraphs(successor.context)
            one, two = await asyncio.gather(*(graphs.of(job, swarm.manifests[job]) for _ in range(2)))
            assert one is two and len(decoded) == 2 and len(one[0]) == 2

    asyncio.run(main())


def test_jobs_of_one_graph_decode_it_once_and_each_reads_it_as_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = decodings(monkeypatch)

    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm:
            job = await swarm.serve("gpt2", 2)
            context, manifest = swarm.peers[0].context, swarm.manifests[job]
            graphs, read = StageGraphs(context), []
            of = context.blobs.of
            monkeypatch.setattr(context.blobs, "of", lambda job: (read.append(job), of(job))[1])
            decoded.clear()
            others = [JobId(str(n) * 64) for n in range(3)]
            found = await asyncio.gather(
                *(graphs.of(each, replace(manifest, salt=each[:4])) for each in (*others, *others))
            )
            assert len(decoded) == 1 and all(each is found[0] for each in found)
            assert set(read) == set(others)
            await graphs.of(others[0], replace(manifest, cuts=()))
            assert len(decoded) == 2

    asyncio.run(main())


def test_a_graph_that_is_none_is_refused_and_not_remembered(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm:
            job = await swarm.serve("gpt2", 2)
            blobs = swarm.peers[0].context.blobs
            wrong = replace(swarm.manifests[job], graph=await blobs.put(b"no graph"))
            graphs = StageGraphs(swarm.peers[0].context)
            for _ in range(2):
                with pytest.raises(Unsupported, match="the graph of gpt2: "):
                    await graphs.of(job, wrong)

    asyncio.run(main())


@pytest.mark.parametrize("cuts", [(), (3,), (2, 5, 6), (1, 2, 3, 4, 5)])
@pytest.mark.parametrize("how", ["train", "kept", "gpipe", "kv", "recompute"])
def test_a_volunteer_works_out_about_what_the_launcher_does(cuts: tuple[int, ...], how: str) -> None:
    graph = with_skips(6, 16, np.random.default_rng(3), 0.6)
    config: TrainConfig | ServeConfig
    if how in ("kv", "recompute"):
        config = ServeConfig(cache=how, max_sequence=24, vocabulary=9, prefill_chunk=4)  # type: ignore[arg-type]
    else:
        config = replace(
            TRAIN,
            schedule="gpipe" if how == "gpipe" else "1f1b",
            compression=CompressionConfig(kind="uniform", error_feedback=how == "kept"),
        )
    config, memory = fitted(graph, config, cuts, [PeerId("")] * (len(cuts) + 1), ())
    kind = "train" if isinstance(config, TrainConfig) else "serve"
    manifest = replace(MANIFEST, cuts=cuts, kind=kind, **{"train": None, "serve": None, kind: config})
    for stage, declared in zip(split(graph, cuts), memory, strict=True):
        assert declared / stage_graphs.TOLERATED_RATIO < needed_bytes(stage, manifest) <= declared


@pytest.mark.parametrize("kind", ["serve"])
def test_a_stage_that_needs_more_than_its_manifest_says_is_refused_before_its_weights(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path) as swarm:
            job = await swarm.serve("gpt2", 2)
            monkeypatch.setattr(stage_graphs, "TOLERATED_BYTES", 0)
            honest, strict = swarm.manifests[job], swarm.peers[2]
            blobs = strict.context.blobs
            stages = split(serialise.decode(await blobs.read(honest.graph, 1 << 20)), honest.cuts)
            needed = [needed_bytes(stage, honest) for stage in stages]
            graphs = StageGraphs(strict.context)
            await graphs.check(job, replace(honest, memory_bytes=tuple(needed)), 0)
            low = replace(honest, memory_bytes=(1, needed[1]))
            with pytest.raises(Understated, match=r"stage 0 of gpt2 needs .* MiB: its manifest says 0.0 MiB"):
                await graphs.check(job, low, 0)
            await graphs.check(job, low, 1)
            with pytest.raises(Understated):
                await graphs.check(job, replace(honest, memory_bytes=()), 0)
            for digest in honest.weights:
                await blobs.drop(digest)
            with pytest.raises(Understated):
                await strict.service.prepare(job, low, 0, await strict.context.directory.job(job))  # type: ignore[arg-type]
            assert not blobs.has(honest.weights[0])

    asyncio.run(main())


def test_a_stage_of_which_one_call_would_take_too_long_here_is_refused_before_its_weights(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path) as swarm:
            job = await swarm.serve("gpt2", 2)
            manifest, context = swarm.manifests[job], swarm.peers[2].context
            stages = split(serialise.decode(await context.blobs.read(manifest.graph, 1 << 20)), manifest.cuts)
            # Nothing moves, but what is computed: the seconds follow from the rate alone.
            at_one = longest_call(stages[0], manifest.serve, 1.0)
            for times, refused in ((0.5, False), (2.0, True)):
                slow = replace(context, flops_per_second=at_one / LONGEST_SECONDS / times)
                checked = StageGraphs(slow).check(job, manifest, 0)
                if refused:
                    with pytest.raises(
                        Refused, match=r"stage 0 of gpt2: one call .* 1.2e\+03 s; at most 600 s"
                    ):
                        await checked
                else:
                    await checked

    asyncio.run(main())


def test_a_single_operator_that_promises_too_much_is_seen_in_any_kind_of_job() -> None:
    wide = Builder(1)
    wide.block(1, 1)
    (stage,) = split(wide.graph(), ())
    assert longest_call(stage, replace(TRAIN, microbatch_size=10**15), 1e10) > LONGEST_SECONDS
    assert longest_call(stage, TRAIN, 1e10) < LONGEST_SECONDS
    in_one_run = ServeConfig(cache="recompute", max_sequence=1, vocabulary=1, outputs=("y",), batch=10**15)
    assert longest_call(stage, in_one_run, 1e10) > LONGEST_SECONDS


def test_a_stage_of_more_nodes_than_are_compiled_in_a_moment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm:
            job = await swarm.serve("gpt2", 2)
            manifest, context = swarm.manifests[job], swarm.peers[0].context
            data = await context.blobs.read(manifest.graph, 1 << 20)
            fewer, more = sorted(
                (len(stage.graph.nodes), stage.index)
                for stage in split(serialise.decode(data), manifest.cuts)
            )
            assert fewer[0] < more[0]
            monkeypatch.setattr(stage_graphs, "MAX_STAGE_NODES", fewer[0])
            graphs = StageGraphs(context)
            await graphs.check(job, manifest, fewer[1])
            with pytest.raises(Refused, match=rf"gpt2 has {more[0]} nodes: at most {fewer[0]}"):
                await graphs.check(job, manifest, more[1])
            with pytest.raises(Refused, match="stage 0 of a draft has"):
                whole_stage(data, "a draft")

    asyncio.run(main())


def test_sizes_beyond_all_measure_are_refused_in_one_line(tmp_path: Path) -> None:
    x = TensorType((symbol("batch"), symbol("sequence")), "int64")
    huge = (poly([(("sequence",) * 4, 2**40)]),) * 8
    made = Node("made", "aten.zeros", (huge, None), (TensorType(huge, "float32"),))
    total = Node("total", "aten.sum", (Ref("made"), None), (TensorType((), "float32"),))
    graph = Graph((Input("input_ids", x),), (), (made, total), (Ref("total"),))

    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm:
            job = await swarm.serve("gpt2", 2)
            peer, manifest = swarm.peers[0], swarm.manifests[job]
            blob = await peer.context.blobs.put(serialise.encode(graph))
            wrong = replace(manifest, graph=blob, cuts=())
            with pytest.raises(Unsupported, match="stage 0 of gpt2: made is of more than"):
                await StageGraphs(peer.context).check(job, wrong, 0)

    asyncio.run(main())


@pytest.mark.parametrize("of_numbers", [True, False])
def test_a_job_whose_loss_is_not_one_number_is_refused_before_it_runs(of_numbers: bool) -> None:
    built = Builder(4)
    built.block(4, 4)
    if not of_numbers:
        built.at = built.add("aten.mean", built.at, None)
    stages = split(built.graph(), (1,))
    name = Digest("1" * 64)
    train = TrainConfig(
        steps=1, microbatches=1, microbatch_size=8, sequence=0, seed=1, evaluate_batches=1,
        optimizer=OptimizerConfig(), data=DataConfig(kind="arrays", train=name),
    )  # fmt: skip
    manifest = Manifest(
        name="m", kind="train", graph=name, cuts=(1,), weights=(name, name),
        proposed=(PeerId("p"),) * 2, author=PeerId("a"), train=train,
    )  # fmt: skip
    if of_numbers:
        with pytest.raises(Unsupported, match="not one number"):
            stage_graphs._check_loss(stages, manifest)
    else:
        stage_graphs._check_loss(stages, manifest)
    stage_graphs._check_loss(stages, replace(manifest, train=None))


def test_an_intricate_loss_is_bound_dimension_by_dimension() -> None:
    names = tuple("abcdefgh")
    dim = poly([(("batch",), 1), *(((a, b), 1) for a, b in pairwise(names))])
    type_ = TensorType((dim,) * 8, "float32")
    loss = Node("loss", "aten.neg", (Ref("x"),), (type_,))
    graph = Graph((Input("x", type_),), (), (loss,), (Ref("loss"),), ("batch", *names))
    stages = split(graph, ())
    sizes = dict.fromkeys(("batch", *names), 1)
    manifest = replace(MANIFEST, train=SimpleNamespace(sizes=sizes))  # type: ignore[arg-type]
    assert operations(lambda: _refused(stages, manifest)) < 10_000


def _refused(stages: tuple[Stage, ...], manifest: Manifest) -> None:
    with pytest.raises(Unsupported, match="not one number"):
        stage_graphs._check_loss(stages, manifest)
