from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.captured_once import captured_once
from torch import nn

from fusion.dag.cutting.cuts import legal_cuts
from fusion.dag.ir.graph import Graph, Ref
from fusion.runtime.capture.models import GPT
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.placing.place_job import place_job
from fusion.runtime.placing.place_serving import token_seconds
from fusion.runtime.placing.placed_before import FOLDER, Before, PlacementsBefore, as_before
from fusion.runtime.placing.placed_job import Placed
from fusion.swarm.directory.records import PeerRecord
from fusion.swarm.transport import PeerId

CONFIG = ServeConfig(cache="kv", max_sequence=16, vocabulary=256)


def model() -> nn.Module:
    with torch.device("meta"):
        return GPT(GPTConfig(blocks=4, width=32, heads=2, sequence=16))


@functools.cache
def served() -> Graph:
    return serving_graph(captured_once(model(), training=False, maximum_sequence=16))


def peer(name: str, memory: int = 1 << 30, flops: float = 1e9) -> PeerRecord:
    return PeerRecord(
        peer=PeerId(name), name=name, addresses=("/ip4/127.0.0.1/tcp/1",), role="peer", device="cpu",
        flops_per_second=flops, memory_bytes=memory, free_memory_bytes=memory, software="0", opset=2, started_at=0.0,
    )  # fmt: skip


PEERS = [peer("A"), peer("B"), peer("C")]


def placed() -> Placed:
    return place_job(served(), CONFIG, PEERS, (), 2)


def other(now: Placed) -> Before:
    """One node further, on the other two peers."""
    cuts = legal_cuts(served())
    owners = [p.peer for p in PEERS if p.peer not in now.proposed[:1]]
    return Before((cuts[cuts.index(now.cuts[0]) + 1],), tuple(owners))


def test_what_is_predicted_of_a_placement_is_what_placing_says_of_it() -> None:
    now = placed()
    seconds, on_links = token_seconds(served(), CONFIG, PEERS, (), now.cuts, now.proposed)
    assert seconds == pytest.approx(now.predicted_seconds) and 0 < on_links < seconds
    assert now.stage_count is not None
    assert on_links == pytest.approx(now.stage_count.chosen.link_seconds)


def test_a_model_goes_where_it_was() -> None:
    now = placed()
    before = other(now)
    again = as_before(now, before, served(), CONFIG, PEERS, ())
    assert (again.cuts, again.proposed) == (before.cuts, before.owners)
    assert again.predicted_seconds > 0
    assert again.stage_count is not None and ", as before: " in again.stage_count.line(str)
    assert as_before(now, None, served(), CONFIG, PEERS, ()) is now
    assert as_before(now, Before(now.cuts, now.proposed), served(), CONFIG, PEERS, ()) is now


def test_but_not_where_a_peer_is_gone_or_full_or_slow_or_the_cut_is_none() -> None:
    now = placed()
    before = other(now)
    first = next(i for i, p in enumerate(PEERS) if p.peer == before.owners[0])

    def again(peers: list[PeerRecord], before: Before = before, beside: int = 0) -> Placed:
        return as_before(now, before, served(), CONFIG, peers, (), beside)

    assert again(PEERS) is not now
    assert again([p for p in PEERS if p.peer != before.owners[0]]) is now
    assert again([*PEERS[:first], replace(PEERS[first], free_memory_bytes=1000), *PEERS[first + 1 :]]) is now
    second = before.owners[1]  # nearly all nodes are there
    assert again([replace(p, flops_per_second=1e6) if p.peer == second else p for p in PEERS]) is now
    assert again(PEERS, beside=1 << 30) is now
    for cuts in ((), (0,), (10**6,), (-3,)):
        assert again(PEERS, replace(before, cuts=cuts)) is now


def test_it_is_written_down_and_damaged_files_are_none(tmp_path: Path) -> None:
    places = PlacementsBefore(tmp_path)
    assert places.of(served()) is None
    now = placed()
    places.remember(served(), now)
    assert places.of(served()) == Before(now.cuts, now.proposed)
    (path,) = (tmp_path / FOLDER).iterdir()
    for content in (b"", b"[" * 5000, b"[]", b'{"cuts": ["1"], "owners": ["A", "B"]}', b'{"cuts": [], "owners": []}',
                    b'{"cuts": [3], "owners": ["A", "A"]}', b'{"cuts": [true], "owners": ["A", "B"]}'):  # fmt: skip
        path.write_bytes(content)
        assert places.of(served()) is None


def test_the_oldest_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusion.runtime.placing.placed_before.REMEMBERED", 2)
    places, now = PlacementsBefore(tmp_path), placed()
    graphs = [replace(served(), outputs=(Ref(served().nodes[at].name),)) for at in (3, 4, 5)]
    for graph in graphs:
        places.remember(graph, now)
        for file in (tmp_path / FOLDER).iterdir():
            os.utime(file, (file.stat().st_mtime - 10, file.stat().st_mtime - 10))
    assert places.of(graphs[0]) is None
    assert places.of(graphs[1]) == places.of(graphs[2]) == Before(now.cuts, now.proposed)


def test_what_is_large_moves_for_what_is_worth_the_way_alone() -> None:
    """Peers that are measured while their machine is busy seem half as fast as the others, and a minute later do not."""
    now = placed()
    before = other(now)
    slow = [replace(p, flops_per_second=2e8) if p.peer == before.owners[1] else p for p in PEERS]
    seconds, _ = token_seconds(served(), CONFIG, slow, (), before.cuts, before.owners)
    assert seconds > 1.3 * now.predicted_seconds
    assert as_before(now, before, served(), CONFIG, slow, ()) is now
    large = replace(now, memory_bytes=(1 << 30, 1 << 30))
    again = as_before(large, before, served(), CONFIG, slow, ())
    assert (again.cuts, again.proposed) == (before.cuts, before.owners)
    slower = [replace(p, flops_per_second=1e5) if p.peer == before.owners[1] else p for p in PEERS]
    assert as_before(large, before, served(), CONFIG, slower, ()) is large
