"""Cutting the OP-DAG into stages (the sub-DAGs of FusionLLM, arXiv 2410.12707, and the values between them).

A cut is an index into `graph.nodes`: a new stage starts there. Stages are contiguous in topological order, so the
graph of stages has no cycle whatever the cuts are, and a value that skips stages is sent directly to its consumers.
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
    """The stages between the cuts; stage i has the live nodes of [cuts[i-1], cuts[i]).

    Nodes that are `repeatable` are recomputed in every stage that reads them. A variable is in every stage that reads it (see
    `tie_groups`), frozen where it gets no gradient; unread variables are in stage 0. Names do not change, except that a value
    from another stage is an input called `edge_name(ref)`. A stage without live nodes is empty. GraphError if the cuts do not
    ascend in [1, len(nodes)), separate the users of a written buffer, or repeat more than MAX_REPEATED nodes. Linear in the
    graph and the repeated nodes.
    """
    bounds = _bounds(graph, cuts)
    parts = _partition(graph, bounds)
    gradient, of_source = with_gradient(graph), source_values(graph)
    variables = _variables(graph, parts, gradient)
    consumers: dict[Ref, list[int]] = {}
    for s, part in enumerate(parts):
        for ref in part.received:
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
    inputs = _GraphInputs(graph)
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
    return tuple(
        TieGroup(name, tuple(stages_of)) for name, stages_of in holders.items() if len(stages_of) > 1
    )


def legal_cuts(graph: Graph) -> tuple[int, ...]:
    """One cut for each distinct division of the work in two, ascending: a cut within a run of repeated or dead nodes gives the
    same stages as the cut before that run. No stage between these cuts is empty. None is after the slice of the last position,
    although little crosses there: a stage without it could neither batch sequences nor verify draft tokens. Nor is one directly
    after values of weights alone, as in `x * (1 + weight)`: a stage that receives such a value could do neither."""
    fixed = _nodes_of_one_stage(graph)
    last_cut = next((i for i, node in enumerate(graph.nodes) if keeps_last(graph, node)), len(graph.nodes))
    changes = np.zeros(len(graph.nodes) + 2, dtype=int)
    for first, last in _written_spans(graph):
        changes[first + 1] += 1
        changes[last + 1] -= 1
    open_spans = np.cumsum(changes)
    return tuple(i + 1 for i in fixed[:-1] if not open_spans[i + 1] and i < last_cut)


def crossings(graph: Graph, sizes: Mapping[str, int], without: Collection[Ref] = ()) -> tuple[Bytes, Bytes]:
    """For each cut 0 .. len(nodes): bytes of values that cross it, and bytes of gradients that cross it backward, for one
    microbatch. Each value counts once, whatever its number of readers; those in `without` do not count."""
    forward = np.zeros(len(graph.nodes) + 2, dtype=np.int64)
    backward = forward.copy()
    repeated, gradient, index = repeatable(graph), with_gradient(graph), graph.node_index
    for ref, readers in graph.uses.items():
        if ref.name not in index or ref.name in repeated or ref in without:
            continue
        producer, last, bytes_ = index[ref.name], readers[-1], value_bytes(graph.types[ref], sizes)
        for bytes_by_cut in (forward, backward) if ref in gradient else (forward,):
            bytes_by_cut[producer + 1] += bytes_
            bytes_by_cut[last + 1] -= bytes_
    return np.cumsum(forward)[:-1], np.cumsum(backward)[:-1]


def candidate_cuts(graph: Graph, sizes: Mapping[str, int], limit: int) -> tuple[int, ...]:
    """At most `limit` legal cuts, ascending: of each of `limit` groups of about equal work, the cut that the fewest bytes cross.
    So there are cheap cuts and balanced ones."""
    legal = legal_cuts(graph)
    if len(legal) <= limit:
        return legal
    costs = node_costs(graph, sizes)
    # A byte moved counts as 4 FLOPs: nodes without FLOPs take time too.
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
    """The content of one stage."""

    nodes: set[int]
    names: set[str]  # inputs and variables read
    received: set[Ref]  # values of earlier stages
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
    """Walk back from the outputs of each stage, the last stage first, as it determines what it receives from the others."""
    repeated, index = repeatable(graph), graph.node_index
    wanted: list[list[Ref]] = [[] for _ in bounds[1:]]
    parts = [_Part(set(), set(), set(), []) for _ in bounds[1:]]
    for i, ref in enumerate(graph.outputs):
        stage = _stage_of(index[ref.name], bounds) if ref.name in index else 0
        parts[stage].results.append(i)
        wanted[stage].append(ref)
    for ref in roots(graph)[len(graph.outputs) :]:
        wanted[_stage_of(index[ref.name], bounds)].append(ref)
    budget = len(graph.nodes) + MAX_REPEATED
    for s in reversed(range(len(parts))):
        part, first, pending = parts[s], bounds[s], list(wanted[s])
        while pending:
            ref = pending.pop()
            producer = index.get(ref.name)
            if producer is None:
                part.names.add(ref.name)
            elif producer < first and ref.name not in repeated:
                if ref not in part.received:
                    part.received.add(ref)
                    wanted[_stage_of(producer, bounds)].append(ref)
            elif producer not in part.nodes:
                part.nodes.add(producer)
                pending.extend(graph.nodes[producer].refs())
                budget -= 1
                if budget < 0:
                    raise GraphError(f"the cuts repeat more than {MAX_REPEATED} nodes")
    return parts


def _variables(graph: Graph, parts: Sequence[_Part], gradient: Collection[Ref]) -> list[tuple[Variable, ...]]:
    order = {v.name: i for i, v in enumerate(graph.variables)}
    # Frozen, as weight decay must not change a variable without a gradient.
    variables = [v if Ref(v.name) in gradient else replace(v, trainable=False) for v in graph.variables]
    by_stage = [
        tuple(variables[i] for i in sorted(order[name] for name in part.names if name in order))
        for part in parts
    ]
    read = {v.name for part in by_stage for v in part}
    unread = [v for v in variables if v.name not in read]
    return [(*by_stage[0], *unread), *by_stage[1:]]


class _GraphInputs:
    """An index of the inputs of a graph, as there may be thousands of stages to look them up for."""

    def __init__(self, graph: Graph) -> None:
        self._inputs = graph.inputs
        self._position = {input_.name: i for i, input_ in enumerate(graph.inputs)}
        first: dict[str, Input] = {}  # by symbol: the input that gives its size
        for input_ in sorted(graph.inputs, key=lambda i: i.name not in POSITIONAL):
            for symbol in _plain_symbols(input_.type):
                first.setdefault(symbol, input_)
        self.carriers = tuple({input_.name: input_ for input_ in first.values()}.values())

    def named(self, names: Iterable[str]) -> list[Input]:
        """The inputs among `names`, in the order of the graph."""
        return [
            self._inputs[i] for i in sorted(self._position[name] for name in names if name in self._position)
        ]


def _stage(
    graph: Graph,
    graph_inputs: _GraphInputs,
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
    inputs = graph_inputs.named(part.names | _symbol_carriers(graph_inputs, nodes, part.names, receives))
    stage_graph = Graph(
        inputs=(*inputs, *(Input(e.name, e.type) for e in receives)),
        variables=variables,
        nodes=tuple(nodes),
        outputs=(*(e.ref for e in sends), *(graph.outputs[i] for i in part.results)),
        symbols=graph.symbols,
    )
    return Stage(s, stage_graph, receives, sends, tuple(part.results))


def _symbol_carriers(
    graph_inputs: _GraphInputs, nodes: Iterable[Node], names: set[str], receives: Iterable[Edge]
) -> set[str]:
    """Model inputs to add so that each symbol that the nodes' arguments use is a dimension of some input: a stage
    that receives only (batch * sequence, width) could not tell batch and sequence apart."""
    missing = {s for node in nodes for s in argument_symbols(node.args)}
    types = [*(i.type for i in graph_inputs.named(names)), *(e.type for e in receives)]
    missing -= {s for type_ in types for s in _plain_symbols(type_)}
    added: set[str] = set()
    if not missing:
        return added
    for input_ in graph_inputs.carriers:
        if missing & _plain_symbols(input_.type):
            added.add(input_.name)
            missing -= _plain_symbols(input_.type)
    return added


def _plain_symbols(type_: TensorType) -> set[str]:
    return {d.terms[0][0][0] for d in type_.shape if isinstance(d, Poly) and _is_symbol(d)}


def _is_symbol(dim: Poly) -> bool:
    return len(dim.terms) == 1 and len(dim.terms[0][0]) == 1 and dim.terms[0][1] == 1


def _nodes_of_one_stage(graph: Graph) -> list[int]:
    """Indices, ascending, of the live nodes that depend on an input and are not repeated: each runs in one stage."""
    skipped = repeatable(graph) | made_of_weights(graph)
    outputs = {ref.name for ref in graph.outputs}  # not repeated, even cheap ones
    live = needed(graph, roots(graph))
    return [graph.node_index[n.name] for n in live if n.name in outputs or n.name not in skipped]


def _written_spans(graph: Graph) -> list[tuple[int, int]]:
    """(first, last) node that uses each buffer that a run writes to, as batch normalisation does in training."""
    spans = [graph.uses[ref] for ref in sorted(written_buffers(graph), key=str)]
    return [(s[0], s[-1]) for s in spans]
