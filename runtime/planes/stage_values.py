"""The values that a stage takes and gives, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.graph import Variable
from fusion.dag.rewrites.end_to_end import Along
from fusion.runtime.job.errors import JobError
from fusion.runtime.planes.input_sizes import TORCH_DTYPES
from fusion.runtime.planes.plane import Tensors

VARIABLE, OPTIMIZER = "variable/", "optimizer/"  # what the names in the state of a stage begin with


def state_of(variables: Tensors, slots: Tensors) -> dict[str, torch.Tensor]:
    """The state of a stage: its variables, and what its optimizer keeps."""
    found = {f"{VARIABLE}{name}": value for name, value in variables.items()}
    found.update({f"{OPTIMIZER}{name}": value for name, value in slots.items()})
    return found


def state_parts(state: Tensors) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The variables and the slots of such a state, by name; whatever else it has is left out."""
    variables = {k.removeprefix(VARIABLE): v for k, v in state.items() if k.startswith(VARIABLE)}
    slots = {k.removeprefix(OPTIMIZER): v for k, v in state.items() if k.startswith(OPTIMIZER)}
    return variables, slots


def selected(names: Sequence[str], inputs: Tensors, device: torch.device | None = None) -> list[torch.Tensor]:
    """What a program takes, in its order, on `device` or where it is. ValueError for an input that is missing."""
    try:
        return [inputs[name] if device is None else inputs[name].to(device) for name in names]
    except KeyError as missing:
        raise ValueError(f"the stage needs an input {missing}") from None


def output_keys(stage: Stage) -> tuple[str, ...]:
    """What the outputs of a stage are called: edges by name, then the model's outputs that are made here."""
    return (*(e.name for e in stage.sends), *(f"result/{i}" for i in stage.results))


def checked(variables: Mapping[str, torch.Tensor], variable: Variable) -> torch.Tensor:
    """The variable's value. JobError for one that is missing or of another shape or dtype."""
    value = variables.get(variable.name)
    if value is None:
        raise JobError(f"the weights have no {variable.name}")
    if tuple(value.shape) != variable.type.shape or value.dtype != TORCH_DTYPES[variable.type.dtype]:
        raise JobError(
            f"the weight {variable.name} is {value.dtype} {tuple(value.shape)}, not {variable.type}"
        )
    return value


def positions_of(values: Sequence[torch.Tensor], along: Sequence[Along], names: Sequence[str]) -> int:
    """How many positions a piece has. ValueError where its values do not agree, or one has a part of a position."""
    found = set()
    for value, (axis, each), name in zip(values, along, names, strict=True):
        if value.dim() <= axis or value.shape[axis] % each:
            raise ValueError(f"input {name} has shape {tuple(value.shape)}: not {each} rows a position")
        found.add(value.shape[axis] // each)
    if len(found) > 1:
        raise ValueError(f"the inputs are of {min(found)} and of {max(found)} positions")
    return found.pop()


def joined(parts: Sequence[torch.Tensor], axis: int, each: int, padding: int) -> torch.Tensor:
    """The pieces one behind the other, and the last position, of `each` rows, again as often as positions are missing."""
    if padding:
        length = parts[-1].shape[axis]
        last = parts[-1].narrow(axis, length - each, each)
        parts = [*parts, *[last] * padding]
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)
