"""The two graphs of an encoder-decoder: what is made of a session's source alone, which runs once for a session, and what
runs for each position of its sequence.

A graph with the symbol `source` has them; others are what they ever were. What the first half hands the second are keys and values
of `fusion.source_attention` and `fusion.source_attention_scored`, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from fusion.dag.cutting.references import argument_symbols, needed
from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.dims import symbols_of
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import Graph, Node, Ref, Variable
from fusion.dag.ir.opset import kept

SOURCE = "source"
SOURCE_IDS, SOURCE_FEATURES = "source_ids", "source_features"
SOURCE_INPUTS = frozenset({SOURCE_IDS, SOURCE_FEATURES})
SOURCE_ATTENTION, SOURCE_ATTENTION_SCORED = "fusion.source_attention", "fusion.source_attention_scored"
SOURCE_ATTENTIONS = frozenset({SOURCE_ATTENTION, SOURCE_ATTENTION_SCORED})

_NOTHING, _SOURCE, _SEQUENCE = range(3)  # what a value is made of


@dataclass(frozen=True)
class Halves:
    """Of a stage. The outputs of `encode` are what it sends, then keys and values by `slots`, a pair each; the last variables of
    `decode` stand for these, in the same order."""

    encode: Stage
    decode: Stage
    slots: tuple[int, ...]

    @property
    def handed(self) -> tuple[Ref, ...]:
        """Keys and values as `encode` names them."""
        return self.encode.graph.outputs[len(self.encode.sends) :]


def operators(graph: Graph) -> frozenset[str]:
    """What whoever runs the graph has to know: its operators, and of what is made of a source, which another stage attends to,
    how that is attended to."""
    found = {node.op for node in graph.nodes}
    return frozenset(found | {SOURCE_ATTENTION} if SOURCE in graph.symbols else found)


def source_values(graph: Graph) -> frozenset[Ref]:
    """The values that are made once for a session, by nodes of the graph."""
    kinds = _kinds(graph, ())
    return frozenset(
        Ref(node.name, i)
        for node in graph.nodes
        if kinds.get(node.name) == _SOURCE
        for i in range(len(node.results))
    )


def misused_source(graph: Graph, received: Collection[str] = ()) -> Node | None:
    """The first node of the second half that reads a value of the first one in another way than as keys and values, or others as
    these."""
    kinds = _kinds(graph, received)
    for node in graph.nodes:
        if kinds.get(node.name) == _SOURCE:
            continue
        read = [ref for ref in node.refs() if kinds.get(ref.name) == _SOURCE]
        wanted = [*node.args[1:3]] if node.op in SOURCE_ATTENTIONS else []
        if read != wanted:
            return node
    return None


def halves(stage: Stage) -> Halves | None:
    """None for a stage of a model that reads no source. GraphError where a value goes from one half to the other by another way
    than attention, or a stage makes a result of the source alone."""
    graph = stage.graph
    if SOURCE not in graph.symbols and all(node.op not in SOURCE_ATTENTIONS for node in graph.nodes):
        return None
    received = {edge.name for edge in stage.receives if edge.of_source}
    kinds = _kinds(graph, received)
    if (wrong := misused_source(graph, received)) is not None:
        raise GraphError(f"{wrong.name} ({wrong.op}) mixes up what is made of the source and what is not")
    results = graph.outputs[len(stage.sends) :]
    if any(kinds.get(ref.name, _NOTHING) == _SOURCE for ref in results):
        raise GraphError("an output of the model is made of the source alone")
    once = [edge for edge in stage.sends if edge.of_source]
    attending = [node for node in graph.nodes if node.op in SOURCE_ATTENTIONS and kinds[node.name] != _SOURCE]
    handed = [ref for node in attending for ref in node.args[1:3] if isinstance(ref, Ref)]
    stand_ins = {
        node.name: tuple(
            Variable(f"{node.name}:{part}", graph.types[ref], kind="buffer", trainable=False)
            for part, ref in zip(("key", "value"), node.args[1:3], strict=True)
            if isinstance(ref, Ref)
        )
        for node in attending
    }
    encode = _part(stage, graph, [*(edge.ref for edge in once), *handed], kinds, of_source=True)
    nodes = tuple(
        replace(node, args=(node.args[0], *(Ref(v.name) for v in stand_ins[node.name]), *node.args[3:]))
        if node.name in stand_ins
        else node
        for node in graph.nodes
        if kinds.get(node.name) != _SOURCE
    )
    late = [*(edge.ref for edge in stage.sends if not edge.of_source), *results]
    decode = _part(stage, replace(graph, nodes=nodes), late, kinds, of_source=False)
    stood = tuple(each for node in attending for each in stand_ins[node.name])
    decode = replace(decode, graph=replace(decode.graph, variables=(*decode.graph.variables, *stood)))
    slots = tuple(cache[0] for node in attending if (cache := kept(node)) is not None)
    return Halves(encode, decode, slots)


def _part(stage: Stage, graph: Graph, outputs: list[Ref], kinds: dict[str, int], *, of_source: bool) -> Stage:
    """The nodes that the outputs need. Inputs that no node reads stay: they may tell a size."""
    nodes = needed(graph, outputs)
    read = {ref.name for node in nodes for ref in node.refs()} | {ref.name for ref in outputs}
    part = Graph(
        inputs=tuple(i for i in graph.inputs if (kinds[i.name] == _SOURCE) == of_source),
        variables=tuple(v for v in graph.variables if v.name in read),
        nodes=nodes,
        outputs=tuple(outputs),
        symbols=graph.symbols,
    )
    return Stage(
        index=stage.index,
        graph=part,
        receives=tuple(edge for edge in stage.receives if edge.of_source == of_source),
        sends=tuple(edge for edge in stage.sends if edge.of_source == of_source),
        results=() if of_source else stage.results,
    )


def _kinds(graph: Graph, received: Collection[str]) -> dict[str, int]:
    """By name of an input or a node; a variable has none."""
    if SOURCE not in graph.symbols:
        return {}
    once = SOURCE_INPUTS | set(received)
    kinds = {i.name: _SOURCE if i.name in once else _SEQUENCE for i in graph.inputs}
    for node in graph.nodes:
        symbols = argument_symbols(node.args) | {
            s for t in node.results for d in t.shape for s in symbols_of(d)
        }
        own = _SEQUENCE if "sequence" in symbols else _SOURCE if SOURCE in symbols else _NOTHING
        kinds[node.name] = max((own, *(kinds.get(ref.name, _NOTHING) for ref in node.refs())))
    # What is made of nothing but variables and numbers, and read for the source alone, belongs to it.
    for node in reversed(graph.nodes):
        if kinds[node.name] == _NOTHING:
            readers = {
                kinds[graph.nodes[at].name]
                for i in range(len(node.results))
                for at in graph.uses.get(Ref(node.name, i), ())
            }
            if readers == {_SOURCE}:
                kinds[node.name] = _SOURCE
    return kinds
