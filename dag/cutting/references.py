"""Traversal of arguments: substituting references, and finding nodes, symbols and constants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from fusion.dag.cutting.positional import writes
from fusion.dag.ir.dims import Poly, symbols_of
from fusion.dag.ir.graph import Arg, Graph, Node, Ref


def substitute(args: tuple[Arg, ...], renamed: Mapping[Ref, Ref]) -> tuple[Arg, ...]:
    """The arguments with every Ref that has an entry in `renamed` replaced by it."""
    return tuple(
        renamed.get(a, a) if isinstance(a, Ref) else substitute(a, renamed) if isinstance(a, tuple) else a
        for a in args
    )


def produced_by(arg: object, op: str, nodes: Mapping[str, Node]) -> Node | None:
    """The node of `nodes`, by name, that produces the argument, if it is an `op`."""
    node = nodes.get(arg.name) if isinstance(arg, Ref) else None
    return node if node is not None and node.op == op else None


def constants(args: Iterable[Arg]) -> Iterator[Arg]:
    """The constants in the arguments and their lists, in order: numbers, polynomials, dtypes, None."""
    for arg in args:
        if isinstance(arg, tuple):
            yield from constants(arg)
        elif not isinstance(arg, Ref):
            yield arg


def argument_symbols(args: Iterable[Arg]) -> set[str]:
    """The symbols of the polynomials among the arguments."""
    return {s for c in constants(args) if isinstance(c, Poly) for s in symbols_of(c)}


def needed(
    graph: Graph, outputs: Iterable[Ref], read: Callable[[Node], Iterator[Ref]] = Node.refs
) -> tuple[Node, ...]:
    """The nodes that `outputs` depend on, in order. `read`: the operands of a node that count."""
    indices: set[int] = set()
    pending = list(outputs)
    while pending:
        at = graph.node_index.get(pending.pop().name)
        if at is not None and at not in indices:
            indices.add(at)
            pending.extend(read(graph.nodes[at]))
    return tuple(graph.nodes[i] for i in sorted(indices))


def roots(graph: Graph) -> tuple[Ref, ...]:
    """The values that a run must compute: outputs, and nodes that write to buffers, such as running statistics."""
    return (*graph.outputs, *(Ref(node.name) for node in graph.nodes if writes(node)))


def without_dead_nodes(graph: Graph) -> Graph:
    """The graph with only the nodes that its `roots` depend on; inputs and variables stay."""
    return replace(graph, nodes=needed(graph, roots(graph)))
