"""The two halves of an encoder-decoder: the encoder, which depends on a session's source alone and runs once for a session, and
the decoder, which runs for each position of its sequence.

A graph with the symbol `source` has both. The decoder reads only the keys and values of cross-attention from the encoder: those of
`fusion.source_attention` and `fusion.source_attention_scored`.
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

_NOTHING, _SOURCE, _SEQUENCE = range(3)  # what a value depends on


@dataclass(frozen=True)
class Halves:
    """The halves of a stage. The outputs of `encode` are those it sends, then a key and a value for each of `slots`; the last
    variables of `decode` are placeholders for these, in the same order."""

    encode: Stage
    decode: Stage
    slots: tuple[int, ...]

    @property
    def keys_and_values(self) -> tuple[Ref, ...]:
        """The keys and values, as refs of `encode`."""
        return self.encode.graph.outputs[len(self.encode.sends) :]


def operators(graph: Graph) -> frozenset[str]:
    """The operators that a peer must support to run the graph; of an encoder-decoder, cross-attention too, which another stage may
    have."""
    names = {node.op for node in graph.nodes}
    return frozenset(names | {SOURCE_ATTENTION} if SOURCE in graph.symbols else names)


def source_values(graph: Graph) -> frozenset[Ref]:
    """The values that nodes compute once for a session."""
    kinds = _kinds(graph, ())
    return frozenset(
        Ref(node.name, i)
        for node in graph.nodes
        if kinds.get(node.name) == _SOURCE
        for i in range(len(node.results))
    )


def misused_source(graph: Graph, received: Collection[str] = ()) -> Node | None:
    """The first node of the decoder that reads a value of the encoder in another way than as key and value of cross-attention, or
    cross-attention whose keys and values are not of the encoder; else None."""
    kinds = _kinds(graph, received)
    for node in graph.nodes:
        if kinds.get(node.name) == _SOURCE:
            continue
        read = [ref for ref in node.refs() if kinds.get(ref.name) == _SOURCE]
        expected = [*node.args[1:3]] if node.op in SOURCE_ATTENTIONS else []
        if read != expected:
            return node
    return None


def halves(stage: Stage) -> Halves | None:
    """The halves of a stage; None if its model reads no source. GraphError if the decoder reads the encoder other than through
    cross-attention, or if an output of the model depends on the source alone."""
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
    encoder_sends = [edge for edge in stage.sends if edge.of_source]
    attentions = [
        node for node in graph.nodes if node.op in SOURCE_ATTENTIONS and kinds[node.name] != _SOURCE
    ]
    keys_and_values = [ref for node in attentions for ref in node.args[1:3] if isinstance(ref, Ref)]
    placeholders = {
        node.name: tuple(
            Variable(f"{node.name}:{part}", graph.types[ref], kind="buffer", trainable=False)
            for part, ref in zip(("key", "value"), node.args[1:3], strict=True)
            if isinstance(ref, Ref)
        )
        for node in attentions
    }
    encode = _part(
        stage, graph, [*(edge.ref for edge in encoder_sends), *keys_and_values], kinds, of_source=True
    )
    nodes = tuple(
        replace(node, args=(node.args[0], *(Ref(v.name) for v in placeholders[node.name]), *node.args[3:]))
        if node.name in placeholders
        else node
        for node in graph.nodes
        if kinds.get(node.name) != _SOURCE
    )
    decoder_outputs = [*(edge.ref for edge in stage.sends if not edge.of_source), *results]
    decode = _part(stage, replace(graph, nodes=nodes), decoder_outputs, kinds, of_source=False)
    all_placeholders = tuple(each for node in attentions for each in placeholders[node.name])
    decode = replace(
        decode, graph=replace(decode.graph, variables=(*decode.graph.variables, *all_placeholders))
    )
    slots = tuple(cache[0] for node in attentions if (cache := kept(node)) is not None)
    return Halves(encode, decode, slots)


def _part(stage: Stage, graph: Graph, outputs: list[Ref], kinds: dict[str, int], *, of_source: bool) -> Stage:
    """The half with the nodes that the outputs need. Inputs without a reader stay: they may give a size."""
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
    """What each input and node depends on, by name; variables are not listed."""
    if SOURCE not in graph.symbols:
        return {}
    source_names = SOURCE_INPUTS | set(received)
    kinds = {i.name: _SOURCE if i.name in source_names else _SEQUENCE for i in graph.inputs}
    for node in graph.nodes:
        symbols = argument_symbols(node.args) | {
            s for t in node.results for d in t.shape for s in symbols_of(d)
        }
        own = _SEQUENCE if "sequence" in symbols else _SOURCE if SOURCE in symbols else _NOTHING
        kinds[node.name] = max((own, *(kinds.get(ref.name, _NOTHING) for ref in node.refs())))
    # Values of variables and constants alone that only the encoder reads belong to it.
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
