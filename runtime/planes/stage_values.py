"""The inputs, outputs and state of a stage, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.graph import Variable
from fusion.dag.rewrites.end_to_end import Along
from fusion.runtime.job.errors import JobError
from fusion.runtime.planes.input_sizes import TORCH_DTYPES
from fusion.runtime.planes.plane import Tensors

VARIABLE, OPTIMIZER = "variable/", "optimizer/"  # prefixes of the names in a stage's state


def stage_state(variables: Tensors, slots: Tensors) -> dict[str, torch.Tensor]:
    """The state of a stage: its variables and the slots of its optimizer."""
    state = {f"{VARIABLE}{name}": value for name, value in variables.items()}
    state.update({f"{OPTIMIZER}{name}": value for name, value in slots.items()})
    return state


def state_parts(state: Tensors) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The variables and optimizer slots of a state, by name; other entries are ignored."""
    variables = {k.removeprefix(VARIABLE): v for k, v in state.items() if k.startswith(VARIABLE)}
    slots = {k.removeprefix(OPTIMIZER): v for k, v in state.items() if k.startswith(OPTIMIZER)}
    return variables, slots


def ordered_inputs(
    names: Sequence[str], inputs: Tensors, device: torch.device | None = None
) -> list[torch.Tensor]:
    """The inputs of a program in order, on `device` or where they are. ValueError for one that is missing."""
    try:
        return [inputs[name] if device is None else inputs[name].to(device) for name in names]
    except KeyError as missing:
        raise ValueError(f"the stage needs an input {missing}") from None


def output_keys(stage: Stage) -> tuple[str, ...]:
    """The keys of a stage's outputs: edges by name, then the model's outputs that are computed here."""
    return (*(e.name for e in stage.sends), *(f"result/{i}" for i in stage.results))


def checked_variable(variables: Mapping[str, torch.Tensor], variable: Variable) -> torch.Tensor:
    """The variable's value. JobError for one that is missing or of another shape or dtype."""
    value = variables.get(variable.name)
    if value is None:
        raise JobError(f"the weights have no {variable.name}")
    if tuple(value.shape) != variable.type.shape or value.dtype != TORCH_DTYPES[variable.type.dtype]:
        raise JobError(
            f"the weight {variable.name} is {value.dtype} {tuple(value.shape)}, not {variable.type}"
        )
    return value


def count_positions(values: Sequence[torch.Tensor], axes: Sequence[Along], names: Sequence[str]) -> int:
    """The number of positions of a piece. ValueError where its inputs disagree, or one has a fraction of a position."""
    counts = set()
    for value, (axis, rows), name in zip(values, axes, names, strict=True):
        if value.dim() <= axis or value.shape[axis] % rows:
            raise ValueError(f"input {name} has shape {tuple(value.shape)}: not {rows} rows a position")
        counts.add(value.shape[axis] // rows)
    if len(counts) > 1:
        raise ValueError(f"the inputs are of {min(counts)} and of {max(counts)} positions")
    return counts.pop()


def concatenated(parts: Sequence[torch.Tensor], axis: int, rows: int, padding: int) -> torch.Tensor:
    """Concatenate the parts along `axis`, and pad with `padding` copies of the last position, of `rows` rows."""
    if padding:
        length = parts[-1].shape[axis]
        last = parts[-1].narrow(axis, length - rows, rows)
        parts = [*parts, *[last] * padding]
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)
