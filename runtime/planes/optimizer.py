"""The optimizer as data: torch's AdamW and SGD behind `OptimizerConfig`.

What changes from step to step (`fusion.runtime.planes.learning_rate`) travels with the commit and is passed in, so
that every stage applies the same numbers.

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
        """Apply the gradients in `.grad` at learning rate `rate`; a parameter without one is left alone, as in torch."""
        names = [name for name, parameter in self._parameters.items() if parameter.grad is not None]
        if not names:
            return
        if self._config.kind == "adamw":
            self._adamw(names, rate)
            return
        # Of those with a momentum already and of those without: the library takes either.
        for held in (True, False):
            some = [name for name in names if (name in self._slots) == held]
            if some:
                self._sgd(some, rate)

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
        for name, buffer in zip(names, buffers, strict=False):  # the library made those that were not there
            assert buffer is not None
            self._slots[name] = {"momentum_buffer": buffer}

    def _gradients(self, names: Sequence[str]) -> list[torch.Tensor]:
        found = (self._parameters[name].grad for name in names)
        return [gradient for gradient in found if gradient is not None]

    def state(self) -> dict[str, torch.Tensor]:
        """The state by "<name>/<slot>", step counts included: our own memory, until `move`, in tensors that nobody else holds.
        Empty before the first step."""
        return {
            f"{name}/{slot}": self._slots[name][slot].detach()
            for name in self._parameters
            for slot in self._slots.get(name, ())
        }

    def move(self) -> None:
        """Go on in a copy: what `state` gave does not change any more."""
        for slots in self._slots.values():
            for slot, value in slots.items():
                slots[slot] = value.clone()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the state by copies of `state`. JobError names a slot that fits no parameter of ours, or a parameter that lacks one:
        nobody can go on from that."""
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
        require_whole(slots, self._config.kind)
        self._slots = slots


SLOTS = {"adamw": frozenset({"step", "exp_avg", "exp_avg_sq"}), "sgd": frozenset({"momentum_buffer"})}


def require_whole(slots: Mapping[str, Mapping[str, object]], kind: str) -> None:
    """Raises JobError where a parameter has some slots of an optimizer of that kind, and not all."""
    for name, found in slots.items():
        if missing := sorted(SLOTS[kind] - found.keys()):
            raise JobError(f"optimizer state: {name} has no {missing[0]}")


# --- how long a gradient is

PIECE = 1 << 16  # elements that are in float64 at once
# So many may be: the library is three times as fast as we are where its copy stays in a cache.
WHOLE = 1 << 20
_LANES = (2, 4, 8)  # of the registers of processors: so many sums the library keeps side by side
_TRIED = 10_001  # elements


def squared_norms(gradients: Sequence[torch.Tensor]) -> float:
    """Their sums of squares, added up in their order, in float64. A GPU makes all of them in a few calls."""
    if gradients and gradients[0].device.type == "cuda":
        roots = torch._foreach_norm(list(gradients), 2, dtype=torch.float64)
        return float(torch.stack(roots).square_().sum())
    return float(
        sum((squared_norm(gradient) for gradient in gradients), torch.zeros((), dtype=torch.float64))
    )


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
