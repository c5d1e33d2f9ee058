"""A stage: nodes that are contiguous in topological order and run together on one peer (the frozen values only).

`fusion.dag.cutting.cuts` makes them. An edge is one value that its producing stage sends once to every stage that
reads it, skip connections included.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion.dag.ir.graph import Graph, Ref, TensorType


def edge_name(ref: Ref) -> str:
    """The name of a crossing value, as an input of the stages that read it and on the wire."""
    return f"{ref.name}/{ref.index}"


@dataclass(frozen=True)
class Edge:
    name: str  # edge_name(ref)
    ref: Ref  # the value, as the producing stage names it
    type: TensorType
    producer: int  # stage index
    consumers: tuple[int, ...]  # stage indices, ascending, all > producer
    needs_gradient: bool  # a floating-point value between a trainable parameter and the loss
    # Computed once for a session, by the encoder (`fusion.dag.cutting.source`).
    of_source: bool = False


@dataclass(frozen=True)
class Stage:
    index: int
    graph: Graph
    # graph.inputs  = the model inputs this stage reads (original names), then one input per edge of `receives`
    # graph.outputs = the refs of `sends` in order, then the model outputs of this stage (`results` of them)
    receives: tuple[Edge, ...]
    sends: tuple[Edge, ...]
    results: tuple[int, ...]  # indices into the whole graph's outputs


@dataclass(frozen=True)
class TieGroup:
    """A variable that several stages hold a copy of: they sum its gradients each step, in stage order."""

    variable: str
    stages: tuple[int, ...]
