"""Rewrites a captured inference graph to the one that is served: a KV cache, logits of the last position, fused norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fusion.dag.cutting.source import SOURCE
from fusion.dag.ir.dims import Poly, bind
from fusion.dag.ir.errors import GraphError, UnsupportedModel
from fusion.dag.ir.graph import Graph, Input, Node, TensorType
from fusion.dag.rewrites.caches.kv_cache import cache_attention
from fusion.dag.rewrites.clean import clean, without_detach
from fusion.dag.rewrites.experts import name_experts, require_named_experts
from fusion.dag.rewrites.fuse import fuse
from fusion.dag.rewrites.last_position import last_position
from fusion.runtime.planes.codegen import compile_graph

Array = npt.NDArray[np.generic]


def serving_graph(
    graph: Graph,
    *,
    cache: Literal["kv", "recompute"] = "kv",
    maximum_sequence: int | None = None,
    maximum_source: int | None = None,
) -> Graph:
    """`graph`, as `capture_language_model(training=False)` or `capture_encoder_decoder` returns it, rewritten for decoding.

    With "kv", every attention reads a cache: UnsupportedModel (one line) for a model whose results that would change. With "recompute", the whole
    prefix runs for each token, which is exact for any model: UnsupportedModel only for experts that could run only with weights copied for each
    position.
    """
    graph = name_experts(clean(without_detach(graph)))
    require_named_experts(graph)
    if cache == "kv":
        graph = cache_attention(graph, evaluate, maximum_sequence, maximum_source)
    elif SOURCE in graph.symbols:
        raise UnsupportedModel("an encoder-decoder is served with a KV cache or not at all")
    return fuse(last_position(graph))


def evaluate(graph: Graph, inputs: Mapping[str, Array], sizes: Mapping[str, int]) -> list[Array]:
    """Run a small graph without variables on the CPU. `sizes`: values of symbols that occur in no input's shape. GraphError for a graph with
    variables or a missing input."""
    if graph.variables:
        raise GraphError("only graphs without variables can be evaluated")
    sized = _with_sizes(graph, sizes)
    program = compile_graph(sized, torch.device("cpu"), training=False)
    try:
        arguments = [torch.from_numpy(np.ascontiguousarray(inputs[name])) for name in program.inputs]
    except KeyError as missing:
        raise GraphError(f"no value for the input {missing}") from None
    with torch.no_grad():
        return [_array(value) for value in program.run(arguments, (), None)]


def _array(value: torch.Tensor) -> Array:
    # numpy has no bfloat16; float32 holds each of its numbers.
    array: Array = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return array


def _with_sizes(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """The graph with every symbol replaced by its size."""

    def fixed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(fixed(v) for v in value)
        return bind(value, sizes) if isinstance(value, Poly) else value

    def typed(type_: TensorType) -> TensorType:
        return TensorType(fixed(type_.shape), type_.dtype)

    return Graph(
        inputs=tuple(Input(i.name, typed(i.type)) for i in graph.inputs),
        variables=(),
        nodes=tuple(
            Node(n.name, n.op, fixed(n.args), tuple(typed(t) for t in n.results)) for n in graph.nodes
        ),
        outputs=graph.outputs,
        symbols=graph.symbols,
    )
