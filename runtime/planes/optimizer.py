"""The optimizer as data: torch's AdamW and SGD behind `OptimizerConfig`.

What changes from step to step (`fusion.runtime.planes.learning_rate`) travels with the commit and is passed in, so
that every stage applies the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import torch

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import OptimizerConfig


class Optimizer:
    """Updates `parameters` (by variable name, leaves that require a gradient) and holds the optimizer's state."""

    def __init__(self, config: OptimizerConfig, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = dict(parameters)
        self._inner = _build(config, list(self._parameters.values())) if parameters else None

    def step(self, rate: float) -> None:
        """Apply the gradients in `.grad` at learning rate `rate`; a parameter without one is left alone, as in torch."""
        if self._inner is None:
            return
        for group in self._inner.param_groups:
            group["lr"] = rate
        self._inner.step()

    def state(self) -> dict[str, torch.Tensor]:
        """The state by "<name>/<slot>", step counts included: our own memory, until `move`. Empty before the first step."""
        if self._inner is None:
            return {}
        return {
            f"{name}/{slot}": value.detach()
            for name, parameter in self._parameters.items()
            for slot, value in self._inner.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def move(self) -> None:
        """Go on in a copy: what `state` gave does not change any more."""
        for slots in () if self._inner is None else self._inner.state.values():
            for slot, value in slots.items():
                if isinstance(value, torch.Tensor):
                    slots[slot] = value.clone()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the state by copies of `state`. JobError names a slot that fits no parameter of ours."""
        if self._inner is None:
            if state:
                raise JobError(f"optimizer state for a stage that trains nothing: {next(iter(state))}")
            return
        slots: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in state.items():
            name, _, slot = key.rpartition("/")
            parameter = self._parameters.get(name)
            if parameter is None or slot not in _SLOTS:
                raise JobError(f"optimizer state: {key} belongs to no parameter of this stage")
            if slot != "step" and value.shape != parameter.shape:
                raise JobError(
                    f"optimizer state: {key} has shape {tuple(value.shape)}, not {tuple(parameter.shape)}"
                )
            slots.setdefault(name, {})[slot] = value.to(parameter.device, copy=True)
        self._inner.state.clear()
        for name, found in slots.items():
            self._inner.state[self._parameters[name]] = found


_SLOTS = frozenset({"step", "exp_avg", "exp_avg_sq", "momentum_buffer"})


def _build(config: OptimizerConfig, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
    if config.kind == "adamw":
        return torch.optim.AdamW(
            parameters,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=fused,
        )
    if config.kind == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=config.learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            fused=fused,
        )
    raise JobError(f'optimizer.kind: "adamw" or "sgd", not "{config.kind}"')


# --- how long a gradient is

PIECE = 1 << 16  # elements that are in float64 at once
# So many may be: the library is three times as fast as we are where its copy stays in a cache.
WHOLE = 1 << 20
_LANES = (2, 4, 8)  # of the registers of processors: so many sums the library keeps side by side
_TRIED = 10_001  # elements


def squared_norm(gradient: torch.Tensor) -> torch.Tensor:
    """Its sum of squares in float64, on its device. On a CPU: to the bit the square of what torch.linalg.vector_norm gives for a
    contiguous copy, however its memory is laid out, on any number of threads. That makes a copy of the whole in
    float64 first, the largest thing in memory where a stage has a vocabulary; of a large one no more than a piece is copied,
    where we know in which order the library adds."""
    if gradient.device.type == "cpu":
        gradient = gradient.detach().contiguous()  # the library adds in the order of memory
        large = gradient.dtype == torch.float32 and gradient.numel() > WHOLE
        if large and (lanes := _lanes()):
            root = _in_lanes(gradient, lanes)
            return torch.tensor(root * root, dtype=torch.float64)
    found: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return found.square()


@cache
def _lanes() -> int:
    """In how many lanes the library adds here; 0 where in none that we know."""
    tried = torch.randn(_TRIED, generator=torch.Generator().manual_seed(0))
    wanted = float(torch.linalg.vector_norm(tried, dtype=torch.float64))
    return next((lanes for lanes in _LANES if _in_lanes(tried, lanes) == wanted), 0)


def _in_lanes(gradient: torch.Tensor, lanes: int) -> float:
    """The root of the sum of squares, added up in so many sums side by side, then these, then what is left over: squares of float32
    are exact in float64. The root is Python's: that of a tensor may be a bit off."""
    flat = gradient.reshape(-1)
    even = flat.numel() // lanes * lanes
    sums = torch.zeros(lanes, dtype=torch.float64)
    for begin in range(0, even, PIECE):
        squares = flat[begin : min(even, begin + PIECE)].double().square_().reshape(-1, lanes)
        squares[0] += sums
        sums = squares.cumsum(0)[-1]
    total = 0.0
    for each in (*sums.tolist(), *flat[even:].double().square_().tolist()):
        total += each
    return math.sqrt(total)
