"""Compiles a graph to one Python function: each node becomes a call of an operator from our table.

`torch.fx` generates the function's source from names and constants, both of which are ours: every identifier is v<number>, values are
found by position and never by name, and a constant is a number, a boolean, None, a dtype, a device or a list of them, of exactly these
types. No text from the wire reaches the source.
"""

from __future__ import annotations

import linecache
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from fusion.dag.cutting.mode import computed, in_mode
from fusion.dag.ir.dims import Poly
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import Arg, DType, Graph, Node, Ref
from fusion.dag.ir.opset import spec
from fusion.dag.ir.opset_pointwise import KEEP
from fusion.runtime.planes.batch_invariant import VECTORISED, in_full_vectors, with_contiguous_rows
from fusion.runtime.planes.input_sizes import TORCH_DTYPES, InputSizes, polynomials
from fusion.runtime.planes.kernels.in_range import in_range
from fusion.runtime.planes.preemption import preemption_point
from fusion.runtime.planes.products.fused_rows import Fused
from fusion.runtime.planes.products.in_float32 import in_supported_dtype
from fusion.runtime.planes.sequences import last_position
from fusion.runtime.planes.torch_ops import STATEFUL, returns_several, torch_call

# Between preemption points of a run without gradients: each costs half a microsecond. CUDA has none: kernels are queued in a moment,
# and may be captured as a graph.
NODES_PER_PREEMPTION = 8

Tensors = tuple[torch.Tensor, ...]


class Program:
    """A compiled graph. `inputs` and `variables`: the names, in order, of the tensors that `run` takes. `stateful`: the names, by number,
    of the nodes that use the state of the run (dropout masks, a cache). `updated`: the variables that a run in training has new values of,
    which follow the outputs."""

    def __init__(
        self,
        graph: Graph,
        function: Callable[..., Tensors],
        dimensions: Sequence[Poly],
        stateful: Sequence[str],
        updated: Sequence[str],
        source: str,
        passed: Collection[str],
    ) -> None:
        self.graph = graph
        self.inputs = tuple(i.name for i in graph.inputs)
        self.variables = tuple(v.name for v in graph.variables)
        self.stateful = tuple(stateful)
        self.updated = tuple(updated)
        self.source = source
        self._function = function
        self.sizes = InputSizes(graph, dimensions, passed)

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        variables: Sequence[torch.Tensor],
        state: object,
        passed: Mapping[str, int] = MappingProxyType({}),
    ) -> Tensors:
        """The outputs in order, then the new values of updated variables. `passed`: the sizes of the symbols that it was compiled with as
        `passed`. Raises ValueError for an input whose shape or dtype differs from the graph's."""
        return self._function(*inputs, *variables, *self.sizes.dimensions(inputs, passed), state)


def compile_graph(
    graph: Graph,
    device: torch.device,
    *,
    training: bool,
    products: Mapping[str, Callable[..., torch.Tensor]] | None = None,
    last: frozenset[str] = frozenset(),
    fused: Mapping[str, Fused] | None = None,
    passed: Collection[str] = (),
    library_half: bool = True,
) -> Program:
    """Generate the code of `graph` for `device`; without `training`, dropout is off and running statistics are used. `products`: functions
    that compute these nodes in place of their operators; `last`: nodes that keep the last position of each sequence of a run
    (`fusion.runtime.planes.sequences`); `fused`: calls that compute a node and nodes before it; `passed`: symbols whose sizes are passed
    to each run, as the inputs may not determine them; `library_half`: products in half precision have the bits of the library's, even where
    those are slow.

    GraphError names what cannot become code. The graph is assumed to have passed `fusion.dag.ir.serialise.validate`; one that has not may
    fail later, but still cannot place text in the source.
    """
    return _Writer(graph, device, training, products or {}, last, fused or {}, library_half).write(passed)


class _Writer:
    def __init__(
        self,
        graph: Graph,
        device: torch.device,
        training: bool,
        products: Mapping[str, Callable[..., torch.Tensor]],
        last: frozenset[str],
        fused: Mapping[str, Fused],
        library_half: bool,
    ) -> None:
        self.products = products
        self.last = last
        self.fused = fused
        self.replaced = frozenset[str]().union(*(each.replaces for each in fused.values()))
        cpu = device.type == "cpu"
        self.in_float32 = cpu and not library_half
        self.batch_invariant = not training and cpu  # a position has the same bits in any batch
        self.nodes_per_preemption = 1 if training else NODES_PER_PREEMPTION if cpu else 0  # nodes; 0: nowhere
        self.graph = graph
        self.device = device
        self.training = training
        self.code = fx.Graph()
        self.count = 0
        self.values: dict[Ref, fx.Node] = {}
        self.dimensions: dict[Poly, fx.Node] = {}
        self.stateful: list[str] = []

    def write(self, passed: Collection[str]) -> Program:
        graph = self.graph
        for name in (*(i.name for i in graph.inputs), *(v.name for v in graph.variables)):
            self.values[Ref(name)] = self.placeholder()
        for node in graph.nodes:
            for dim in polynomials(node.args):
                if dim not in self.dimensions:
                    self.dimensions[dim] = self.placeholder()
        state = self.placeholder()
        needed = computed(graph, training=self.training) - self.replaced
        for number, node in enumerate(graph.nodes, 1):
            if node.name not in needed:
                continue
            fused = self.fused.get(node.name)
            op, node_args = in_mode(node, training=self.training)
            args = tuple(self.value(a) for a in (node_args if fused is None else fused.args))
            if fused is not None:
                output = self.call(fused.function, args, {})
            else:
                output = self.call_node(node.name, op, args, state)
            self.results(node, op, output)
            if self.nodes_per_preemption and number % self.nodes_per_preemption == 0:
                self.call(preemption_point, (output,), {})
        update_nodes = [node for node in graph.nodes if node.op == KEEP and self.training]
        outputs = (*graph.outputs, *(Ref(node.name) for node in update_nodes))
        self.code.output(tuple(self.find(ref) for ref in outputs))
        module = fx.GraphModule(nn.Module(), self.code)
        _forget_source(module)
        updated = [next(node.refs()).name for node in update_nodes]
        return Program(
            graph, module.forward, tuple(self.dimensions), self.stateful, updated, module.code, passed
        )

    def call_node(self, name: str, op: str, args: tuple[Any, ...], state: fx.Node) -> fx.Node:
        """The call that computes the node `name`."""
        if name in self.last:
            return self.call(last_position, (*args[:2], state), {})
        if name in self.products:
            return self.call(self.products[name], args, {})
        if op in STATEFUL:
            stateful = self.in_supported_dtype(name, op, STATEFUL[op])
            return self.call(stateful, (*args, state, *self.number(op, name)), {})
        try:
            target, positional, keywords = torch_call(op, args, self.device)
        except KeyError:
            raise GraphError(f"unknown op {op!r:.100}") from None
        if self.device.type == "cuda":
            target = in_range(op, target)
        target = self.in_supported_dtype(name, op, target)
        if self.batch_invariant and op in VECTORISED:
            target = in_full_vectors(target)
        elif self.batch_invariant and spec(op).family == "reduction":
            target = with_contiguous_rows(target)
        return self.call(target, positional, keywords)

    def in_supported_dtype(self, name: str, op: str, target: Callable[..., Any]) -> Callable[..., Any]:
        """The call of the node `name` in a dtype that the device has instructions for."""
        # Operands do not tell: scales of quantised matrices may be in half precision where nothing else is.
        dtype = TORCH_DTYPES[self.graph.types[Ref(name)].dtype]
        return in_supported_dtype(op, target, dtype) if self.in_float32 else target

    def number(self, op: str, name: str) -> tuple[int, ...]:
        if spec(op).keeps:
            return ()  # its slot is an argument
        self.stateful.append(name)
        return (len(self.stateful) - 1,)

    def name(self) -> str:
        self.count += 1
        return f"v{self.count - 1}"

    def placeholder(self) -> fx.Node:
        name = self.name()
        return self.code.create_node("placeholder", name, name=name)

    def call(self, target: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> fx.Node:
        return self.code.create_node("call_function", target, args, keywords, name=self.name())

    def results(self, node: Node, op: str, output: fx.Node) -> None:
        several = returns_several(op)
        for i in range(len(node.results)):
            self.values[Ref(node.name, i)] = (
                self.call(operator.getitem, (output, i), {}) if several else output
            )

    def find(self, ref: Ref) -> fx.Node:
        try:
            return self.values[ref]
        except KeyError:
            raise GraphError("a node or an output reads a value that is not defined before it") from None

    def value(self, arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return self.find(arg)
        if isinstance(arg, Poly):
            return self.dimensions[arg]
        if isinstance(arg, DType):
            if arg.name not in TORCH_DTYPES:
                raise GraphError("an argument is a dtype that does not exist")
            return TORCH_DTYPES[arg.name]
        if type(arg) is tuple:
            return [self.value(a) for a in arg]
        if arg is None or type(arg) in (bool, int, float):
            return arg
        raise GraphError(f"an argument of type {type(arg).__name__} has no place in a graph")


def _forget_source(module: fx.GraphModule) -> None:
    """`torch.fx` keeps the source of every function for tracebacks, as long as the process runs."""
    name = module.forward.__code__.co_filename
    linecache.cache.pop(name, None)
    getattr(getattr(fx.graph_module, "_loader", None), "eval_cache", {}).pop(name, None)
