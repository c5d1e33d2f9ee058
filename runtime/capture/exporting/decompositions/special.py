"""The log-gamma function and its derivative, for losses of counts and Beta and Dirichlet distributions; sin(pi x) / (pi x).

Stirling's series from 7.5 on (Abramowitz and Stegun, 6.1.40 and 6.3.18), the recurrence below that, and the reflection formula below 0.5. In
float32, log-gamma is within about 2e-6 of the true value where that is below 10.
"""

from __future__ import annotations

from math import log, pi

import torch
from torch import Tensor


def lgamma(self: Tensor) -> Tensor:
    argument, is_reflected, fraction = _reflected(self)
    shifted, base, small = _shifted(argument)
    inverse = shifted.reciprocal()
    square = inverse * inverse
    series = inverse * (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680)))
    result = (shifted - 0.5) * (shifted.log() - 1) + (log(2 * pi) - 1) / 2 + series
    pairs = base * (base + 6)
    product = pairs * (pairs + 5) * (pairs + 8) * (base + 3)  # base * (base + 1) * .. * (base + 6)
    result = result - torch.where(small, product.log(), torch.zeros_like(result))
    return torch.where(is_reflected, log(pi) - torch.sin(pi * fraction).log() - result, result)


def digamma(self: Tensor) -> Tensor:
    argument, is_reflected, fraction = _reflected(self)
    shifted, base, small = _shifted(argument)
    inverse = shifted.reciprocal()
    square = inverse * inverse
    series = square * (1 / 12 - square * (1 / 120 - square * (1 / 252 - square / 240)))
    result = shifted.log() - inverse / 2 - series
    pairs, slope = base * (base + 6), 2 * base + 6
    steps = slope * (1 / pairs + 1 / (pairs + 5) + 1 / (pairs + 8)) + 1 / (base + 3)
    result = result - torch.where(small, steps, torch.zeros_like(result))
    return torch.where(is_reflected, result - pi / torch.tan(pi * fraction), result)


def sinc(self: Tensor) -> Tensor:
    """sin(pi x) / (pi x) with a gradient at zero, where torch's decomposition divides by zero."""
    zero = self == 0
    angle = pi * torch.where(zero, 1.0, self)
    return torch.where(zero, 1.0, angle.sin() / angle)


def _reflected(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """max(x, 1 - x); where that is 1 - x; and the fractional part of x there, 1/2 elsewhere."""
    below = x < 0.5
    return torch.where(below, 1 - x, x), below, torch.where(below, x - x.floor(), torch.full_like(x, 0.5))


def _shifted(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x + 7 where x is small, else x; x where it is small, else 1; and where it is small."""
    small = x < 8
    return torch.where(small, x + 7, x), torch.where(small, x, torch.ones_like(x)), small
