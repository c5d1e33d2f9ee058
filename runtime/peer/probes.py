"""Microbenchmarks: small graphs that measure how fast a plane runs operators on a device. Each has mostly one of the kinds of work of
`fusion.dag.placement.speeds`. Pure: the graphs, and the speeds that follow from their times.

A probe is run as a stage of a training job, by the plane that will run the stages, so the measurement includes all that a job gets:
kernels, compiled code and overheads. Forward passes only: a backward pass's work is computed from its operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from fusion.dag.cutting.costs import node_costs
from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.graph import Arg, Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import spec
from fusion.dag.ir.opset_spec import Required
from fusion.dag.placement.speeds import (
    ATTENTION,
    CALLS,
    CONVOLUTIONS,
    DRAWN,
    NODES,
    NORMED,
    PRODUCTS,
    STREAMED,
    TOUCHED,
    Rows,
    Speeds,
    demands,
)

X = Ref("x")  # the input of a probe, without a gradient
# Factor of all widths: for a CPU, and for a GPU, which a small product does not fill.
SMALL, LARGE = 1, 4
# One thread of a server's CPU, between an EPYC of 2023 and a Xeon with AVX-512, with PyTorch and caches that other work has filled.
TYPICAL = Speeds(
    product_flop=1.1e-11, attention_flop=1.8e-11, convolution_flop=2.2e-11, streamed_byte=1.8e-10, touched_byte=2e-10,
    normed_byte=6e-10, drawn_element=1.3e-8, convolution=1.2e-4, node=1.5e-5, updated_byte=9e-11,
)  # fmt: skip
# Over the probes (Gauss-Seidel): each gets the part of its time that the other kinds do not explain.
SWEEPS = 4
LEAST_SHARE = 0.2  # of a probe's time that counts for its own kind, whatever the others explain


@dataclass(frozen=True)
class Probe:
    """`kind`: the kind of work that it measures, as its index in `Speeds.seconds`. Weights are variables, as a stage's are: inputs are
    copied to the device each time."""

    kind: int
    graph: Graph

    @property
    def stage(self) -> Stage:
        return Stage(index=0, graph=self.graph, receives=(), sends=(), results=(0,))

    @cached_property
    def work(self) -> Rows:
        """The work of each kind, (KINDS,)."""
        forward, _ = demands(node_costs(self.graph, {}))
        total: Rows = forward.sum(axis=1)
        return total


@cache
def probes(scale: int = SMALL) -> tuple[Probe, ...]:
    """The probes, the most important ones first."""
    return (
        Probe(PRODUCTS, _products(256 * scale, 384 * scale)),
        Probe(NODES, _many_nodes()),
        Probe(STREAMED, _long_row(1024 * scale, 2048 * scale)),
        Probe(TOUCHED, _pointwise(256, 256 * scale)),
        Probe(ATTENTION, _attention(4 * scale, 256, 64)),
        Probe(NORMED, _norms(32 * scale, 64, 4)),
        Probe(DRAWN, _dropped(128, 256 * scale)),
        Probe(CALLS, _block(32 * scale, 192, 2)),
        Probe(CONVOLUTIONS, _convolutions(32 * scale, 64, 4)),
    )


def fitted(times: Sequence[tuple[Probe, float]]) -> Speeds:
    """The speeds that explain the times of some probes. Kinds that were not measured, updates among them, are TYPICAL's, scaled by the
    time of the first probe."""
    first, measured = times[0]
    pace = measured / float(first.work @ TYPICAL.seconds)
    seconds = TYPICAL.seconds * pace
    for probe, measured in tuple(times) * SWEEPS:
        work = probe.work
        others = float(work @ seconds) - work[probe.kind] * seconds[probe.kind]
        seconds[probe.kind] = max(measured - others, LEAST_SHARE * measured) / work[probe.kind]
    return Speeds.of((*map(float, seconds), TYPICAL.updated_byte * pace))


class _GraphBuilder:
    """A graph builder: float32, all sizes fixed."""

    def __init__(self, *shape: int) -> None:
        self._variables: list[Variable] = []
        self._nodes: list[Node] = []
        self._types: dict[Ref, TensorType] = {}
        self.x = X
        input_ = Input(X.name, TensorType(shape, "float32"))
        self._inputs = (input_,)
        self._types[X] = input_.type

    def weight(self, *shape: int) -> Ref:
        return self._variable(Variable(f"w{len(self._variables)}", TensorType(shape, "float32")))

    def buffer(self, *shape: int) -> Ref:
        type_ = TensorType(shape, "float32")
        return self._variable(Variable(f"b{len(self._variables)}", type_, kind="buffer", trainable=False))

    def _variable(self, variable: Variable) -> Ref:
        self._variables.append(variable)
        self._types[Ref(variable.name)] = variable.type
        return Ref(variable.name)

    def add(self, op: str, *args: Arg) -> Ref:
        """Add a node; missing arguments get their defaults."""
        operator, name = spec(op), f"n{len(self._nodes)}"
        defaults = (each.default for each in operator.parameters[len(args) :])
        args = (*args, *(value for value in defaults if not isinstance(value, Required)))
        results = tuple(operator.infer(operator.call(args, self._types)))
        self._nodes.append(Node(name, op, args, results))
        self._types.update({Ref(name, i): each for i, each in enumerate(results)})
        return Ref(name)

    def convolved(self, x: Ref, channels: int, into: int, window: int) -> Ref:
        """Convolve to images of the same size."""
        weight = self.weight(into, channels, window, window)
        return self.add("aten.conv2d", x, weight, None, (1, 1), (window // 2,) * 2)

    def batch_normed(self, x: Ref, channels: int) -> Ref:
        """Batch normalisation with the statistics of its input, as in training."""
        scale, shift = (self.weight(channels) for _ in range(2))
        mean, variance = (self.buffer(channels) for _ in range(2))
        return self.add("aten.batch_norm", x, scale, shift, mean, variance, True, 0.1, 1e-5)

    def graph(self, value: Ref) -> Graph:
        """The graph with the mean of a value as the loss."""
        loss = self.add("aten.mean", value)
        return Graph(self._inputs, tuple(self._variables), tuple(self._nodes), (loss,), symbols=())


def _many_nodes(count: int = 48) -> Graph:
    builder = _GraphBuilder(1, 16)
    x = builder.add("aten.mul.Tensor", builder.x, builder.weight(16))
    for _ in range(count):
        x = builder.add("aten.mul.Tensor", x, 1.01)
    return builder.graph(x)


def _pointwise(rows: int, width: int) -> Graph:
    """Elementwise operators, as around the products of a transformer block."""
    builder = _GraphBuilder(rows, width)
    x = builder.add("aten.mul.Tensor", builder.x, builder.weight(width))
    for _ in range(2):
        y = builder.add("fusion.gelu_tanh", x)
        x = builder.add("aten.add.Tensor", builder.add("aten.mul.Tensor", x, 0.5), y)
    return builder.graph(x)


def _norms(images: int, channels: int, side: int) -> Graph:
    """Norms over channels, which are strided in memory."""
    builder = _GraphBuilder(images, channels, side, side)
    x = builder.add("aten.mul.Tensor", builder.x, builder.weight(side))
    for _ in range(2):
        x = builder.batch_normed(x, channels)
    return builder.graph(x)


def _dropped(rows: int, width: int) -> Graph:
    builder = _GraphBuilder(rows, width)
    x = builder.add("aten.mul.Tensor", builder.x, builder.weight(width))
    return builder.graph(builder.add("fusion.dropout", x, 0.1))


def _long_row(width: int, outputs: int) -> Graph:
    """One row through a matrix that no cache near the core holds."""
    builder = _GraphBuilder(1, width)
    x = builder.add("aten.mul.Tensor", builder.x, builder.weight(width))
    return builder.graph(builder.add("aten.linear", x, builder.weight(outputs, width)))


def _products(rows: int, width: int) -> Graph:
    builder = _GraphBuilder(rows, width)
    x = builder.x
    for _ in range(3):
        x = builder.add("aten.linear", x, builder.weight(width, width))
    return builder.graph(x)


def _attention(heads: int, positions: int, width: int) -> Graph:
    builder = _GraphBuilder(1, heads, positions, width)
    x = builder.add("aten.mul.Tensor", builder.x, builder.weight(width))
    args = (x, x, x, None, 0.0, True)
    return builder.graph(builder.add("aten.scaled_dot_product_attention", *args))


def _convolutions(images: int, channels: int, side: int) -> Graph:
    builder = _GraphBuilder(images, channels, side, side)
    x = builder.x
    for window in (1, 3, 1):
        x = builder.convolved(x, channels, channels, window)
    return builder.graph(x)


def _block(images: int, channels: int, side: int) -> Graph:
    """The first half of a ResNet's bottleneck block (arXiv 1512.03385): between two convolutions other operators run, so that neither
    finds its code in a cache."""
    builder = _GraphBuilder(images, channels, side, side)
    x, hidden = builder.x, channels // 4
    for width, window in ((channels, 1), (hidden, 3)):
        x = builder.add(
            "aten.relu", builder.batch_normed(builder.convolved(x, width, hidden, window), hidden)
        )
    return builder.graph(x)
