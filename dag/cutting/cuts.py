"""Cutting the OP-DAG into stages (the sub-DAGs of FusionLLM, arXiv 2410.12707, and the values between them).

A cut is an index into `graph.nodes`: a new stage starts there. Stages are contiguous in topological order, so the
graph of stages has no cycle whatever the cuts are, and a value that skips stages goes straight to its consumers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt

from fusion.dag.cutting.costs import node_costs, with_gradient
from fusion.dag.cutting.positional import (
    POSITIONAL,
    keeps_last,
    made_of_weights,
    repeatable,
    written_buffers,
)
from fusion.dag.cutting.references import argument_symbols, needed, roots, substitute
from fusion.dag.cutting.source import source_values
from fusion.dag.cutting.stage import Edge, Stage, TieGroup, edge_name
from fusion.dag.ir.dims import Poly, bind
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import DTYPE_BYTES, Graph, Input, Node, Ref, TensorType, Variable

MAX_REPEATED = 1 << 20  # nodes that are computed again, over all stages

Bytes = npt.NDArray[np.int64]


def split(graph: Graph, cuts: Sequence[int]) -> tuple[Stage, ...]:
    """One stage more than there are cuts; stage i has the nodes [cuts[i-1], cuts[i]) that something needs.

    Nodes that `repeatable` names are computed again in every stage that reads them. A variable is in every stage
    that reads it (see `tie_groups`), frozen where no gradient comes back to it; one that nothing reads is kept by stage 0. Names
    do not change, except that a value from another stage is an input called `edge_name(ref)`. A stage whose nodes nobody else
    needs has no nodes. GraphError if the cuts do not ascend in [1, len(nodes)), separate the users of a written buffer, or make
    stages repeat more than MAX_REPEATED nodes. Takes time in proportion to the graph and what is repeated.
    """
    bounds = _bounds(graph, cuts)
    parts = _partition(graph, bounds)
    gradient, of_source = with_gradient(graph), source_values(graph)
    variables = _variables(graph, parts, gradient)
    consumers: dict[Ref, list[int]] = {}
    for s, part in enumerate(parts):
        for ref in part.foreign:
            consumers.setdefault(ref, []).append(s)
    producer = {ref: _stage_of(graph.node_index[ref.name], bounds) for ref in consumers}
    edges = {
        ref: Edge(
            edge_name(ref),
            ref,
            graph.types[ref],
            producer[ref],
            tuple(consumers[ref]),
            ref in gradient,
            ref in of_source,
        )
        for ref in sorted(consumers, key=lambda r: (graph.node_index[r.name], r.index))
    }
    receives: list[list[Edge]] = [[] for _ in parts]
    sends: list[list[Edge]] = [[] for _ in parts]
    for edge in edges.values():
        sends[edge.producer].append(edge)
        for consumer in edge.consumers:
            receives[consumer].append(edge)
    inputs = _Inputs(graph)
    return tuple(
        _stage(graph, inputs, s, part, tuple(receives[s]), tuple(sends[s]), variables[s])
        for s, part in enumerate(parts)
    )


def tie_groups(stages: Sequence[Stage]) -> tuple[TieGroup, ...]:
    """The trainable parameters that more than one stage holds, in order of first appearance."""
    holders: dict[str, list[int]] = {}
    for stage in stages:
        for variable in stage.graph.variables:
            if variable.trainable and variable.kind == "parameter":
                holders.setdefault(variable.name, []).append(stage.index)
    return tuple(TieGroup(name, tuple(held)) for name, held in holders.items() if len(held) > 1)


def legal_cuts(graph: Graph) -> tuple[int, ...]:
    """One cut for each way of dividing the work in two, ascending: a cut within a run of repeated or unused nodes
    gives the same stages as the cut before that run. No stage made by these cuts is empty. None is behind the cut to the last
    position, although little crosses there: a stage without it could neither run several sequences at once nor check
    guesses. Nor is one directly behind what is made of weights alone, as in `x * (1 + weight)`: a stage that is sent such a value
    could do neither."""
    fixed = _fixed_nodes(graph)
    most = next((i for i, node in enumerate(graph.nodes) if keeps_last(graph, node)), len(graph.nodes))
    forbidden = np.zeros(len(graph.nodes) + 2, dtype=int)
    for first, last in _written_spans(graph):
        forbidden[first + 1] += 1
        forbidden[last + 1] -= 1
    barred = np.cumsum(forbidden)
    return tuple(i + 1 for i in fixed[:-1] if not barred[i + 1] and i < most)


def crossings(graph: Graph, sizes: Mapping[str, int], without: Collection[Ref] = ()) -> tuple[Bytes, Bytes]:
    """For each cut 0 .. len(nodes): bytes that cross it forward, and bytes of gradients that cross it backward, in one
    microbatch, each value counted once however many read it, and those `without` not at all."""
    forward = np.zeros(len(graph.nodes) + 2, dtype=np.int64)
    backward = forward.copy()
    repeated, gradient, index = repeatable(graph), with_gradient(graph), graph.node_index
    for ref, readers in graph.uses.items():
        if ref.name not in index or ref.name in repeated or ref in without:
            continue
        made, last, bytes_ = index[ref.name], readers[-1], value_bytes(graph.types[ref], sizes)
        for total in (forward, backward) if ref in gradient else (forward,):
            total[made + 1] += bytes_
            total[last + 1] -= bytes_
    return np.cumsum(forward)[:-1], np.cumsum(backward)[:-1]


def candidate_cuts(graph: Graph, sizes: Mapping[str, int], limit: int) -> tuple[int, ...]:
    """At most `limit` legal cuts, ascending: the legal cuts are divided into `limit` groups of about equal work,
    and each group offers the cut that the fewest bytes cross, so that cheap cuts and balance are both on offer."""
    legal = legal_cuts(graph)
    if len(legal) <= limit:
        return legal
    costs = node_costs(graph, sizes)
    # One byte moved counts as a few FLOPs: nodes without FLOPs take time too.
    work = np.cumsum([c.forward_flops + 4 * c.moved_bytes for c in costs])
    bytes_ = crossings(graph, sizes)[0]
    best: dict[int, tuple[int, int]] = {}
    for cut in legal:
        group = min(int(work[cut - 1] / max(work[-1], 1) * limit), limit - 1)
        best[group] = min(best.get(group, (int(bytes_[cut]), cut)), (int(bytes_[cut]), cut))
    return tuple(sorted(cut for _, cut in best.values()))


def value_bytes(type_: TensorType, sizes: Mapping[str, int]) -> int:
    return prod(bind(dim, sizes) for dim in type_.shape) * DTYPE_BYTES[type_.dtype]


@dataclass
class _Part:
    """What one stage turns out to hold."""

    nodes: set[int]
    names: set[str]  # inputs and variables read
    foreign: set[Ref]  # values of earlier stages
    results: list[int]


def _bounds(graph: Graph, cuts: Sequence[int]) -> list[int]:
    bounds = [0, *cuts, len(graph.nodes)]
    if any(type(c) is not int for c in cuts) or any(a >= b for a, b in pairwise(bounds)):
        raise GraphError(f"cuts must be whole numbers that ascend in [1, {len(graph.nodes)}): {list(cuts)}")
    for first, last in _written_spans(graph):
        if _stage_of(first, bounds) != _stage_of(last, bounds):
            names = graph.nodes[first].name, graph.nodes[last].name
            raise GraphError(f"a cut separates {names[0]} and {names[1]}, which write to the same buffer")
    return bounds


def _stage_of(node: int, bounds: Sequence[int]) -> int:
    return bisect_right(bounds, node) - 1


def _partition(graph: Graph, bounds: Sequence[int]) -> list[_Part]:
    """Walk back from what each stage must give, the last stage first, as it says what it wants of the others."""
    repeated, index = repeatable(graph), graph.node_index
    wanted: list[list[Ref]] = [[] for _ in bounds[1:]]
    parts = [_Part(set(), set(), set(), []) for _ in bounds[1:]]
    for i, ref in enumerate(graph.outputs):
        home = _stage_of(index[ref.name], bounds) if ref.name in index else 0
        parts[home].results.append(i)
        wanted[home].append(ref)
    for ref in roots(graph)[len(graph.outputs) :]:
        wanted[_stage_of(index[ref.name], bounds)].append(ref)
    left = len(graph.nodes) + MAX_REPEATED
    for s in reversed(range(len(parts))):
        part, first, todo = parts[s], bounds[s], list(wanted[s])
        while todo:
            ref = todo.pop()
            at = index.get(ref.name)
            if at is None:
                part.names.add(ref.name)
            elif at < first and ref.name not in repeated:
                if ref not in part.foreign:
                    part.foreign.add(ref)
                    wanted[_stage_of(at, bounds)].append(ref)
            elif at not in part.nodes:
                part.nodes.add(at)
                todo.extend(graph.nodes[at].refs())
                left -= 1
                if left < 0:
                    raise GraphError(f"the cuts repeat more than {MAX_REPEATED} nodes")
    return parts


def _variables(graph: Graph, parts: Sequence[_Part], gradient: Collection[Ref]) -> list[tuple[Variable, ...]]:
    place = {v.name: i for i, v in enumerate(graph.variables)}
    # What gets no gradient an optimizer must not decay either.
    own = [v if Ref(v.name) in gradient else replace(v, trainable=False) for v in graph.variables]
    held = [
        tuple(own[i] for i in sorted(place[name] for name in part.names if name in place)) for part in parts
    ]
    read = {v.name for part in held for v in part}
    idle = [v for v in own if v.name not in read]
    return [(*held[0], *idle), *held[1:]]


class _Inputs:
    """The inputs of a graph, found without a walk over all of them, as there may be thousands of stages."""

    def __init__(self, graph: Graph) -> None:
        self._all = graph.inputs
        self._place = {input_.name: i for i, input_ in enumerate(graph.inputs)}
        first: dict[str, Input] = {}  # by symbol: the input to tell it by
        for input_ in sorted(graph.inputs, key=lambda i: i.name not in POSITIONAL):
            for symbol in _plain_symbols(input_.type):
                first.setdefault(symbol, input_)
        self.carriers = tuple({input_.name: input_ for input_ in first.values()}.values())

    def named(self, names: Iterable[str]) -> list[Input]:
        """Those of them that are inputs, in the order of the graph."""
        return [self._all[i] for i in sorted(self._place[name] for name in names if name in self._place)]


def _stage(
    graph: Graph,
    given: _Inputs,
    s: int,
    part: _Part,
    receives: tuple[Edge, ...],
    sends: tuple[Edge, ...],
    variables: tuple[Variable, ...],
) -> Stage:
    renamed = {e.ref: Ref(e.name) for e in receives}
    nodes = [graph.nodes[i] for i in sorted(part.nodes)]
    nodes = [
        replace(n, args=substitute(n.args, renamed)) if renamed.keys() & set(n.refs()) else n for n in nodes
    ]
    inputs = given.named(part.names | _symbol_carriers(given, nodes, part.names, receives))
    stage_graph = Graph(
        inputs=(*inputs, *(Input(e.name, e.type) for e in receives)),
        variables=variables,
        nodes=tuple(nodes),
        outputs=(*(e.ref for e in sends), *(graph.outputs[i] for i in part.results)),
        symbols=graph.symbols,
    )
    return Stage(s, stage_graph, receives, sends, tuple(part.results))


def _symbol_carriers(
    given: _Inputs, nodes: Iterable[Node], names: set[str], receives: Iterable[Edge]
) -> set[str]:
    """Model inputs to add so that each symbol that the nodes' arguments use is a dimension of some input: a stage
    that receives only (batch * sequence, width) could not tell batch and sequence apart."""
    missing = {s for node in nodes for s in argument_symbols(node.args)}
    types = [*(i.type for i in given.named(names)), *(e.type for e in receives)]
    missing -= {s for type_ in types for s in _plain_symbols(type_)}
    added: set[str] = set()
    if not missing:
        return added
    for input_ in given.carriers:
        if missing & _plain_symbols(input_.type):
            added.add(input_.name)
            missing -= _plain_symbols(input_.type)
    return added


def _plain_symbols(type_: TensorType) -> set[str]:
    return {d.terms[0][0][0] for d in type_.shape if isinstance(d, Poly) and _is_symbol(d)}


def _is_symbol(dim: Poly) -> bool:
    return len(dim.terms) == 1 and len(dim.terms[0][0]) == 1 and dim.terms[0][1] == 1


def _fixed_nodes(graph: Graph) -> list[int]:
    """Indices of the nodes that run in exactly one stage, ascending, on what comes from an input: neither repeated nor unused."""
    passed = repeatable(graph) | made_of_weights(graph)
    outputs = {ref.name for ref in graph.outputs}  # made where they stand, even those that are cheap
    live = needed(graph, roots(graph))
    return [graph.node_index[n.name] for n in live if n.name in outputs or n.name not in passed]


def _written_spans(graph: Graph) -> list[tuple[int, int]]:
    """(first, last) node that reads or writes to each buffer that a run changes, as batch normalisation does in training."""
    spans = [graph.uses[ref] for ref in sorted(written_buffers(graph), key=str)]
    return [(s[0], s[-1]) for s in spans]
