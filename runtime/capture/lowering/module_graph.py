"""An exportable module as a graph: through torch.export, decompositions and lowering."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from fusion.dag.ir.graph import Graph
from fusion.runtime.capture.exporting.export import export
from fusion.runtime.capture.exporting.model_code import line_of_node
from fusion.runtime.capture.exporting.tensors import (
    tensors_of,
    tied_by_memory,
    unsaved_tensors,
    variable_names,
)
from fusion.runtime.capture.exporting.torch_calls import require_plain_gradients
from fusion.runtime.capture.lowering.aten_names import (
    op_name,
    untracked_write,
    uses_vmap,
    writes_in_place,
)
from fusion.runtime.capture.lowering.decompose import decomposed, run_decompositions
from fusion.runtime.capture.lowering.lower import lower
from fusion.runtime.capture.lowering.triangles import is_count, triangle_window
from fusion.runtime.job.errors import CaptureError

MAX_CONSTANT = 64  # elements of a constant that the code makes, which becomes nodes


def module_graph(
    module: nn.Module,
    wrapped: nn.Module,
    example: Mapping[str, torch.Tensor],
    dims: tuple[dict[int, Any], ...],
    training: bool,
    loss_names: Mapping[str, str] = MappingProxyType({}),
    keeps: bool = False,
) -> Graph:
    """The graph of `wrapped`, which has `module` as its part `module`. `example`: its inputs, in order; `dims`: the free dimensions of each.
    `loss_names`: variable names of the tensors of its part `loss`; `keeps`: whether values written to buffers are kept for the next run."""
    names = {f"module.{original}": name for original, name in variable_names(module).items()}
    names |= {f"loss.{original}": name for original, name in loss_names.items()}
    if training:
        require_plain_gradients(module)
    if twice := sorted(set(example) & set(names.values())):
        raise CaptureError(
            f"the model has a parameter or buffer {twice[0]}, and its inputs an array {twice[0]}: rename one of them"
        )
    wrapped.train(training)
    tables = _tables(module)
    exported = export(wrapped, tuple(example.values()), dims)
    if uses_vmap(exported):
        exported = run_decompositions(exported, {})
    if training and (write := untracked_write(exported)) is not None:
        circumstance = "to what is detached" if write.graph is exported.graph else "under torch.no_grad"
        raise CaptureError(
            f"the model writes {circumstance}, with {op_name(write.target)}, to a value that has a gradient"
            f"{line_of_node(write)}: write to a copy of it"
        )
    _require_read_by_copy(module, exported)
    try:
        graph = _lowered(exported, tuple(example), dims, names, tables, keeps)
    except CaptureError:
        if not writes_in_place(exported):
            raise
        # Only as a last resort: it also decomposes operators that training needs whole (dropout, batch normalisation), and changes views.
        graph = _lowered(run_decompositions(exported, {}), tuple(example), dims, names, tables, keeps)
    if training and (tied := tied_by_memory(module, graph.variable_names)) is not None:
        raise CaptureError(
            f"{tied[0]} and {tied[1]} are two tensors in the same memory, which are trained as one only if they are one: "
            f"make them the same nn.Parameter, or copy one"
        )
    return graph


def _lowered(
    exported: ExportedProgram,
    inputs: tuple[str, ...],
    dims: tuple[dict[int, Any], ...],
    names: Mapping[str, str],
    tables: Mapping[str, torch.Tensor],
    keeps: bool,
) -> Graph:
    exported = decomposed(exported)
    symbols = {
        str(node.meta["val"].shape[at].node.expr): dim.__name__
        for node, where in zip(_user_inputs(exported), dims, strict=True)
        for at, dim in where.items()
        if isinstance(node.meta["val"].shape[at], torch.SymInt)
    }
    for node, where in zip(_user_inputs(exported), dims, strict=True):
        for at, dim in where.items():
            if not isinstance(node.meta["val"].shape[at], torch.SymInt):
                raise CaptureError(f"the model does not leave the size of {dim.__name__} free")
    constants = dict(tables)
    for name, value in exported.constants.items():
        if name in names:
            continue
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            raise CaptureError(f"the model's code makes a constant ({name}) that is not a plain tensor")
        if value.numel() > MAX_CONSTANT:
            raise CaptureError(
                f"the model's code makes a constant of {value.numel()} elements: register it as a buffer of the model, or of a loss that is a module"
            )
        constants[name] = value
    return lower(exported, inputs, names, constants, symbols, keeps)


def _require_read_by_copy(module: nn.Module, exported: ExportedProgram) -> None:
    """CaptureError where the model's code reads a tensor of `module` itself, which a function has kept (`lambda x: self.layer(x)`), rather than
    that of the copy that was exported: it would be a constant."""
    kept = [each for each in exported.constants.values() if _has_memory(each)]
    unsaved = {name for name, _ in unsaved_tensors(module)} if kept else set()
    own = {
        (tensor.data_ptr(), tensor.numel()): name
        for name, tensor in (tensors_of(module) if kept else ())
        if name not in unsaved and _has_memory(tensor)
    }
    for value in kept:
        if (name := own.get((value.data_ptr(), value.numel()))) is not None:
            readers = _readers(exported, value)
            line = next(filter(None, map(line_of_node, readers)), "")
            raise CaptureError(
                f"the model reads {name} through a function or variable that has kept the model or a part of it (a lambda, a hook, a global "
                f"variable){line}: read it from self, in a method, or from the module that a hook is given; for a loss, let forward return it"
            )


def _has_memory(value: Any) -> bool:
    fake = not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor)
    return not (fake or value.is_meta or value.is_sparse or not value.numel())


def _readers(exported: ExportedProgram, value: torch.Tensor) -> list[torch.fx.Node]:
    """The nodes that read a constant of the exported program."""
    targets = {name for name, each in exported.constants.items() if each is value}
    arguments = {s.arg.name for s in exported.graph_signature.input_specs if s.target in targets}
    return [user for node in exported.graph.nodes if node.name in arguments for user in node.users]


def _user_inputs(exported: ExportedProgram) -> list[torch.fx.Node]:
    names = set(exported.graph_signature.user_inputs)
    return [n for n in exported.graph.nodes if n.op == "placeholder" and n.name in names]


def _tables(module: nn.Module) -> dict[str, torch.Tensor]:
    """The causal masks and position counts among tensors that no file can override, by export name."""
    return {
        f"module.{name}": tensor
        for name, tensor in unsaved_tensors(module)
        if triangle_window(tensor) is not None or is_count(tensor)
    }
