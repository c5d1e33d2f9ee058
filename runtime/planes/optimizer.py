"""torch's AdamW and SGD for an `OptimizerConfig`, with their state as tensors.

What changes from step to step (`fusion.runtime.planes.learning_rate`) travels with the commit and is passed in, so that every stage
applies the same numbers.

The functions of torch.optim are called, not its classes: the first object of one loads torch's compiler, 800 modules, 70 MiB and
1.5 s of a core, for every peer that trains or stands by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import OptimizerConfig


class Optimizer:
    """Updates `parameters` (by variable name, leaves that require a gradient) and holds the optimizer's state."""

    def __init__(self, config: OptimizerConfig, parameters: Mapping[str, torch.Tensor]) -> None:
        if config.kind not in ("adamw", "sgd"):
            raise JobError(f'optimizer.kind: "adamw" or "sgd", not "{config.kind}"')
        self._config = config
        self._parameters = dict(parameters)
        self._fused = all(
            p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in self._parameters.values()
        )
        self._slots: dict[str, dict[str, torch.Tensor]] = {}  # by parameter

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply the gradients in `.grad` at learning rate `rate`; a parameter without one is skipped, as in torch."""
        names = [name for name, parameter in self._parameters.items() if parameter.grad is not None]
        if not names:
            return
        if self._config.kind == "adamw":
            self._adamw(names, rate)
            return
        # The library takes parameters with a momentum buffer, or without one.
        for has_slots in (True, False):
            group = [name for name in names if (name in self._slots) == has_slots]
            if group:
                self._sgd(group, rate)

    def _adamw(self, names: Sequence[str], rate: float) -> None:
        for name in names:
            if name not in self._slots:
                parameter = self._parameters[name]
                device = parameter.device if self._fused else torch.device("cpu")
                self._slots[name] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        config, (beta1, beta2) = self._config, self._config.betas
        adamw(
            [self._parameters[name] for name in names],
            self._gradients(names),
            [self._slots[name]["exp_avg"] for name in names],
            [self._slots[name]["exp_avg_sq"] for name in names],
            [],
            [self._slots[name]["step"] for name in names],
            fused=self._fused,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=rate,
            weight_decay=config.weight_decay,
            eps=config.eps,
            maximize=False,
        )

    def _sgd(self, names: Sequence[str], rate: float) -> None:
        momentum = self._config.momentum
        buffers = [self._slots.get(name, {}).get("momentum_buffer") for name in names] if momentum else []
        sgd(
            [self._parameters[name] for name in names],
            self._gradients(names),
            buffers,
            fused=self._fused,
            weight_decay=self._config.weight_decay,
            momentum=momentum,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for name, buffer in zip(names, buffers, strict=False):  # the library created missing ones
            assert buffer is not None
            self._slots[name] = {"momentum_buffer": buffer}

    def _gradients(self, names: Sequence[str]) -> list[torch.Tensor]:
        gradients = (self._parameters[name].grad for name in names)
        return [gradient for gradient in gradients if gradient is not None]

    def state(self) -> dict[str, torch.Tensor]:
        """The state by "<name>/<slot>", step counts included, without a copy: it changes with the next step unless `detach_state` is called
        first. Empty before the first step."""
        return {
            f"{name}/{slot}": self._slots[name][slot].detach()
            for name in self._parameters
            for slot in self._slots.get(name, ())
        }

    def detach_state(self) -> None:
        """Continue in a copy, so that tensors that `state` returned do not change."""
        for slots in self._slots.values():
            for slot, value in slots.items():
                slots[slot] = value.clone()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the state by copies of `state`. JobError names a slot of no parameter, or a parameter that lacks one."""
        slots: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in state.items():
            name, _, slot = key.rpartition("/")
            parameter = self._parameters.get(name)
            if parameter is None or slot not in SLOTS[self._config.kind]:
                raise JobError(f"optimizer state: {key} belongs to no parameter of this stage")
            shape, dtype = ((), torch.float32) if slot == "step" else (parameter.shape, parameter.dtype)
            if value.shape != shape or value.dtype != dtype:
                raise JobError(
                    f"optimizer state: {key} is {value.dtype}{list(value.shape)}, not {dtype}{list(shape)}"
                )
            slots.setdefault(name, {})[slot] = value.to(parameter.device, copy=True)
        require_complete(slots, self._config.kind)
        self._slots = slots


SLOTS = {"adamw": frozenset({"step", "exp_avg", "exp_avg_sq"}), "sgd": frozenset({"momentum_buffer"})}


def require_complete(slots: Mapping[str, Mapping[str, object]], kind: str) -> None:
    """Raises JobError where a parameter has some of the slots of an optimizer of that kind, but not all."""
    for name, parameter_slots in slots.items():
        if missing := sorted(SLOTS[kind] - parameter_slots.keys()):
            raise JobError(f"optimizer state: {name} has no {missing[0]}")


# --- gradient norms

CHUNK_ELEMENTS = 1 << 16  # converted to float64 at once
# Up to so many, the library converts all: its copy stays in a cache, and it is three times as fast as we are.
MAX_COPIED_ELEMENTS = 1 << 20
_LANE_COUNTS = (2, 4, 8)  # accumulators of the library, by the width of vector registers
_TRIAL_ELEMENTS = 10_001  # elements


def squared_norms(gradients: Sequence[torch.Tensor]) -> float:
    """The sum, in order, of the sums of squares, in float64. A GPU computes all in a few calls."""
    if gradients and gradients[0].device.type == "cuda":
        roots = torch._foreach_norm(list(gradients), 2, dtype=torch.float64)
        return float(torch.stack(roots).square_().sum())
    return float(
        sum((squared_norm(gradient) for gradient in gradients), torch.zeros((), dtype=torch.float64))
    )


def squared_norm(gradient: torch.Tensor) -> torch.Tensor:
    """The sum of squares in float64, on the gradient's device. On a CPU it is, to the bit, the square of torch.linalg.vector_norm of a
    contiguous copy, for any memory layout and any number of threads. The library converts the whole tensor to float64 first, which
    would be the largest thing in memory for the embedding of a vocabulary; so large ones are converted in chunks, where the
    library's reduction order is known."""
    if gradient.device.type == "cpu":
        gradient = gradient.detach().contiguous()  # the library adds in the order of memory
        large = gradient.dtype == torch.float32 and gradient.numel() > MAX_COPIED_ELEMENTS
        if large and (lanes := _library_lanes()):
            root = _norm_in_lanes(gradient, lanes)
            return torch.tensor(root * root, dtype=torch.float64)
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm.square()


@cache
def _library_lanes() -> int:
    """The number of lanes the library adds in on this machine; 0 where it is none of _LANE_COUNTS."""
    values = torch.randn(_TRIAL_ELEMENTS, generator=torch.Generator().manual_seed(0))
    norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    return next((lanes for lanes in _LANE_COUNTS if _norm_in_lanes(values, lanes) == norm), 0)


def _norm_in_lanes(gradient: torch.Tensor, lanes: int) -> float:
    """The norm of a float32 tensor, with one accumulator a lane, then their sum, then the remainder; squares of float32 are exact in
    float64. The root is Python's: that of a tensor may be a bit off."""
    flat = gradient.reshape(-1)
    aligned = flat.numel() // lanes * lanes
    sums = torch.zeros(lanes, dtype=torch.float64)
    for start in range(0, aligned, CHUNK_ELEMENTS):
        squares = flat[start : min(aligned, start + CHUNK_ELEMENTS)].double().square_().reshape(-1, lanes)
        squares[0] += sums
        sums = squares.cumsum(0)[-1]
    total = 0.0
    for square in (*sums.tolist(), *flat[aligned:].double().square_().tolist()):
        total += square
    return math.sqrt(total)
