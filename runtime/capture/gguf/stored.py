"""How a GGUF file stores a parameter of a transformers module: in which tensors, and how llama.cpp's conversion transformed them. Nothing
is read here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fusion.runtime.capture.gguf.header import TensorInfo

# Restores the parameter's order along the first dimension of a tensor.
Order = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StoredParameter:
    """The rows of `tensors` concatenated (in each expert), perhaps in another order; or what `combine` computes from them."""

    tensors: tuple[TensorInfo, ...]
    shape: tuple[int, ...]  # of the parameter
    experts: int = 0  # the number of experts, each with its own rows; 0: not an expert parameter
    row_order: Order | None = None  # of the rows, in each expert
    column_order: Order | None = None  # of the columns
    transposed: bool = False
    combine: Callable[..., torch.Tensor] | None = None  # the parameter from all tensors, as float32

    @property
    def in_blocks(self) -> bool:
        """Whether its rows are rows of the file, so that they can stay in quantised blocks."""
        same_rows = len({(info.kind, info.shape[-1]) for info in self.tensors}) == 1
        columns = self.shape[-2] if self.transposed else self.shape[-1]
        return self.combine is None and same_rows and columns == self.tensors[0].shape[-1]

    def stacked_shape(self, experts: int) -> tuple[int, ...]:
        """The shape of its tensors concatenated, for `experts` experts."""
        first = self.tensors[0].shape
        if self.experts:
            return (experts, sum(info.shape[1] for info in self.tensors), *first[2:])
        return (sum(info.shape[0] for info in self.tensors), *first[1:])

    def reordered(self, value: torch.Tensor) -> torch.Tensor:
        """A value of the `stacked_shape`, (experts, rows, columns) or (rows, ...), in the parameter's order."""
        if self.column_order is not None:
            value = self.column_order(value.mT).mT
        if self.row_order is None:
            return value
        return (
            torch.stack([self.row_order(each) for each in value]) if self.experts else self.row_order(value)
        )

    def assembled(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parameter made from all of its tensors, except for dimensions of 1."""
        value = (
            self.combine(*tensors) if self.combine else torch.cat(list(tensors), dim=1 if self.experts else 0)
        )
        value = self.reordered(value)
        return value.mT if self.transposed else value


def to_halves(heads: int, value: torch.Tensor) -> torch.Tensor:
    """Interleaved rows of each head as two halves, which rotate together."""
    pairs = value.reshape(heads, -1, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)


def to_groups(groups: int, sizes: Sequence[int], value: torch.Tensor) -> torch.Tensor:
    """Rows stored size by size as groups, each with `size` rows of every size."""
    parts = torch.split(value, [groups * size for size in sizes])
    split = [part.reshape(groups, size, *value.shape[1:]) for part, size in zip(parts, sizes, strict=True)]
    return torch.cat(split, dim=1).reshape(value.shape)


def from_tiles(groups: int, each: int, value: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Whole groups of `each`, from row `start` on, of rows stored as the first of every group, then the second, and so on."""
    rest = value[start:]
    untiled = rest.reshape(each, groups, -1, *value.shape[1:]).transpose(0, 1).reshape(rest.shape)
    return torch.cat([value[:start], untiled]) if start else untiled
