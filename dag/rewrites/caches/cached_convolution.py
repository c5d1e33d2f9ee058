"""Give short convolutions along the sequence a memory: one that sees only a few positions back, channel by channel, becomes
`fusion.cached_convolution`, which keeps what it has seen of every position, as attention keeps its keys.

Only for what is plainly causal: zeros in front of the sequence, and the result cut back to its length. Anything else stays, and
is refused for what it mixes.
"""

from __future__ import annotations

from dataclasses import replace

from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Arg, Graph, Node, Ref, TensorType
from fusion.dag.ir.opset import infer, next_slot
from fusion.dag.rewrites.positions import SEQUENCE

CONVOLUTION = "aten.conv1d"


def cache_convolutions(graph: Graph) -> Graph:
    """The graph for a piece of a sequence, as far as convolutions go. Slots go on from those that are taken."""
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
    """The convolution whose result `cut` cuts back to the positions that its input has, where it sees none that follow."""
    if cut.op != "aten.slice.Tensor" or not isinstance(cut.args[0], Ref):
        return None
    at = graph.node_index.get(cut.args[0].name)
    node = None if at is None else graph.nodes[at]
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
    # As many zeros are put behind as in front; what they make is what the cut takes away.
    alone = w.shape[:2] == (x.shape[1], 1) and groups == x.shape[1]
    if not alone or (stride, padding, dilation) != ((1,), (w.shape[2] - 1,), (1,)):
        return None
    return node


def _cached(cut: Node, convolution: Node, slot: int, types: dict[Ref, TensorType]) -> list[Node]:
    """Nodes that give what `cut` gave, under its name: (batch, channels, sequence)."""
    made: list[Node] = []

    def emit(name: str, op: str, *args: Arg) -> Ref:
        made.append(Node(name, op, args, infer(op, args, types)))
        types[Ref(name)] = made[-1].results[0]
        return Ref(name)

    x, weight, bias = convolution.args[:3]
    rows = emit(f"{cut.name}:rows", "aten.transpose.int", x, 1, 2)
    headed = emit(f"{cut.name}:headed", "aten.unsqueeze", rows, 1)
    sums = emit(f"{cut.name}:sums", "fusion.cached_convolution", headed, weight, bias, slot)
    flat = emit(f"{cut.name}:flat", "aten.squeeze.dim", sums, 1)
    emit(cut.name, "aten.transpose.int", flat, 1, 2)
    return made
