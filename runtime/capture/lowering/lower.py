"""An exported program as a Graph: every ATen operator under its name in the op-set, with every argument explicit.

What a Graph does not have goes here: aliases and copies (values are immutable), assertions, strings (operators of ours instead), size
arithmetic (dimensions become polynomials), nested regions (inlined), in-place operators on values of their own, and training dropout (an
operator of ours draws the mask).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fusion.dag.cutting.positional import COUNTER
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import Arg, DType, Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import OPSET, infer
from fusion.dag.ir.opset_spec import Parameter
from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture.exporting.model_code import line_of_node
from fusion.runtime.capture.lowering import complex_numbers
from fusion.runtime.capture.lowering.aten_names import (
    BROADCAST,
    NATIVE_DROPOUT,
    NORMS,
    arguments,
    identity,
    in_opset,
    is_check,
    is_size,
    op_name,
    out_of_place,
)
from fusion.runtime.capture.lowering.complex_numbers import Complex, in_real_arithmetic, is_complex
from fusion.runtime.capture.lowering.kept_values import keep_values
from fusion.runtime.capture.lowering.sizes import Sizes, dtype_name
from fusion.runtime.capture.lowering.slices import (
    SLICE,
    bounded_by_remainder,
    every_few_rows,
    slice_from_front,
)
from fusion.runtime.capture.lowering.triangles import is_count, triangle_window
from fusion.runtime.job.errors import CaptureError

Value = Ref | Complex | tuple[Ref | Complex, ...]

_MUTATIONS = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
NAN_REMEDY = "not a number (NaN), which has no place in a graph: divide by zero"
_REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
_OF_REMAINDER = "a slice ends or begins at a remainder of a size, and may be empty: use torch.where or a mask"


def lower(
    exported: ExportedProgram,
    inputs: tuple[str, ...],
    names: Mapping[str, str],
    constants: Mapping[str, torch.Tensor],
    symbols: Mapping[str, str],
    keeps: bool = False,
) -> Graph:
    """The graph of an exported program. CaptureError names what has no counterpart in the op-set.

    `inputs`: names of the user inputs, in order. `names`: variable name of each parameter and buffer of the exported module. `constants`: values,
    by export name, of small tensors that its code makes, and of tables that become nodes. `symbols`: the graph's name for each of torch's size
    symbols. `keeps`: whether values written to buffers are kept for the next run.
    """
    graph = _Lowering(names, symbols, keeps).run(exported, inputs, constants)
    _require_known_types(graph, exported)
    return graph


def _require_known_types(graph: Graph, exported: ExportedProgram) -> None:
    """CaptureError where the op-set cannot infer an operator's type for all free sizes: torch checks only the example."""
    cleaned = clean(graph)  # views in the form that a job has them
    lines = {node.name: line_of_node(node) for node in exported.graph.nodes}
    for node in cleaned.nodes:
        try:
            infer(node.op, node.args, cleaned.types)
        except GraphError as error:
            free = any(re.search(rf"\b{symbol}\b", str(error)) for symbol in graph.symbols)
            remedy = ": it has to hold for every size of the batch and the sequence" if free else ""
            raise CaptureError(f"{error}{lines.get(node.name, '')}{remedy}") from error


class _Lowering:
    """The state of one walk over the exported program."""

    def __init__(self, names: Mapping[str, str], symbols: Mapping[str, str], keeps: bool) -> None:
        self.names = names
        self.keeps = keeps
        self.kept: dict[str, Ref] = {}  # variable -> the value that the next run finds there
        self.sizes = Sizes(symbols)
        self.env: dict[fx.Node, Value] = {}
        self.nodes: list[Node] = []
        self.types: dict[Ref, TensorType] = {}
        self.taken: set[str] = set()
        self.viewed: set[Ref] = set()  # values that share memory with another
        self.trained: set[Ref] = set()  # values that depend on a trainable parameter
        # The node whose memory an alias shares; None: unknown. For in-place writes.
        self.owners: dict[fx.Node, fx.Node | None] = {}

    def run(
        self, exported: ExportedProgram, inputs: tuple[str, ...], constants: Mapping[str, torch.Tensor]
    ) -> Graph:
        placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
        specs = list(zip(placeholders, exported.graph_signature.input_specs, strict=True))
        users = [node for node, spec in specs if spec.kind is InputKind.USER_INPUT]
        self.taken.update(inputs)
        self.taken.update(self.names.values())
        graph_inputs = []
        for node, name in zip(users, inputs, strict=True):
            graph_inputs.append(Input(name, self.sizes.type_of(node.meta["val"])))
            self.bind(node, Ref(name), graph_inputs[-1].type)
        variables: dict[str, Variable] = {}
        for node, spec in specs:
            if spec.kind not in (InputKind.USER_INPUT, InputKind.TOKEN):  # a token orders side effects
                self.variable(node, spec, exported, constants, variables)
        self.region(exported.graph_module)
        outputs = self.outputs(exported)
        read = {ref.name for node in self.nodes for ref in node.refs()} | {ref.name for ref in outputs}
        read |= self.kept.keys()
        graph = Graph(
            inputs=tuple(graph_inputs),
            # Unread constants are dropped; unread parameters must still be in the exported weights.
            variables=tuple(
                v for v in variables.values() if v.name in read or not v.name.startswith("constant:")
            ),
            nodes=tuple(self.nodes),
            outputs=outputs,
            symbols=("batch", "sequence", *self.sizes.counted),
        )
        return keep_values(graph, self.kept)

    def variable(
        self,
        node: fx.Node,
        spec: InputSpec,
        exported: ExportedProgram,
        constants: Mapping[str, torch.Tensor],
        variables: dict[str, Variable],
    ) -> None:
        target = str(spec.target)
        if target in constants:
            value = constants[target]
            parts = (value.real, value.imag) if value.is_complex() else (value,)
            real, *imaginary = (self.constant(node.name, part) for part in parts)
            self.env[node] = Complex(real, *imaginary) if imaginary else real
            return
        if target not in self.names:
            raise CaptureError(f"the model reads {target}, which is neither a parameter nor a buffer")
        name = self.names[target]
        parameter = spec.kind is InputKind.PARAMETER
        try:
            type_ = self.sizes.type_of(node.meta["val"])
        except CaptureError as error:
            remedy = f": {complex_numbers.REMEDY}" if node.meta["val"].is_complex() else ""
            raise CaptureError(f"{'parameter' if parameter else 'buffer'} {name}: {error}{remedy}") from None
        if name not in variables:
            trainable = parameter and bool(exported.state_dict[target].requires_grad)
            exported_names = {t.removeprefix("module.") for t, n in self.names.items() if n == name}
            aliases = tuple(sorted(exported_names - {name, name.removeprefix("constant:")}))
            variables[name] = Variable(
                name, type_, "parameter" if parameter else "buffer", trainable, aliases
            )
            if trainable:
                self.trained.add(Ref(name))
        self.bind(node, Ref(name), type_)

    def constant(self, name: str, value: torch.Tensor) -> Ref:
        """A constant as nodes: a causal mask or a count of any size; a filled tensor where all elements are equal; else one tensor for each element,
        concatenated."""
        dtype = DType(dtype_name(value.dtype))
        shape = tuple(value.shape)
        window = triangle_window(value)
        if window is not None:
            table = (TensorType(shape, dtype.name),)
            (ones,) = self.emit(name, "aten.ones", (shape, dtype), table)
            (lower_triangle,) = self.emit(name, "aten.tril", (ones, 0), table)
            return (
                self.emit(name, "aten.triu", (lower_triangle, 1 - window), table)[0]
                if window < shape[-1]
                else lower_triangle
            )
        if is_count(value):
            row = (TensorType((value.numel(),), dtype.name),)
            [count] = self.emit(name, "aten.arange", (value.numel(), dtype), row)
            return self.emit(name, "aten.reshape", (count, shape), (TensorType(shape, dtype.name),))[0]
        numbers = value.flatten().tolist()
        if any(number != number for number in numbers):
            raise CaptureError(f"a constant of the model's code is {NAN_REMEDY}")
        if len(set(map(repr, numbers))) <= 1:
            fill = numbers[0] if numbers else 0
            return self.emit(name, "aten.full", (shape, fill, dtype), (TensorType(shape, dtype.name),))[0]
        scalar = (TensorType((1,), dtype.name),)
        pieces = tuple(self.emit(name, "aten.full", ((1,), n, dtype), scalar)[0] for n in numbers)
        row = (TensorType((len(pieces),), dtype.name),)
        joined = self.emit(name, "aten.cat", (pieces, 0), row)[0]
        return self.emit(name, "aten.reshape", (joined, shape), (TensorType(shape, dtype.name),))[0]

    def outputs(self, exported: ExportedProgram) -> tuple[Ref, ...]:
        (final,) = (n for n in exported.graph.nodes if n.op == "output")
        results: list[Ref] = []
        for spec, node in zip(exported.graph_signature.output_specs, final.args[0], strict=True):
            is_counter = str(spec.target).endswith(COUNTER)
            variable = self.names.get(str(spec.target))
            is_written = (
                variable is not None and isinstance(node, fx.Node) and self.env.get(node) == Ref(variable)
            )
            value = self.env.get(node) if isinstance(node, fx.Node) else None
            if spec.kind is OutputKind.USER_OUTPUT:
                if not isinstance(value, Ref):
                    raise CaptureError("the model returns something that is not a tensor")
                results.append(value)
            elif spec.kind in _MUTATIONS and not is_counter and not is_written:
                if (
                    self.keeps
                    and isinstance(value, Ref)
                    and variable is not None
                    and Ref(variable) not in self.trained
                ):
                    self.kept[variable] = value
                    continue
                name = str(spec.target).removeprefix("module.")
                raise CaptureError(
                    f"the model writes to {name} each time it runs, which a stage cannot keep{line_of_node(node)}: "
                    "leave the write out, or do it only where self.training is set, and to a buffer"
                )
        return tuple(results)

    def region(self, module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            if node.op != "call_function" or is_size(node):
                continue
            name = op_name(node.target)
            if name == "getitem":
                self.getitem(node)
            elif name in _REGIONS:
                self.inline(node, name, module)
            elif name == BROADCAST:
                self.broadcast(node)
            elif name == NATIVE_DROPOUT:
                self.dropout(node)
            elif name in NORMS:
                self.batch_norm(node, training=NORMS[name])
            elif not is_check(name):
                try:
                    self.call(node, name)
                except (CaptureError, GraphError) as error:
                    why = _OF_REMAINDER if bounded_by_remainder(node) else error
                    raise CaptureError(f"{why}{line_of_node(node)}") from error

    def getitem(self, node: fx.Node) -> None:
        """Bind one of the results of a call."""
        source, index = cast(tuple[fx.Node, int], node.args)
        value = self.env[source]
        self.env[node] = value[index] if isinstance(value, tuple) else value

    def broadcast(self, node: fx.Node) -> None:
        """Each tensor expanded to the common shape."""
        expanded = []
        for source, value in zip(cast(Any, node.args[0]), node.meta["val"], strict=True):
            ref, shape = self.env[source], self.sizes.type_of(value).shape
            if not isinstance(ref, Ref):
                raise CaptureError("the op-set has no complex numbers that are broadcast")
            args = (ref, shape)
            expanded.append(
                self.emit(node.name, "aten.expand", args, infer("aten.expand", args, self.types))[0]
            )
        self.viewed.update(expanded)
        self.env[node] = tuple(expanded)

    def dropout(self, node: fx.Node) -> None:
        """Undo the decomposition of dropout, which run_decompositions did along with others."""
        values = arguments(node)
        source = self.env[values["input"]]
        assert isinstance(source, Ref)
        if values["train"] is not False and values["p"] > 0:
            args = (source, float(values["p"]))
            (source,) = self.emit(node.name, "fusion.dropout", args, (self.types[source],))
        self.env[node] = (source,)  # no captured model reads the mask

    def batch_norm(self, node: fx.Node, *, training: bool) -> None:
        """Undo the decomposition of batch normalisation: the op-set's operator writes its statistics itself."""
        values = {**arguments(node), "training": training}
        args = tuple(self.argument("aten.batch_norm", p, values) for p in OPSET["aten.batch_norm"].parameters)
        output = self.emit(node.name, "aten.batch_norm", args, infer("aten.batch_norm", args, self.types))[0]
        statistics = [args[3], args[4]] if training else []
        self.env[node] = (output, output, output, *(ref for ref in statistics if isinstance(ref, Ref)))
        for user in node.users:
            index = user.args[1] if len(user.args) > 1 else None
            readers = [n for n in user.users if n.op != "output" and not _updates_statistic(n, user)]
            if index != 0 and readers:
                raise CaptureError(
                    f"the model reads the statistics of a batch normalisation while it runs{line_of_node(readers[0])}: "
                    "compute what is read of the values themselves"
                )

    def inline(self, node: fx.Node, name: str, module: fx.GraphModule) -> None:
        """Inline a region that runs without gradients, or with autocast off."""
        args = cast(tuple[Any, ...], node.args)
        index = next(i for i, a in enumerate(args) if isinstance(a, fx.Node) and a.op == "get_attr")
        inner = module.get_submodule(str(args[index].target))
        assert isinstance(inner, fx.GraphModule)
        if name == "wrap_with_autocast" and args[2]:
            raise CaptureError(
                f"the model switches autocast on inside its forward{_line_of_region(inner)}: leave it out, or cast there with .to(dtype)"
            )
        placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        for placeholder, arg in zip(placeholders, args[index + 1 :], strict=True):
            if isinstance(arg, fx.Node) and arg in self.env:
                self.env[placeholder] = self.env[arg]
                self.owners[placeholder] = self.owners.get(arg, arg)
        self.region(inner)
        (final,) = (n for n in inner.graph.nodes if n.op == "output")
        results = [self.env[n] for n in _nodes_of(final.args)]
        if name == "wrap_with_set_grad_enabled" and not args[0]:
            results = [self.detach(node.name, value) for value in results]
        assert not any(isinstance(value, tuple) for value in results)
        self.env[node] = tuple(results)  # type: ignore[arg-type]

    def detach(self, name: str, value: Value) -> Value:
        if isinstance(value, Complex):
            real, imaginary = (self.detach(name, part) for part in (value.real, value.imaginary))
            assert isinstance(real, Ref) and isinstance(imaginary, Ref)
            return Complex(real, imaginary)
        if not isinstance(value, Ref) or value not in self.trained:
            return value
        ref = self.emit(f"{name}_detach", "aten.detach", (value,), (self.types[value],))[0]
        self.trained.discard(ref)
        return ref

    def call(self, node: fx.Node, name: str) -> None:
        if not hasattr(node.target, "_schema"):  # a Python function, without a schema
            raise CaptureError(f"the op-set has no operator {name}, which the model calls")
        values = arguments(node)
        first: Any = next(iter(node.args), None)
        is_identity, same_memory = identity(name, node, values)
        if is_identity:
            self.env[node] = self.env[first]
            self.owners[node] = {True: self.owners.get(first, first), False: node, None: None}[same_memory]
            return
        in_place = name not in OPSET and out_of_place(name) in OPSET
        if in_place:
            if self.skip_batch_counter(node, first):
                return
            if is_complex(node):  # their aliases are not tracked
                raise CaptureError(f"the model writes in place, with {name}, to complex numbers")
            self.require_unshared(name, first)
            name = out_of_place(name)
            values[OPSET[name].parameters[0].name] = values["self"]  # the name in every in-place schema
        name, values = in_opset(name, node, values)
        if is_complex(node):
            self.env[node] = self.complex(node, name, values)
            if name in complex_numbers.VIEWS:
                real = (self.env[each] for each in (node, first))
                self.viewed.update(each for each in real if isinstance(each, Ref))
            return
        if name not in OPSET:
            raise CaptureError(f"the op-set has no operator {name}")
        refs = self.results(node, name, values, in_place=in_place)
        if OPSET[name].family == "view":
            self.viewed.update(refs)
            if isinstance(first, fx.Node) and isinstance(source := self.env[first], Ref):
                self.viewed.add(source)
        self.env[node] = refs if isinstance(node.meta["val"], (tuple, list)) else refs[0]
        if in_place:
            owner = self.owners.get(first, first)
            for other in [n for n in self.env if self.owners.get(n, n) is owner]:
                self.env[other] = refs[0]
            self.owners[node] = owner

    def results(
        self, node: fx.Node, name: str, values: Mapping[str, Any], *, in_place: bool
    ) -> tuple[Ref, ...]:
        """Emit the op and, for an in-place write, the cast to the dtype of the tensor written to. Types are those that torch inferred."""
        args = tuple(self.argument(name, p, values) for p in OPSET[name].parameters)
        value = node.meta["val"]
        types = tuple(
            self.sizes.type_of(v) for v in (value if isinstance(value, (tuple, list)) else (value,))
        )
        if name == SLICE:
            args = slice_from_front(args, types[0])
            if (rows := self.looked_up(node, args, types[0])) is not None:
                return rows
        if name == "aten.slice_scatter":
            self.require_whole_steps(args)
        # torch's fake tensors accept mixed dtypes that infer() refuses. A view keeps its dtype, and clean() may rewrite it.
        inferred = types if OPSET[name].family == "view" else infer(name, args, self.types)
        if (
            OPSET[name].loss
        ):  # in torch's second trace of a model with in-place writes, one of each sample has no dimensions
            types = inferred
        if in_place and inferred != types:
            # Written in the dtype of the old value: a higher one is rounded to it.
            uncast = self.emit(node.name, name, args, inferred)
            name, args = "aten.to.dtype", (uncast[0], DType(types[0].dtype))
        return self.emit(node.name, name, args, types)

    def looked_up(self, node: fx.Node, args: tuple[Arg, ...], result: TensorType) -> tuple[Ref, ...] | None:
        """A slice of every few rows of a free size that is no multiple of the step, as a lookup of those rows. None for any other slice."""
        rows = every_few_rows(args, result)
        if rows is None or self.has_type(SLICE, args):
            return None

        def emit(op: str, *args: Arg) -> Ref:
            return self.emit(node.name, op, args, infer(op, args, self.types))[0]

        count, start, step = rows
        numbers = emit("aten.mul.Tensor", emit("aten.arange", count, DType("int64")), step)
        if start:
            numbers = emit("aten.add.Tensor", numbers, start, 1)
        return (emit("aten.index_select", *args[:2], numbers),)

    def has_type(self, name: str, args: tuple[Arg, ...]) -> bool:
        """Whether the op-set can infer the call's type for all free sizes."""
        with suppress(GraphError):
            infer(name, args, self.types)
            return True
        return False

    def require_whole_steps(self, args: tuple[Arg, ...]) -> None:
        """CaptureError for a write to every few rows of a size that is no multiple of the step for every batch."""
        step = args[-1]
        if step != 1 and not self.has_type("aten.slice_scatter", args):
            raise CaptureError(
                f"the model writes to one row in {step} of a size that is free: take torch.where of a mask of the rows, "
                f"torch.arange(n) % {step} == 0"
            )

    def complex(self, node: fx.Node, name: str, values: Mapping[str, Any]) -> Value:
        """Emit a call with complex numbers in real arithmetic."""

        def as_parts(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return tuple(map(as_parts, value))
            if isinstance(value, complex):
                return Complex(value.real, value.imag)
            if isinstance(value, torch.dtype) and value.is_complex:
                return value
            pair = self.env.get(value) if isinstance(value, fx.Node) else None
            return pair if isinstance(pair, Complex) else self.convert(name, value)

        def emit(op: str, *args: Arg) -> Ref:
            return self.emit(node.name, op, args, infer(op, args, self.types))[0]

        parameters = {p.name for p in OPSET[name].parameters} if name in OPSET else set(values)
        result = in_real_arithmetic(
            name, {n: as_parts(v) for n, v in values.items() if n in parameters}, emit
        )
        return self.filled_parts(result, node.meta["val"], emit) if isinstance(result, Complex) else result

    def filled_parts(self, value: Complex, like: torch.Tensor, emit: Callable[..., Ref]) -> Complex:
        """Both parts as values of the full shape: one may be a number, or smaller than the other."""
        shape, dtype = tuple(map(self.sizes.dim, like.shape)), DType(dtype_name(like.dtype.to_real()))

        def filled(part: Ref | float) -> Ref:
            if not isinstance(part, Ref):
                return emit("aten.full", shape, float(part), dtype)
            return part if self.types[part].shape == shape else emit("aten.expand", part, shape)

        return Complex(filled(value.real), filled(value.imaginary))

    def skip_batch_counter(self, node: fx.Node, target: fx.Node) -> bool:
        """Drop the write that counts the batches a normalisation has seen. Whether the call was one."""
        value = self.env[target]
        if not isinstance(value, Ref) or not value.name.endswith(COUNTER):
            return False
        self.env[node] = value
        return True

    def require_unshared(self, name: str, target: fx.Node) -> None:
        """CaptureError unless an in-place write to `target` can be replaced by a new value."""
        owner, value = self.owners.get(target, target), self.env[target]
        if owner is None or owner.op == "placeholder" or value in self.viewed:
            raise CaptureError(
                f"the model writes in place, with {name}, to a value that others share: {target.name}"
            )

    def argument(self, op: str, parameter: Parameter, values: Mapping[str, Any]) -> Arg:
        if parameter.name not in values:
            raise CaptureError(f"{op}: torch has no parameter {parameter.name}")
        value = values[parameter.name]
        if parameter.type in ("ints", "dims") and isinstance(value, (int, torch.SymInt, fx.Node)):
            value = (value,)
        return self.convert(op, value)

    def convert(self, op: str, value: Any) -> Arg:
        if isinstance(value, fx.Node):
            if is_size(value):
                return self.convert(op, value.meta["val"])
            converted = self.env[value]
            if isinstance(converted, Complex):
                raise CaptureError(f"the op-set has no complex numbers, which the model gives to {op}")
            return converted if isinstance(converted, Ref) else cast(tuple[Ref, ...], converted)
        if isinstance(value, (list, tuple)):
            return tuple(self.convert(op, v) for v in value)
        if isinstance(value, torch.dtype):
            return DType(dtype_name(value))
        if isinstance(value, torch.SymInt):
            return self.sizes.dim(value)
        if isinstance(value, float) and value != value:
            raise CaptureError(f"{op}: a constant is {NAN_REMEDY}")
        if isinstance(value, torch.SymFloat | torch.SymBool):
            if not free_unbacked_symbols(value.node.expr):
                raise CaptureError(
                    f"{op}: a number that is made of a size that is free, by a division or float(), has no place in a graph: "
                    "make it a tensor, torch.ones_like(x[:, 0]).sum() for x.shape[0]"
                )
            raise CaptureError(
                f"{op}: a number that is taken out of a tensor (item, float) has no place in a graph: keep the tensor"
            )
        if value is None or type(value) in (bool, int, float):
            return value  # type: ignore[no-any-return]
        raise CaptureError(f"{op}: an argument of type {type(value).__name__} has no place in a graph")

    def bind(self, node: fx.Node, ref: Ref, type_: TensorType) -> None:
        self.env[node] = ref
        self.types[ref] = type_

    def emit(
        self, name: str, op: str, args: tuple[Arg, ...], types: tuple[TensorType, ...]
    ) -> tuple[Ref, ...]:
        unique, count = name, 1
        while unique in self.taken:
            unique, count = f"{name}_{count}", count + 1
        self.taken.add(unique)
        node = Node(unique, op, args, types)
        self.nodes.append(node)
        refs = tuple(Ref(unique, i) for i in range(len(types)))
        self.types.update(zip(refs, types, strict=True))
        if op != "aten.detach" and any(ref in self.trained for ref in node.refs()):
            self.trained.update(refs)
        return refs


def _updates_statistic(call: fx.Node, statistic: fx.Node) -> bool:
    """Whether the call is a batch normalisation that reads this statistic as its running statistic and nothing else."""
    if not NORMS.get(op_name(call.target), False):
        return False
    return [name for name, value in arguments(call).items() if value is statistic] in (
        ["running_mean"],
        ["running_var"],
    )


def _line_of_region(region: fx.GraphModule) -> str:
    """The line of the model's code of the region's first operator."""
    return next((line for node in region.graph.nodes if (line := line_of_node(node))), "")


def _nodes_of(args: Any) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.node.map_arg(args, nodes.append)
    return nodes
