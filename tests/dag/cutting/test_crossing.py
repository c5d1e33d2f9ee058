"""The table of crossing values says the edges that `split` makes, whatever the cuts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.instances import SIZES, with_skips

from fusion.dag.cutting.crossing import crossing
from fusion.dag.cutting.cuts import legal_cuts, split
from fusion.dag.ir.graph import Ref
from fusion.dag.placement.network import Device, Network
from fusion.dag.placement.pipeline import Layout, pipeline


@settings(max_examples=examples(60))
@given(st.integers(1, 9), st.integers(0, 2**32 - 1), st.data())
def test_edges_are_those_of_split(blocks, seed, data):
    graph = with_skips(blocks, 8, np.random.default_rng(seed), share=0.6)
    last = data.draw(st.integers(1, len(graph.nodes)))  # what comes later is dead, and reads what is not
    graph = replace(graph, outputs=(Ref(graph.nodes[last - 1].name),))
    cuts = tuple(sorted(data.draw(st.sets(st.sampled_from(legal_cuts(graph) or (1,)), max_size=6))))
    table = crossing(graph, SIZES)
    found = {(table.names[v], int(p), int(c)) for v, p, c in zip(*table.edges(cuts), strict=True)}
    edges = {e for stage in split(graph, cuts) for e in stage.sends}
    assert found == {(e.name, e.producer, c) for e in edges for c in e.consumers}
    owners = tuple(f"p{i}" for i in range(len(cuts) + 1))
    devices = tuple(Device(peer=o, flops_per_second=1, memory_bytes=0) for o in owners)
    flows = pipeline(
        graph, Layout(cuts=cuts, owners=owners, microbatches=1), Network(devices=devices), SIZES
    ).flows
    assert {(f.name, f.producer, f.consumer) for f in flows} == found
    gradients = {e.name: e.needs_gradient for e in edges}
    assert all((f.backward is not None) == gradients[f.name] and f.forward_bytes == 32 * 8 * 4 for f in flows)
