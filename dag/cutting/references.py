"""What arguments refer to: replacing references, finding nodes, symbols and numbers."""

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
    """The node of `nodes`, by name, that makes the argument, if that is an `op`."""
    node = nodes.get(arg.name) if isinstance(arg, Ref) else None
    return node if node is not None and node.op == op else None


def constants(args: Iterable[Arg]) -> Iterator[Arg]:
    """Everything in the arguments but references and lists, in order: numbers, polynomials, dtypes, None."""
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
    """The nodes that `outputs` depend on, in order. `read`: what counts of what a node reads."""
    found: set[int] = set()
    todo = list(outputs)
    while todo:
        at = graph.node_index.get(todo.pop().name)
        if at is not None and at not in found:
            found.add(at)
            todo.extend(read(graph.nodes[at]))
    return tuple(graph.nodes[i] for i in sorted(found))


def roots(graph: Graph) -> tuple[Ref, ...]:
    """What a run is for: its outputs, and what it keeps for the next one, running statistics among it."""
    return (*graph.outputs, *(Ref(node.name) for node in graph.nodes if writes(node)))


def without_dead_nodes(graph: Graph) -> Graph:
    """The graph with only the nodes that its outputs depend on, or that keep a value; inputs and variables stay."""
    return replace(graph, nodes=needed(graph, roots(graph)))
