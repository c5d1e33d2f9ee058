"""The smaller and the larger of two sizes, where the range of the sizes tells which it is.

torch takes the stride of a view for the least of several, and while it exports writes that down as a minimum of sizes, be it one
of 64 and 64 times the length. What it asks of such a stride later holds for every length, but it cannot prove that it does, and
refuses the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true


@contextmanager
def ordered_sizes() -> Iterator[None]:
    """While open, `torch.sym_min` and `torch.sym_max` of whole sizes give one of the two where the ranges say which."""
    least, most = torch.sym_min, torch.sym_max
    torch.sym_min = _known(least, lambda a, b: a <= b)
    torch.sym_max = _known(most, lambda a, b: a >= b)
    try:
        yield
    finally:
        torch.sym_min, torch.sym_max = least, most


def _known(plain: Callable[[Any, Any], Any], first: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def chosen(a: Any, b: Any) -> Any:
        if isinstance(a, (int, torch.SymInt)) and isinstance(b, (int, torch.SymInt)):
            if statically_known_true(first(a, b)):
                return a
            if statically_known_true(first(b, a)):
                return b
        return plain(a, b)

    return chosen
