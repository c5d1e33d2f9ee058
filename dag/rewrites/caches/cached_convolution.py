"""Give short causal convolutions along the sequence a cache: a depthwise one becomes `fusion.cached_convolution`, which keeps its
input of every position, as attention keeps its keys.

The pattern is zero padding and a slice of the result back to the sequence's length. Anything else stays, and is refused later,
as it mixes positions.
"""

from __future__ import annotations

from dataclasses import replace

from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Arg, Graph, Node, Ref, TensorType
from fusion.dag.ir.opset import infer, next_slot
from fusion.dag.rewrites.positions import SEQUENCE

CONVOLUTION = "aten.conv1d"


def cache_convolutions(graph: Graph) -> Graph:
    """The graph with cached convolutions, in slots after those in use."""
    types = dict(graph.types)
    slot = next_slot(graph)
    nodes: list[Node] = []
    for node in graph.nodes:
        convolution = _causal(graph, node)
        if convolution is None:
            nodes.append(node)
            continue
        nodes.extend(_cached(node, convolution, slot, types))
        slot += 1
    return replace(graph, nodes=tuple(nodes))


def _causal(graph: Graph, cut: Node) -> Node | None:
    """The causal depthwise convolution whose padded result `cut` slices to the length of its input; else None."""
    if cut.op != "aten.slice.Tensor" or not isinstance(cut.args[0], Ref):
        return None
    index = graph.node_index.get(cut.args[0].name)
    node = None if index is None else graph.nodes[index]
    if node is None or node.op != CONVOLUTION:
        return None
    x, w = (graph.types[ref] for ref in node.args[:2] if isinstance(ref, Ref))
    _, dim, start, _, step = cut.args
    length = symbol(SEQUENCE)
    if dim not in (2, -1) or start not in (0, None) or step != 1 or cut.results[0].shape != x.shape:
        return None
    if (
        len(x.shape) != 3
        or x.shape[2] != length
        or not isinstance(x.shape[1], int)
        or not isinstance(w.shape[2], int)
    ):
        return None
    stride, padding, dilation, groups = node.args[3:]
    # The padding is symmetric; the slice drops what the zeros at the end produce.
    depthwise = w.shape[:2] == (x.shape[1], 1) and groups == x.shape[1]
    if not depthwise or (stride, padding, dilation) != ((1,), (w.shape[2] - 1,), (1,)):
        return None
    return node


def _cached(cut: Node, convolution: Node, slot: int, types: dict[Ref, TensorType]) -> list[Node]:
    """Nodes that compute what `cut` did, (batch, channels, sequence), under its name."""
    emitted: list[Node] = []

    def emit(name: str, op: str, *args: Arg) -> Ref:
        emitted.append(Node(name, op, args, infer(op, args, types)))
        types[Ref(name)] = emitted[-1].results[0]
        return Ref(name)

    x, weight, bias = convolution.args[:3]
    rows = emit(f"{cut.name}:rows", "aten.transpose.int", x, 1, 2)
    with_head = emit(f"{cut.name}:headed", "aten.unsqueeze", rows, 1)
    convolved = emit(f"{cut.name}:sums", "fusion.cached_convolution", with_head, weight, bias, slot)
    without_head = emit(f"{cut.name}:flat", "aten.squeeze.dim", convolved, 1)
    emit(cut.name, "aten.transpose.int", without_head, 1, 2)
    return emitted
