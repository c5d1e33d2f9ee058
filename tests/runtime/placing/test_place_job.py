"""On whom a job is placed at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.instances import chain, with_skips

from fusion.dag.ir.errors import PlacementError
from fusion.dag.ir.graph import Graph
from fusion.dag.ir.opset import OPSET, needed_version
from fusion.runtime.job.manifest import DataConfig, OptimizerConfig, ServeConfig, TrainConfig
from fusion.runtime.placing import place_job as placing
from fusion.runtime.placing import placed_job
from fusion.swarm.directory.records import Digest, PeerRecord
from fusion.swarm.transport import PeerId

CONFIG = TrainConfig(
    steps=5, microbatches=6, microbatch_size=2, sequence=4, seed=0, optimizer=OptimizerConfig(),
    data=DataConfig(kind="tokens", train=Digest("0" * 64)),
)  # fmt: skip


def peer(name: str, opset: int, flops: float = 1e9) -> PeerRecord:
    return PeerRecord(
        peer=PeerId(name), name=f"quiet-{name}", addresses=(), role="peer", device="cpu", flops_per_second=flops,
        memory_bytes=1 << 30, free_memory_bytes=1 << 30, software="0", opset=opset, started_at=0.0,
    )  # fmt: skip


@pytest.fixture
def graph() -> Graph:
    return with_skips(6, 16, np.random.default_rng(3), 0.6)


def test_a_job_goes_to_peers_that_know_its_operators(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = [peer("old", 1, 1e12), peer("new", 2)]
    assert placing.place_job(graph, CONFIG, peers, (), 1).proposed == ("old",)
    monkeypatch.setattr(placed_job, "needed_version", lambda graph: 2)
    assert placing.place_job(graph, CONFIG, peers, (), 1).proposed == ("new",)
    with pytest.raises(PlacementError, match="needs op-set 2: the newest that a peer here knows is 1"):
        placing.place_job(graph, CONFIG, peers[:1], (), 1)


def test_a_job_goes_to_peers_whose_planes_run_its_operators(graph: Graph) -> None:
    op = graph.nodes[-1].op
    lacking, whole = replace(peer("lacking", 2, 1e12), lacks=(op,)), peer("whole", 2)
    other = replace(lacking, lacks=("aten.erfinv",))
    assert placing.place_job(graph, CONFIG, [lacking, whole], (), 1).proposed == ("whole",)
    assert placing.place_job(graph, CONFIG, [other, whole], (), 1).proposed == ("lacking",)
    with pytest.raises(PlacementError, match=f"^it needs {op}: no plane of the peers here runs that$"):
        placing.place_job(graph, CONFIG, [lacking], (), 1)
    with pytest.raises(
        PlacementError, match=rf"^stage 0 needs {op}.*: the plane of lacking does not run that$"
    ):
        placed_job.as_requested(graph, CONFIG, (), (lacking.peer,), [lacking, whole])


def test_a_job_of_which_every_peer_would_refuse_a_stage_is_refused_at_once(graph: Graph) -> None:
    slow, slower = peer("slow", 9, 1e-2), peer("slower", 9, 1e-3)
    with pytest.raises(
        PlacementError,
        match=r"^stage \d: one call .* s: make train.microbatch_size smaller, or give it more stages$",
    ):
        placing.place_job(graph, CONFIG, [slow, slower], ())
    assert placing.place_job(graph, CONFIG, [slow, slower, peer("fast", 9)], ()).parts
    unmeasured = replace(slow, flops_per_second=0.0)
    placed = placing.place_job(graph, CONFIG, [peer("fast", 9)], (), 1)
    placing._require_short_calls(placed, [unmeasured, slow])


def test_a_stage_of_too_many_operators_is_refused_at_once(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = [peer("fast", 9)]
    monkeypatch.setattr(placing, "MAX_STAGE_NODES", len(graph.nodes))
    assert placing.place_job(graph, CONFIG, fast, (), 1).parts
    monkeypatch.setattr(placing, "MAX_STAGE_NODES", len(graph.nodes) - 1)
    with pytest.raises(PlacementError, match=r"^stage 0 has \d+ operators, .* give it more stages$"):
        placing.place_job(graph, CONFIG, fast, (), 1)


def test_a_graph_needs_the_newest_of_its_operators(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    assert needed_version(graph) == 1
    used = graph.nodes[-1].op
    monkeypatch.setattr("fusion.dag.ir.opset.OPSET", {**OPSET, used: replace(OPSET[used], since=3)})
    assert needed_version(graph) == 3


def test_a_draft_has_room_wherever_a_first_stage_beside_it_has() -> None:
    config = ServeConfig(cache="recompute", max_sequence=4, vocabulary=16, outputs=("y",))
    graph = chain([16] * 11)
    whole = placing.place_job(graph, config, [peer("alone", 9)], (), 1).memory_bytes[0]
    lent, draft = whole * 3 // 4, whole * 3 // 10  # as if both had less neither has room for its half
    peers = [replace(peer(name, 9), free_memory_bytes=lent) for name in ("a", "b")]
    placed = placing.place_beside(draft, graph, config, peers, (), 2)
    plain = placing.place_job(graph, config, peers, (), 2)
    assert plain.memory_bytes[0] + draft > lent
    assert placed.memory_bytes[0] <= lent and placed.memory_bytes[1] <= lent
    assert sum(placed.memory_bytes) >= whole + draft
    with pytest.raises(PlacementError, match=r"needs at least .* MiB; what peers offer: quiet-a"):
        placing.place_beside(draft, graph, config, peers[:1], (), 1)
