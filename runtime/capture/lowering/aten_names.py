"""torch's operators and arguments under the op-set's names, without strings, devices and generators, which are not among the constants of
a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from fusion.dag.ir.opset import OPSET
from fusion.runtime.capture.lowering.complex_numbers import has_real_form

Values = dict[str, Any]  # argument values by the name of torch's parameter

# Operators that return their first argument; whether in the same memory (None: it depends).
_IDENTITIES: Mapping[str, bool | None] = {
    "aten.alias": True,
    "aten.detach_": True,
    "aten.contiguous": None,
    "aten.clone": False,
    "aten.lift_fresh_copy": False,
    "aten.lift_fresh": None,
    "aten.lift": None,
}
_DROPOUTS = ("aten.dropout", "aten.alpha_dropout", "aten.feature_dropout", "aten.feature_alpha_dropout")
BROADCAST = "aten.broadcast_tensors"  # several results: an operator for each
# The form of dropout after run_decompositions, which also returns the mask.
NATIVE_DROPOUT = "aten.native_dropout"
# The forms of batch normalisation after run_decompositions; whether it is the one of training.
NORMS: Mapping[str, bool] = {
    "aten._native_batch_norm_legit_functional": True,
    "aten._native_batch_norm_legit_no_training": False,
}
# In place, their overloads have other names: aten.pow.Scalar is a number to the power of a tensor.
_POWERS: Mapping[str, str] = {
    "aten.pow_.Scalar": "aten.pow.Tensor_Scalar",
    "aten.pow_.Tensor": "aten.pow.Tensor_Tensor",
}
_CHECKS = ("aten._assert", "aten.sym_", "aten._local_scalar_dense")


def op_name(target: Any) -> str:
    """The op-set's name for a torch operator, whether or not the op-set has it."""
    if not isinstance(target, torch._ops.OpOverload):
        return str(getattr(target, "__name__", target))
    packet = f"{target.namespace}.{target._opname}"
    return packet if target._overloadname == "default" else f"{packet}.{target._overloadname}"


def out_of_place(name: str) -> str:
    """aten.relu_ -> aten.relu, aten.add_.Tensor -> aten.add.Tensor; others unchanged."""
    if name in _POWERS:
        return _POWERS[name]
    parts = name.split(".")
    if parts[0] == "aten" and parts[1].endswith("_") and not parts[1].endswith("__"):
        parts[1] = parts[1][:-1]
    return ".".join(parts)


def is_size(node: fx.Node) -> bool:
    """Whether the node computes with sizes: its value becomes a dimension wherever it is used."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def is_check(name: str) -> bool:
    return name.startswith(_CHECKS)


def operators(exported: ExportedProgram) -> Iterator[fx.Node]:
    """The operator calls that must be in the op-set, including those in nested regions."""
    for module in exported.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if (
                node.op == "call_function"
                and isinstance(node.target, torch._ops.OpOverload)
                and not is_size(node)
            ):
                yield node


def uses_vmap(exported: ExportedProgram) -> bool:
    """Whether it calls torch.vmap, which an export leaves as it is."""
    return any(
        node.op == "call_function"
        and getattr(node.target, "__module__", "") == "torch._functorch.predispatch"
        for module in exported.graph_module.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    )


def writes_in_place(exported: ExportedProgram) -> bool:
    return any(node.target._schema.is_mutable for node in operators(exported))  # type: ignore[union-attr]


def detach_region_inputs(exported: ExportedProgram) -> None:
    """Let regions without gradients read their inputs through a detach: run_decompositions inlines a region without a trace of its mode."""
    parts = [part for part in exported.graph_module.modules() if isinstance(part, fx.GraphModule)]
    for outer, node in [(part, node) for part in parts for node in part.graph.nodes]:
        if op_name(node.target) != "wrap_with_set_grad_enabled" or node.args[0]:
            continue
        inner = outer.get_submodule(str(node.args[1].target))
        assert isinstance(inner, fx.GraphModule)
        inputs = [n for n in inner.graph.nodes if n.op == "placeholder"]
        with inner.graph.inserting_before(next(n for n in inner.graph.nodes if n.op != "placeholder")):
            for value in inputs:
                _detach(inner.graph, value)
        inner.recompile()


def _detach(graph: fx.Graph, value: fx.Node) -> None:
    """Let all nodes of the graph but its output read a detach of `value`, if that is a tensor."""
    readers = [user for user in value.users if user.op != "output"]
    if not readers or not isinstance(value.meta.get("val"), torch.Tensor):
        return
    detached = graph.call_function(torch.ops.aten.detach.default, (value,))
    detached.meta["val"] = value.meta["val"].detach()
    for user in readers:
        user.replace_input_with(value, detached)


def untracked_write(exported: ExportedProgram) -> fx.Node | None:
    """The first in-place write to a value that has a gradient, made without gradients or through an alias without one (detach, .data):
    the gradient goes on as if nothing had been written, which a graph cannot express. None if there is none."""
    trained = {
        node
        for node in exported.graph.nodes
        if (name := exported.graph_signature.inputs_to_parameters.get(node.name)) is not None
        and exported.state_dict[name].requires_grad
    }
    for node in exported.graph.nodes:
        region = op_name(node.target) == "wrap_with_set_grad_enabled" and not node.args[0]
        if region:
            inner = exported.graph_module.get_submodule(str(node.args[1].target))
            assert isinstance(inner, fx.GraphModule)
            calls: list[fx.Node] = list(inner.graph.nodes)
            inputs = [n for n in calls if n.op == "placeholder"]
            trained_inputs = {n for n, arg in zip(inputs, node.args[2:], strict=True) if arg in trained}
            for call in calls:
                if _is_write(call) and _base_of(call.args[0]) in trained_inputs:
                    return call
        elif _is_write(node) and _is_detached_alias(node.args[0]) and _base_of(node.args[0]) in trained:
            return node  # type: ignore[no-any-return]
        elif _is_differentiable(op_name(node.target)) and not trained.isdisjoint(node.all_input_nodes):
            trained.add(node)
            if _is_write(node):
                trained.add(_base_of(node.args[0]))
    return None


def _is_differentiable(name: str) -> bool:
    spec = OPSET.get(name)
    return name not in ("aten.empty_like", "aten.new_empty") and (spec is None or spec.differentiable)


def _is_write(call: fx.Node) -> bool:
    return isinstance(call.target, torch._ops.OpOverload) and call.target._schema.is_mutable


def _is_detached_alias(value: object) -> bool:
    """Whether the value is a view, or a view of a view, without a gradient, of a value that is also read otherwise."""
    detached = False
    while isinstance(value, fx.Node) and (_base_of(value) is not value or detached):
        detached = detached or op_name(value.target) == "aten.detach"
        source = value.args[0] if _base_of(value) is not value else None
        if not isinstance(source, fx.Node):
            break
        if detached and len(source.users) > 1:
            return True
        value = source
    return detached and isinstance(value, fx.Node) and value.op == "placeholder"


def _base_of(value: object) -> object:
    """The value that a view, or a view of a view, shares memory with."""
    while isinstance(value, fx.Node) and isinstance(value.target, torch._ops.OpOverload):
        returns = value.target._schema.returns
        if not returns or returns[0].alias_info is None:
            break
        value = value.args[0]
    return value


def supported(node: fx.Node) -> bool:
    """Whether the op-set can express the operator that `node` calls."""
    name = op_name(node.target)
    return (
        name in OPSET
        or name in (BROADCAST, NATIVE_DROPOUT)
        or name in NORMS
        or name in _IDENTITIES
        or (name.removesuffix("_") in _DROPOUTS and not _is_active_dropout(arguments(node)))
        or (name in _CONVERSIONS and not _is_unsupported_padding(name, node))
        or is_check(name)
        or has_real_form(node, name)
        or out_of_place(name) in OPSET
    )


def _is_unsupported_padding(name: str, node: fx.Node) -> bool:
    """Whether a convolution pads one side more, or aten.pad pads with anything but a constant."""
    if name.endswith("d.padding"):
        return any(total % 2 for total in _padding(arguments(node)))
    return name == "aten.pad" and arguments(node)["mode"] != "constant"


def arguments(node: fx.Node) -> Values:
    """Every argument of the call by its name in torch's schema, defaults filled in."""
    schema = node.target._schema  # type: ignore[union-attr]
    values = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    values.update(zip((a.name for a in schema.arguments), node.args, strict=False))
    values.update(node.kwargs)
    return values


def identity(name: str, node: fx.Node, values: Values) -> tuple[bool, bool | None]:
    """(whether the call returns the value of its first argument, if so whether in the same memory; None: it depends)."""
    if name in _IDENTITIES:
        return True, _IDENTITIES[name]
    if name in _CASTS:
        same = values["self"].meta["val"].dtype == node.meta["val"].dtype
        return same, not values.get("copy", name == "aten._to_copy")
    if name.removesuffix("_") in _DROPOUTS:
        return not _is_active_dropout(values), True
    return False, None


def _is_active_dropout(values: Values) -> bool:
    return bool(values["train"] and values["p"] > 0)


def in_opset(name: str, node: fx.Node, values: Values) -> tuple[str, Values]:
    """The op-set's operator and its arguments by name; unchanged if it has torch's operator."""
    convert = _CONVERSIONS.get(name)
    return convert(node, values) if convert is not None else (name, values)


def _cast(node: fx.Node, values: Values) -> tuple[str, Values]:
    return "aten.to.dtype", {"self": values["self"], "dtype": node.meta["val"].dtype}


def _empty(node: fx.Node, _: Values) -> tuple[str, Values]:
    """Zeros: what the code reads before it has written may be anything."""
    result = node.meta["val"]
    return "aten.zeros", {"size": tuple(result.shape), "dtype": result.dtype}


def _cat(node: fx.Node, values: Values) -> tuple[str, Values]:
    """Drops empty one-dimensional pieces, which torch ignores whatever the others' shape: code begins a cache with one."""

    def is_empty(piece: fx.Node) -> bool:
        value = piece.meta["val"]
        sizes = [size if isinstance(size, int) else None for size in value.shape]
        # A piece of another dtype may change the dtype of the result.
        return sizes == [0] and value.dtype == node.meta["val"].dtype

    pieces = [piece for piece in values["tensors"] if not is_empty(piece)]
    return "aten.cat", {**values, "tensors": pieces or values["tensors"]}


def _dropout(_: fx.Node, values: Values) -> tuple[str, Values]:
    return "fusion.dropout", {"self": values["input"], "p": float(values["p"])}


def _attention(_: fx.Node, values: Values) -> tuple[str, Values]:
    drops = values["dropout_p"] > 0
    return "fusion.dropout_attention" if drops else "aten.scaled_dot_product_attention", values


def _gelu(_: fx.Node, values: Values) -> tuple[str, Values]:
    return "fusion.gelu_tanh" if values["approximate"] == "tanh" else "aten.gelu", values


def _division(true_division: str) -> Callable[[fx.Node, Values], tuple[str, Values]]:
    ops = {"floor": "fusion.div_floor", "trunc": "fusion.div_trunc", None: true_division}
    return lambda _, values: (ops[values["rounding_mode"]], values)


def _pad(_: fx.Node, values: Values) -> tuple[str, Values]:
    return "aten.constant_pad_nd", {**values, "value": 0 if values["value"] is None else values["value"]}


def _upsample(node: fx.Node, values: Values) -> tuple[str, Values]:
    """The form with an output size; the scales still determine where the points lie."""
    scales = values["scale_factors"] or (None, None)
    size = tuple(node.meta["val"].shape[2:])
    name = op_name(node.target).removesuffix(".vec")
    return name, {
        **values,
        "self": values["input"],
        "output_size": size,
        "scales_h": scales[0],
        "scales_w": scales[1],
    }


def _convolution(node: fx.Node, values: Values) -> tuple[str, Values]:
    """padding "valid" and "same" as numbers, where both sides have the same."""
    return op_name(node.target).removesuffix(".padding"), {
        **values,
        "padding": tuple(total // 2 for total in _padding(values)),
    }


def _padding(values: Values) -> list[int]:
    """The padding of each dimension, both sides together."""
    window = values["weight"].meta["val"].shape[2:]
    dilation = tuple(values["dilation"])
    dilation = dilation * len(window) if len(dilation) == 1 else dilation
    return [d * (w - 1) if values["padding"] == "same" else 0 for d, w in zip(dilation, window, strict=True)]


def _with_names(op: str, **names: str) -> Callable[[fx.Node, Values], tuple[str, Values]]:
    return lambda _, values: (
        op,
        {**values, **{own: values[torch_name] for own, torch_name in names.items()}},
    )


def _subtraction(_: fx.Node, values: Values) -> tuple[str, Values]:
    """Subtraction; torch's decompositions also subtract a tensor from a number."""
    if isinstance(values["self"], fx.Node):
        return "aten.sub.Tensor", values
    return "aten.rsub.Scalar", {**values, "self": values["other"], "other": values["self"]}


def _matrix_transpose(_: fx.Node, values: Values) -> tuple[str, Values]:
    return "aten.transpose.int", {**values, "dim0": -2, "dim1": -1}


def _instance_norm(_: fx.Node, values: Values) -> tuple[str, Values]:
    """A group norm with a group for each channel; with fixed statistics, a batch norm. No operator updates running statistics for each sample."""
    if not values["use_input_stats"]:
        return "aten.batch_norm", {**values, "training": False}
    if values["running_mean"] is not None:
        return "aten.instance_norm, with running statistics", values
    return "aten.group_norm", {**values, "num_groups": values["input"].meta["val"].shape[1]}


def _movedim(_: fx.Node, values: Values) -> tuple[str, Values]:
    rank = values["self"].meta["val"].dim()
    source, target = (
        [dim % rank for dim in ((dims,) if isinstance(dims, int) else dims)]
        for dims in (values["source"], values["destination"])
    )
    rest = iter(dim for dim in range(rank) if dim not in source)
    order = tuple(source[target.index(dim)] if dim in target else next(rest) for dim in range(rank))
    return "aten.permute", {"self": values["self"], "dims": order}


def _reshape(node: fx.Node, values: Values) -> tuple[str, Values]:
    return "aten.reshape", {"self": values["self"], "shape": tuple(node.meta["val"].shape)}


_CASTS = frozenset({
    "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other", "aten._to_copy", "aten.type_as",
})  # fmt: skip
_CONVERSIONS: Mapping[str, Callable[[fx.Node, Values], tuple[str, Values]]] = {
    **dict.fromkeys(_CASTS, _cast),
    **dict.fromkeys(("aten.empty.memory_format", "aten.empty_like", "aten.new_empty"), _empty),
    "aten.cat": _cat,
    "aten.dropout": _dropout,
    "aten.scaled_dot_product_attention": _attention,
    "aten.gelu": _gelu,
    "aten.div.Tensor_mode": _division("aten.div.Tensor"),
    "aten.div.Scalar_mode": _division("aten.div.Scalar"),
    "aten.sub.Tensor": _subtraction,
    "aten.pad": _pad,
    **dict.fromkeys(("aten.mT", "aten.mH", "aten.adjoint", "aten.matrix_H"), _matrix_transpose),
    "aten.unsafe_split.Tensor": lambda _, values: ("aten.split.Tensor", values),
    **{f"aten.upsample_{kind}2d.vec": _upsample for kind in ("nearest", "bilinear")},
    **{f"aten.conv{n}d.padding": _convolution for n in (1, 2, 3)},
    "aten.instance_norm": _instance_norm,
    **dict.fromkeys(
        ("aten.movedim.int", "aten.movedim.intlist", "aten.moveaxis.int", "aten.moveaxis.intlist"), _movedim
    ),
    "aten.swapaxes": _with_names("aten.transpose.int", dim0="axis0", dim1="axis1"),
    "aten.swapdims": _with_names("aten.transpose.int"),
    "aten.reshape_as": _reshape,
    "aten.view_as": _reshape,
    "aten._unsafe_index.Tensor": lambda _, values: ("aten.index.Tensor", values),
    "aten._unsafe_index_put": lambda _, values: ("aten.index_put", values),
    # Not maximum or minimum, whose gradient is halved where both are equal.
    "aten.clamp_min.Tensor": lambda _, values: ("aten.clamp.Tensor", {**values, "max": None}),
    "aten.clamp_max.Tensor": lambda _, values: ("aten.clamp.Tensor", {**values, "min": None}),
}
