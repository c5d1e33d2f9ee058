"""The tensors of a module and of a loss by the names that a graph gives them, and a copy of a module without their values."""

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
    """That of the tensors of a hollow copy."""
    own = (tensor.fake_mode for _, tensor in tensors_of(copied) if isinstance(tensor, FakeTensor))
    return next(own, None) or FakeTensorMode(allow_non_fake_inputs=True)


def tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters, buffers, and tensors that are plain attributes, under every name they have."""
    attributes = [
        (f"{prefix}.{name}" if prefix else name, value)
        for prefix, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor)
    ]
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return [*named, *attributes]


def unsaved_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Those that no state_dict has, so that no file can say otherwise."""
    names = variable_names(module)
    return [(name, tensor) for name, tensor in tensors_of(module) if not is_exported(names[name])]


def variable_names(module: nn.Module) -> dict[str, str]:
    """Canonical variable name of each parameter and buffer name: the first of a tied tensor's names."""
    kept = set(module.state_dict(keep_vars=True))
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    # Names in the state_dict come first, so that a tensor with one such name is exported under it.
    for name, tensor in sorted(tensors_of(module), key=lambda item: item[0] not in kept):
        own = name if name in kept else CONSTANT + name
        if not _VARIABLE_NAME.fullmatch(own):
            raise CaptureError(
                f"the name of parameter {name!r} has characters other than letters, digits, . _ - :"
            )
        names[name] = first.setdefault(id(tensor), own)
    return names


def tensors_of_loss(loss: Callable[..., Any] | None) -> list[tuple[str, torch.Tensor]]:
    return tensors_of(loss) if isinstance(loss, nn.Module) else []


def names_of_loss(module: nn.Module, loss: Callable[..., Any] | None) -> dict[str, str]:
    """Variable name of each tensor that a loss has: what is also the module's keeps its name, and no export has the others."""
    names = variable_names(module)
    known = {id(tensor): names[name] for name, tensor in tensors_of(module)}
    found: dict[str, str] = {}
    for name, tensor in tensors_of_loss(loss):
        own = f"{CONSTANT}loss.{name}"
        if id(tensor) not in known and tensor.requires_grad:
            raise CaptureError(f"the loss has a parameter of its own, {name}: make it a part of the model")
        if id(tensor) not in known and own in names.values():
            raise CaptureError(
                f"the loss and the model's attribute loss have a {name} each: rename the attribute"
            )
        found[name] = known.get(id(tensor), own)
    return found


def tied_by_memory(module: nn.Module, held: Collection[str]) -> tuple[str, str] | None:
    """Two names of tensors that are not one, but lie in the same memory, and of which one at least is trained: of those whose variables are
    `held`. A part that sets its weight before it reads it (torch.nn.utils.spectral_norm) has another one until then."""
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
