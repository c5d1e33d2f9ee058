"""Derives the sizes of a graph's symbols from the shapes of its inputs, and checks the inputs against the graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from fusion.dag.ir.dims import Dim, Poly, bind, symbol, symbols_of
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import DTYPE_BYTES, Arg, Graph

TORCH_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
_NONE: Mapping[str, int] = MappingProxyType({})
_MAX_SIZES = 256  # combinations of symbol sizes whose dimensions are remembered


class InputSizes:
    """Derives sizes from a graph's inputs, in order. `dimensions`: those that its nodes need; `passed`: symbols whose sizes each run
    passes. Raises GraphError where no input determines one of the others."""

    def __init__(self, graph: Graph, dimensions: Sequence[Poly], passed: Collection[str] = ()) -> None:
        self._names = tuple(i.name for i in graph.inputs)
        self._dimensions = tuple(dimensions)
        self._types = tuple(i.type for i in graph.inputs)
        self._dtypes = tuple(TORCH_DTYPES[t.dtype] for t in self._types)
        self._places = _places(graph)
        for dimension in dimensions:
            known = self._places.keys() | map(symbol, passed)
            if dimension not in self._places and not _symbols(dimension) <= known:
                raise GraphError(f"no input of the stage tells the size {dimension}, which its nodes need")
        self._bound: dict[tuple[int, ...], tuple[tuple[torch.Size, ...], tuple[int, ...]]] = {}

    def dimensions(
        self, inputs: Sequence[torch.Tensor], passed: Mapping[str, int] = _NONE
    ) -> tuple[int, ...]:
        """The sizes of the dimensions in these inputs. Raises ValueError for an input whose shape or dtype differs from the graph's."""
        try:
            key = (*[inputs[i].shape[d] for i, d in self._places.values()], *passed.values())
        except IndexError:
            raise self._misfit(inputs, [torch.Size((-1,))] * len(inputs)) from None
        shapes, dimensions = self._bound.get(key) or self._bind(key, passed)
        for value, shape, dtype in zip(inputs, shapes, self._dtypes, strict=True):
            if value.shape != shape or value.dtype != dtype:
                raise self._misfit(inputs, shapes)
        return dimensions

    def require(self, symbol_name: str) -> None:
        """Raises GraphError unless `size` determines this symbol."""
        if symbol(symbol_name) not in self._places:
            raise GraphError(f"no input of the stage has a dimension {symbol_name}")

    def size(self, inputs: Sequence[torch.Tensor], symbol_name: str) -> int:
        """The size of a symbol in these inputs. ValueError where its input lacks the dimension."""
        index, dim = self._places[symbol(symbol_name)]
        if inputs[index].dim() <= dim:
            raise ValueError(
                f"input {self._names[index]} has shape {tuple(inputs[index].shape)}, not {self._types[index]}"
            )
        return int(inputs[index].shape[dim])

    def _bind(
        self, key: tuple[int, ...], passed: Mapping[str, int]
    ) -> tuple[tuple[torch.Size, ...], tuple[int, ...]]:
        known = dict(zip(self._places, key, strict=False))
        sizes = {next(iter(symbols_of(p))): n for p, n in known.items() if _symbols(p) == {p}}
        sizes.update(passed)
        shapes = tuple(torch.Size([_bound(d, known, sizes) for d in t.shape]) for t in self._types)
        sizes_bound = shapes, tuple(_bound(d, known, sizes) for d in self._dimensions)
        if len(self._bound) >= _MAX_SIZES:
            self._bound.clear()
        self._bound[key] = sizes_bound
        return sizes_bound

    def _misfit(self, inputs: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> ValueError:
        for name, value, type_, shape, dtype in zip(
            self._names, inputs, self._types, shapes, self._dtypes, strict=True
        ):
            if value.shape != shape or value.dtype != dtype:
                return ValueError(f"input {name} is {value.dtype} {tuple(value.shape)}, not {type_}")
        raise AssertionError


def polynomials(args: tuple[Arg, ...]) -> Iterator[Poly]:
    """The polynomials among the arguments of a node."""
    for arg in args:
        if isinstance(arg, Poly):
            yield arg
        elif isinstance(arg, tuple):
            yield from polynomials(arg)


def _symbols(dim: Dim) -> frozenset[Poly]:
    return frozenset(symbol(name) for name in symbols_of(dim))


def _places(graph: Graph) -> dict[Poly, tuple[int, int]]:
    """Where to read sizes: (input, dimension) for each symbol that is a dimension by itself, and for each other
    polynomial whose symbols are not all of these."""
    dims = [
        (dim, (i, at))
        for i, input_ in enumerate(graph.inputs)
        for at, dim in enumerate(input_.type.shape)
        if isinstance(dim, Poly)
    ]
    places: dict[Poly, tuple[int, int]] = {}
    for dim, place in dims:
        if _symbols(dim) == {dim}:
            places.setdefault(dim, place)
    single_symbols = frozenset(places)
    for dim, place in dims:
        if not _symbols(dim) <= single_symbols:
            places.setdefault(dim, place)
    return places


def _bound(dim: Dim, known: Mapping[Poly, int], sizes: Mapping[str, int]) -> int:
    if isinstance(dim, Poly) and dim in known:
        return known[dim]
    return bind(dim, sizes)
