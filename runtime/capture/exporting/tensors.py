"""The tensors of a module and of a loss under their names in a graph, and a copy of a module without their values."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy

from fusion.runtime.capture.exporting.model_code import first_line
from fusion.runtime.job.errors import CaptureError
from fusion.runtime.job.model_files import CONSTANT, is_exported

_VARIABLE_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")


def hollow_copy(module: nn.Module) -> nn.Module:
    """A copy of the module whose parameters and buffers are fake CPU tensors of the same shapes and ties."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    with fake:  # a constant that the module's code makes from numbers stays real
        for name, tensor in tensors_of(module):
            if is_lazy(tensor):
                raise CaptureError(
                    f"{name} has no shape before the module runs (nn.Lazy..): run it once where it is made"
                )
            if id(tensor) not in memo:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = (
                    nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
                )
    try:
        return copy.deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        raise CaptureError(f"the module cannot be copied: {first_line(error)}") from error


def fake_mode(copied: nn.Module) -> FakeTensorMode:
    """The fake tensor mode of a hollow copy's tensors, for several runs with sizes that are numbers: torch remembers what an operator gives
    for tensors of the same shapes, a quarter of the time of a run."""
    modes = (tensor.fake_mode for _, tensor in tensors_of(copied) if isinstance(tensor, FakeTensor))
    mode = next(modes, None) or FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = True
    return mode


def tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters, buffers, and tensors that are plain attributes, under every name that they have."""
    attributes = [
        (f"{prefix}.{name}" if prefix else name, value)
        for prefix, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor)
    ]
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return [*named, *attributes]


def unsaved_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Tensors that are in no state_dict, so that no weights file can override them."""
    names = variable_names(module)
    return [(name, tensor) for name, tensor in tensors_of(module) if not is_exported(names[name])]


def variable_names(module: nn.Module) -> dict[str, str]:
    """Variable name of each tensor name of the module: the first of a tied tensor's names."""
    saved = set(module.state_dict(keep_vars=True))
    first_names: dict[int, str] = {}
    names: dict[str, str] = {}
    # Names in the state_dict come first, so that a tensor with one such name is exported under it.
    for name, tensor in sorted(tensors_of(module), key=lambda item: item[0] not in saved):
        variable = name if name in saved else CONSTANT + name
        if not _VARIABLE_NAME.fullmatch(variable):
            raise CaptureError(
                f"the name of parameter {name!r} has characters other than letters, digits, . _ - :"
            )
        names[name] = first_names.setdefault(id(tensor), variable)
    return names


def tensors_of_loss(loss: Callable[..., Any] | None) -> list[tuple[str, torch.Tensor]]:
    return tensors_of(loss) if isinstance(loss, nn.Module) else []


def names_of_loss(module: nn.Module, loss: Callable[..., Any] | None) -> dict[str, str]:
    """Variable name of each tensor of a loss: one that is the module's too keeps its name there, the others are not exported."""
    names = variable_names(module)
    known = {id(tensor): names[name] for name, tensor in tensors_of(module)}
    loss_names: dict[str, str] = {}
    for name, tensor in tensors_of_loss(loss):
        variable = f"{CONSTANT}loss.{name}"
        if id(tensor) not in known and tensor.requires_grad:
            raise CaptureError(f"the loss has a parameter of its own, {name}: make it a part of the model")
        if id(tensor) not in known and variable in names.values():
            raise CaptureError(
                f"the loss and the model's attribute loss have a {name} each: rename the attribute"
            )
        loss_names[name] = known.get(id(tensor), variable)
    return loss_names


def tied_by_memory(module: nn.Module, held: Collection[str]) -> tuple[str, str] | None:
    """Two names of different tensors that share memory and of which at least one is trained, among those whose variables are `held`; None if
    there are none. A part that computes its weight before it uses it (torch.nn.utils.spectral_norm) shares memory until then."""
    first: dict[tuple[int, int], tuple[str, torch.Tensor]] = {}
    names = variable_names(module)
    for name, tensor in tensors_of(module):
        if (
            names[name] not in held
            or isinstance(tensor, FakeTensor)
            or tensor.is_meta
            or tensor.is_sparse
            or not tensor.numel()
        ):
            continue
        known, other = first.setdefault((tensor.data_ptr(), tensor.numel()), (name, tensor))
        trained = any(isinstance(t, nn.Parameter) and t.requires_grad for t in (tensor, other))
        if other is not tensor and trained:
            return known, name
    return None
