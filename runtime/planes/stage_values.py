"""The values that a stage takes and gives, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.graph import Variable
from fusion.runtime.job.errors import JobError
from fusion.runtime.planes.input_sizes import TORCH_DTYPES
from fusion.runtime.planes.plane import Tensors


def selected(names: Sequence[str], inputs: Tensors, device: torch.device) -> list[torch.Tensor]:
    """What a program takes, in its order. ValueError for an input that is missing."""
    try:
        return [inputs[name].to(device) for name in names]
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
