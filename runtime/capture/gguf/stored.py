"""A parameter of a transformers module, as a GGUF file has it: which tensors it is made of, and what llama.cpp's conversion did to
their rows. Nothing is read here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fusion.runtime.capture.gguf.header import TensorPlace

# Puts the first dimension of a tensor into the order that the parameter has, whatever else it has.
Order = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """The rows of `places` one behind the other, for each expert, in another order perhaps; or what is `made` of them."""

    places: tuple[TensorPlace, ...]
    shape: tuple[int, ...]  # of the parameter
    experts: int = 0  # of which each has its rows; 0: the parameter is of none
    order: Order | None = None  # of rows, of each expert's
    columns: Order | None = None  # the same of what each row has
    transposed: bool = False
    made: Callable[..., torch.Tensor] | None = None  # of all tensors, as float32

    @property
    def in_blocks(self) -> bool:
        """Whether its rows are rows of the file, so that they may stay in blocks."""
        same_rows = len({(place.kind, place.shape[-1]) for place in self.places}) == 1
        columns = self.shape[-2] if self.transposed else self.shape[-1]
        return self.made is None and same_rows and columns == self.places[0].shape[-1]

    def laid(self, experts: int) -> tuple[int, ...]:
        """The shape of its tensors one behind the other, or of so many experts of them."""
        first = self.places[0].shape
        if self.experts:
            return (experts, sum(place.shape[1] for place in self.places), *first[2:])
        return (sum(place.shape[0] for place in self.places), *first[1:])

    def ordered(self, value: torch.Tensor) -> torch.Tensor:
        """Of `laid` (experts, rows, columns), or of (rows, ...)."""
        if self.columns is not None:
            value = self.columns(value.mT).mT
        if self.order is None:
            return value
        return torch.stack([self.order(each) for each in value]) if self.experts else self.order(value)

    def assembled(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parameter, of all of its tensors, but for dimensions of 1."""
        value = self.made(*tensors) if self.made else torch.cat(list(tensors), dim=1 if self.experts else 0)
        value = self.ordered(value)
        return value.mT if self.transposed else value


def halves(heads: int, value: torch.Tensor) -> torch.Tensor:
    """Rows of each head that alternate, as two halves again, which are rotated together."""
    pairs = value.reshape(heads, -1, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)


def grouped(groups: int, sizes: Sequence[int], value: torch.Tensor) -> torch.Tensor:
    """So many rows of each size for each group, which the file has size by size."""
    parts = torch.split(value, [groups * size for size in sizes])
    split = [part.reshape(groups, size, *value.shape[1:]) for part, size in zip(parts, sizes, strict=True)]
    return torch.cat(split, dim=1).reshape(value.shape)


def tiled(groups: int, each: int, value: torch.Tensor, start: int = 0) -> torch.Tensor:
    """From row `start` on, the first rows of all of the groups, then the second ones, as groups of `each` again."""
    rest = value[start:]
    turned = rest.reshape(each, groups, -1, *value.shape[1:]).transpose(0, 1).reshape(rest.shape)
    return torch.cat([value[:start], turned]) if start else turned
