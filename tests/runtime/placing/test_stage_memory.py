from dataclasses import replace

import pytest
from support.captured_once import captured_once

from fusion.dag.ir.errors import PlacementError
from fusion.dag.ir.graph import Graph
from fusion.runtime.capture.models import GPT
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.job.manifest import (
    CompressionConfig,
    DataConfig,
    OptimizerConfig,
    ServeConfig,
    TrainConfig,
)
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.job.stage_graphs import serving_memory, training_memory
from fusion.runtime.placing.place_job import place_job
from fusion.runtime.placing.placed_job import as_requested
from fusion.swarm.directory.records import Digest, PeerRecord
from fusion.swarm.transport import PeerId

SEQUENCE = 32
TRAIN = TrainConfig(
    steps=1,
    microbatches=8,
    microbatch_size=4,
    sequence=SEQUENCE,
    seed=0,
    optimizer=OptimizerConfig(),
    data=DataConfig(kind="tokens", train=Digest("a" * 64)),
)
MIB = 1 << 20


@pytest.fixture(scope="module")
def graph() -> Graph:
    shape = GPTConfig(vocabulary=256, blocks=2, width=32, heads=2, sequence=SEQUENCE)
    return captured_once(GPT(shape), training=True, maximum_sequence=SEQUENCE)


def peer(name: str, memory: int) -> PeerRecord:
    return PeerRecord(
        peer=PeerId(name), name=f"quiet-{name}", addresses=(), role="peer", device="cpu", flops_per_second=1e9,
        memory_bytes=memory, free_memory_bytes=memory, software="0", opset=1, started_at=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("feedback", "schedule"),
    [
        *((False, "gpipe"), (True, "1f1b")),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((False, "1f1b"), (True, "gpipe"))),
    ],
)
def test_every_stage_fits_its_owner_or_the_job_is_refused(
    graph: Graph, schedule: str, feedback: bool
) -> None:
    compression = CompressionConfig(kind="uniform", codec="int8", error_feedback=feedback)
    config = replace(TRAIN, schedule=schedule, compression=compression)  # type: ignore[arg-type]
    (whole,) = place_job(graph, config, [peer("a", 1 << 40)], (), 1).memory_bytes
    outcomes = set()
    for share in (0.1, 0.45, 0.6, 0.8, 1.05):
        peers = [peer(name, int(share * whole)) for name in "abc"]
        try:
            found = place_job(graph, config, peers, ())
        except PlacementError as error:
            assert "it needs at least" in str(error) and "quiet-a" in str(error) and "\n" not in str(error)
            outcomes.add("refused")
            continue
        outcomes.add("placed")
        free = {p.peer: p.free_memory_bytes for p in peers}
        for owner, needed in zip(found.proposed, found.memory_bytes, strict=True):
            assert needed <= free[owner], f"{owner} will never claim its stage"
    assert outcomes == {"refused", "placed"}


def test_the_placement_a_caller_asks_for_is_refused_where_a_stage_fits_nobody(graph: Graph) -> None:
    cuts = (len(graph.nodes) // 2,)
    roomy = as_requested(graph, TRAIN, cuts)
    owners, need = (PeerId("a"), PeerId("b")), roomy.memory_bytes[1]
    with pytest.raises(PlacementError, match=r"stage 1 needs [\d.]+ MiB: its peer quiet-b offers [\d.]+ MiB"):
        as_requested(graph, TRAIN, cuts, owners, [peer("a", 1 << 40), peer("b", need - 1)])
    with pytest.raises(PlacementError, match=r"stage \d needs [\d.]+ MiB: no peer offers more than"):
        as_requested(graph, TRAIN, cuts, peers=[peer("a", need // 4)])
    assert as_requested(graph, TRAIN, cuts, owners, [peer("a", 1 << 40)]).memory_bytes == roomy.memory_bytes


def test_the_search_and_the_manifest_say_the_same(graph: Graph) -> None:
    for config in (TRAIN, replace(TRAIN, optimizer=OptimizerConfig(kind="sgd"), schedule="gpipe")):
        found = place_job(graph, config, [peer(name, 1 << 30) for name in "ab"], (), 2)
        assert found.plan is not None
        assert found.memory_bytes == tuple(stage.memory_bytes for stage in found.plan.stages)


def test_a_served_stage_needs_its_weights_a_session_and_what_runs(graph: Graph) -> None:
    captured = captured_once(
        GPT(GPTConfig(vocabulary=256, blocks=2, width=32, heads=2, sequence=SEQUENCE)),
        training=False,
        maximum_sequence=SEQUENCE,
    )
    graph = serving_graph(captured, cache="kv", maximum_sequence=SEQUENCE)
    config = ServeConfig(cache="kv", max_sequence=SEQUENCE, vocabulary=256)
    (whole,) = as_requested(graph, config, ()).memory_bytes
    (brief,) = as_requested(graph, replace(config, prefill_chunk=1), ()).memory_bytes
    weights = sum(4 * v.type.shape[0] * (v.type.shape[1:] or (1,))[0] for v in graph.variables)  # type: ignore[operator]
    cache = 2 * 2 * SEQUENCE * 32 * 4
    assert weights + cache < brief < whole


def test_what_the_optimizer_and_the_codecs_keep() -> None:
    none, lossy = (
        CompressionConfig(error_feedback=True),
        CompressionConfig(kind="adaptive", error_feedback=True),
    )
    assert training_memory(OptimizerConfig(), none).optimizer_slots == 2
    assert training_memory(OptimizerConfig(kind="sgd", momentum=0.9), none).optimizer_slots == 1
    assert training_memory(OptimizerConfig(kind="sgd"), none).optimizer_slots == 0
    assert not training_memory(OptimizerConfig(), none).error_feedback
    assert training_memory(OptimizerConfig(), lossy).error_feedback
    assert serving_memory(ServeConfig(cache="kv", max_sequence=9, vocabulary=2)).chunk == 512
    assert serving_memory(ServeConfig(cache="recompute", max_sequence=9, vocabulary=2)).chunk is None
