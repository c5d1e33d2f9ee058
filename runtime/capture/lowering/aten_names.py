"""Names of torch operators in the op-set, and how to say there what torch says with strings, devices and generators,
which are not among the constants of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from fusion.dag.ir.opset import OPSET
from fusion.runtime.capture.lowering.complex_numbers import is_said_in_real_numbers

Values = dict[str, Any]  # argument values by the name of torch's parameter

# Operators that pass their first argument on: (name, whether the result is the same memory; None: it depends).
_PASSED_ON: Mapping[str, bool | None] = {
    "aten.alias": True,
    "aten.detach_": True,
    "aten.contiguous": None,
    "aten.clone": False,
    "aten.lift_fresh_copy": False,
    "aten.lift_fresh": None,
    "aten.lift": None,
}
_DROPOUTS = ("aten.dropout", "aten.alpha_dropout", "aten.feature_dropout", "aten.feature_alpha_dropout")
BROADCAST = "aten.broadcast_tensors"  # which gives several: an operator each
# What torch makes of dropout where it takes others apart: with the mask.
DROPOUT_APART = "aten.native_dropout"
# What torch makes of batch normalisation where it takes others apart: whether it is the one of training.
NORMS: Mapping[str, bool] = {
    "aten._native_batch_norm_legit_functional": True,
    "aten._native_batch_norm_legit_no_training": False,
}
# Their overloads are named otherwise: aten.pow.Scalar is a number to the power of a tensor.
_POWERS: Mapping[str, str] = {
    "aten.pow_.Scalar": "aten.pow.Tensor_Scalar",
    "aten.pow_.Tensor": "aten.pow.Tensor_Tensor",
}
_DROPPED = ("aten._assert", "aten.sym_", "aten._local_scalar_dense")


def op_name(target: Any) -> str:
    """The op-set's name for a torch operator, whether or not it has it."""
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


def is_dropped(name: str) -> bool:
    return name.startswith(_DROPPED)


def operators(exported: ExportedProgram) -> Iterator[fx.Node]:
    """The calls of operators that must be in the op-set, those in nested regions included."""
    for module in exported.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if (
                node.op == "call_function"
                and isinstance(node.target, torch._ops.OpOverload)
                and not is_size(node)
            ):
                yield node


def uses_vmap(exported: ExportedProgram) -> bool:
    """Whether it has calls of torch.vmap, which an export leaves as they are."""
    return any(
        node.op == "call_function"
        and getattr(node.target, "__module__", "") == "torch._functorch.predispatch"
        for module in exported.graph_module.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    )


def writes_in_place(exported: ExportedProgram) -> bool:
    return any(node.target._schema.is_mutable for node in operators(exported))  # type: ignore[union-attr]


def detach_what_regions_read(exported: ExportedProgram) -> None:
    """What runs without gradients reads what it is given behind a detach: torch forgets what such a region was as soon as it takes
    operators apart."""
    parts = [part for part in exported.graph_module.modules() if isinstance(part, fx.GraphModule)]
    for around, node in [(part, node) for part in parts for node in part.graph.nodes]:
        if op_name(node.target) != "wrap_with_set_grad_enabled" or node.args[0]:
            continue
        inner = around.get_submodule(str(node.args[1].target))
        assert isinstance(inner, fx.GraphModule)
        given = [n for n in inner.graph.nodes if n.op == "placeholder"]
        with inner.graph.inserting_before(next(n for n in inner.graph.nodes if n.op != "placeholder")):
            for each in given:
                _detach(inner.graph, each)
        inner.recompile()


def _detach(graph: fx.Graph, given: fx.Node) -> None:
    """All of the graph but its output reads a detach of `given`, where that is a tensor."""
    readers = [user for user in given.users if user.op != "output"]
    if not readers or not isinstance(given.meta.get("val"), torch.Tensor):
        return
    apart = graph.call_function(torch.ops.aten.detach.default, (given,))
    apart.meta["val"] = given.meta["val"].detach()
    for user in readers:
        user.replace_input_with(given, apart)


def unseen_write(exported: ExportedProgram) -> fx.Node | None:
    """The first call that writes, where no gradient is taken or by a name without one (detach, .data), to a value that has one: its gradient
    goes on as if nothing had been written, which no value of a graph can say."""
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
            given = [n for n in calls if n.op == "placeholder"]
            known = {n for n, arg in zip(given, node.args[2:], strict=True) if arg in trained}
            for call in calls:
                if _writes(call) and _memory_of(call.args[0]) in known:
                    return call
        elif _writes(node) and _detached(node.args[0]) and _memory_of(node.args[0]) in trained:
            return node  # type: ignore[no-any-return]
        elif _passes_gradients(op_name(node.target)) and not trained.isdisjoint(node.all_input_nodes):
            trained.add(node)
            if _writes(node):
                trained.add(_memory_of(node.args[0]))
    return None


def _passes_gradients(name: str) -> bool:
    known = OPSET.get(name)
    return name not in ("aten.empty_like", "aten.new_empty") and (known is None or known.differentiable)


def _writes(call: fx.Node) -> bool:
    return isinstance(call.target, torch._ops.OpOverload) and call.target._schema.is_mutable


def _detached(value: object) -> bool:
    """Whether it is a view, or a view of one, that no gradient comes to, of what is read otherwise as well."""
    detached = False
    while isinstance(value, fx.Node) and (_memory_of(value) is not value or detached):
        detached = detached or op_name(value.target) == "aten.detach"
        above = value.args[0] if _memory_of(value) is not value else None
        if not isinstance(above, fx.Node):
            break
        if detached and len(above.users) > 1:
            return True
        value = above
    return detached and isinstance(value, fx.Node) and value.op == "placeholder"


def _memory_of(value: object) -> object:
    """What a view, or a view of one, is of."""
    while isinstance(value, fx.Node) and isinstance(value.target, torch._ops.OpOverload):
        returns = value.target._schema.returns
        if not returns or returns[0].alias_info is None:
            break
        value = value.args[0]
    return value


def supported(node: fx.Node) -> bool:
    """Whether there is a spelling for the operator that `node` calls."""
    name = op_name(node.target)
    return (
        name in OPSET
        or name in (BROADCAST, DROPOUT_APART)
        or name in NORMS
        or name in _PASSED_ON
        or (name.removesuffix("_") in _DROPOUTS and not _drops(arguments(node)))
        or (name in _RESPELT and not _lopsided(name, node))
        or is_dropped(name)
        or is_said_in_real_numbers(node, name)
        or out_of_place(name) in OPSET
    )


def _lopsided(name: str, node: fx.Node) -> bool:
    """Whether what is padded is not padded with numbers, or with more on one side than a convolution can say."""
    if name.endswith("d.padding"):
        return any(each % 2 for each in _padding(arguments(node)))
    return name == "aten.pad" and arguments(node)["mode"] != "constant"


def arguments(node: fx.Node) -> Values:
    """Every argument of the call by its name in torch's schema, defaults filled in."""
    schema = node.target._schema  # type: ignore[union-attr]
    values = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    values.update(zip((a.name for a in schema.arguments), node.args, strict=False))
    values.update(node.kwargs)
    return values


def passed_on(name: str, node: fx.Node, values: Values) -> tuple[bool, bool | None]:
    """Whether the call gives the value of its first argument, and if so whether in the same memory (None: perhaps)."""
    if name in _PASSED_ON:
        return True, _PASSED_ON[name]
    if name in _CASTS:
        same = values["self"].meta["val"].dtype == node.meta["val"].dtype
        return same, not values.get("copy", name == "aten._to_copy")
    if name.removesuffix("_") in _DROPOUTS:
        return not _drops(values), True
    return False, None


def _drops(values: Values) -> bool:
    return bool(values["train"] and values["p"] > 0)


def respell(name: str, node: fx.Node, values: Values) -> tuple[str, Values]:
    """The op-set's operator and its arguments by name; unchanged where torch's will do."""
    found = _RESPELT.get(name)
    return found(node, values) if found is not None else (name, values)


def _cast(node: fx.Node, values: Values) -> tuple[str, Values]:
    return "aten.to.dtype", {"self": values["self"], "dtype": node.meta["val"].dtype}


def _empty(node: fx.Node, _: Values) -> tuple[str, Values]:
    """What code fills in afterwards may hold anything before."""
    made = node.meta["val"]
    return "aten.zeros", {"size": tuple(made.shape), "dtype": made.dtype}


def _cat(node: fx.Node, values: Values) -> tuple[str, Values]:
    """Without the pieces of one dimension that have nothing, which torch passes over whatever shape the others have: so code begins a
    cache."""

    def has_nothing(piece: fx.Node) -> bool:
        value = piece.meta["val"]
        sizes = [size if isinstance(size, int) else None for size in value.shape]
        # One of another dtype may change that of the result.
        return sizes == [0] and value.dtype == node.meta["val"].dtype

    pieces = [piece for piece in values["tensors"] if not has_nothing(piece)]
    return "aten.cat", {**values, "tensors": pieces or values["tensors"]}


def _dropout(_: fx.Node, values: Values) -> tuple[str, Values]:
    return "fusion.dropout", {"self": values["input"], "p": float(values["p"])}


def _attention(_: fx.Node, values: Values) -> tuple[str, Values]:
    drops = values["dropout_p"] > 0
    return "fusion.dropout_attention" if drops else "aten.scaled_dot_product_attention", values


def _gelu(_: fx.Node, values: Values) -> tuple[str, Values]:
    return "fusion.gelu_tanh" if values["approximate"] == "tanh" else "aten.gelu", values


def _division(plain: str) -> Callable[[fx.Node, Values], tuple[str, Values]]:
    ops = {"floor": "fusion.div_floor", "trunc": "fusion.div_trunc", None: plain}
    return lambda _, values: (ops[values["rounding_mode"]], values)


def _pad(_: fx.Node, values: Values) -> tuple[str, Values]:
    return "aten.constant_pad_nd", {**values, "value": 0 if values["value"] is None else values["value"]}


def _upsampled(node: fx.Node, values: Values) -> tuple[str, Values]:
    """The form that says the size; the scale says besides where the points lie."""
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


def _padded(node: fx.Node, values: Values) -> tuple[str, Values]:
    """padding "valid" and "same", in numbers, where it is as much on both sides."""
    return op_name(node.target).removesuffix(".padding"), {
        **values,
        "padding": tuple(each // 2 for each in _padding(values)),
    }


def _padding(values: Values) -> list[int]:
    """On both sides together, of each dimension."""
    window = values["weight"].meta["val"].shape[2:]
    dilation = tuple(values["dilation"])
    dilation = dilation * len(window) if len(dilation) == 1 else dilation
    return [d * (w - 1) if values["padding"] == "same" else 0 for d, w in zip(dilation, window, strict=True)]


def _renamed(op: str, **renamed: str) -> Callable[[fx.Node, Values], tuple[str, Values]]:
    return lambda _, values: (op, {**values, **{ours: values[theirs] for ours, theirs in renamed.items()}})


def _difference(_: fx.Node, values: Values) -> tuple[str, Values]:
    """Also of a number and a tensor, as torch has it where it takes others apart."""
    if isinstance(values["self"], fx.Node):
        return "aten.sub.Tensor", values
    return "aten.rsub.Scalar", {**values, "self": values["other"], "other": values["self"]}


def _matrix_transpose(_: fx.Node, values: Values) -> tuple[str, Values]:
    return "aten.transpose.int", {**values, "dim0": -2, "dim1": -1}


def _instance_norm(_: fx.Node, values: Values) -> tuple[str, Values]:
    """A group for each channel; with the statistics that it has kept, a batch normalisation. Statistics that it goes on with, for
    each sample at once, no operator says."""
    if not values["use_input_stats"]:
        return "aten.batch_norm", {**values, "training": False}
    if values["running_mean"] is not None:
        return "aten.instance_norm, with running statistics", values
    return "aten.group_norm", {**values, "num_groups": values["input"].meta["val"].shape[1]}


def _moved(_: fx.Node, values: Values) -> tuple[str, Values]:
    rank = values["self"].meta["val"].dim()
    source, target = (
        [at % rank for at in ((given,) if isinstance(given, int) else given)]
        for given in (values["source"], values["destination"])
    )
    rest = iter(at for at in range(rank) if at not in source)
    order = tuple(source[target.index(at)] if at in target else next(rest) for at in range(rank))
    return "aten.permute", {"self": values["self"], "dims": order}


def _reshape(node: fx.Node, values: Values) -> tuple[str, Values]:
    return "aten.reshape", {"self": values["self"], "shape": tuple(node.meta["val"].shape)}


_CASTS = frozenset({
    "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other", "aten._to_copy", "aten.type_as",
})  # fmt: skip
_RESPELT: Mapping[str, Callable[[fx.Node, Values], tuple[str, Values]]] = {
    **dict.fromkeys(_CASTS, _cast),
    **dict.fromkeys(("aten.empty.memory_format", "aten.empty_like", "aten.new_empty"), _empty),
    "aten.cat": _cat,
    "aten.dropout": _dropout,
    "aten.scaled_dot_product_attention": _attention,
    "aten.gelu": _gelu,
    "aten.div.Tensor_mode": _division("aten.div.Tensor"),
    "aten.div.Scalar_mode": _division("aten.div.Scalar"),
    "aten.sub.Tensor": _difference,
    "aten.pad": _pad,
    **dict.fromkeys(("aten.mT", "aten.mH", "aten.adjoint", "aten.matrix_H"), _matrix_transpose),
    "aten.unsafe_split.Tensor": lambda _, values: ("aten.split.Tensor", values),
    **{f"aten.upsample_{kind}2d.vec": _upsampled for kind in ("nearest", "bilinear")},
    **{f"aten.conv{n}d.padding": _padded for n in (1, 2, 3)},
    "aten.instance_norm": _instance_norm,
    **dict.fromkeys(
        ("aten.movedim.int", "aten.movedim.intlist", "aten.moveaxis.int", "aten.moveaxis.intlist"), _moved
    ),
    "aten.swapaxes": _renamed("aten.transpose.int", dim0="axis0", dim1="axis1"),
    "aten.swapdims": _renamed("aten.transpose.int"),
    "aten.reshape_as": _reshape,
    "aten.view_as": _reshape,
    "aten._unsafe_index.Tensor": lambda _, values: ("aten.index.Tensor", values),
    "aten._unsafe_index_put": lambda _, values: ("aten.index_put", values),
    # Not as the larger or the smaller of two, whose gradient is halved where both are equal.
    "aten.clamp_min.Tensor": lambda _, values: ("aten.clamp.Tensor", {**values, "max": None}),
    "aten.clamp_max.Tensor": lambda _, values: ("aten.clamp.Tensor", {**values, "min": None}),
}
