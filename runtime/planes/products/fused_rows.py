"""Which nodes of a graph that decodes on a CPU become one call of machine code (`row_code`), in float32: RMS norms, rotary positions
(Su et al. 2021, RoFormer) and gates of SiLU (Shazeer 2020, SwiGLU).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from fusion.dag.ir.graph import Arg, Graph, Node, Ref
from fusion.runtime.planes.products import row_code
from fusion.runtime.planes.products.machine_code import LANES, Function, float_bits, over_blocks

_HALF = ("bfloat16", "float16")
_EXP_COSTS = 8  # numbers that are multiplied take as long as one of which exp is taken


class Fused(NamedTuple):
    """What computes a node from these arguments, and the nodes before it that nobody reads then. Where a cut lies between them
    they are computed one by one, and give the same bits."""

    function: Callable[..., torch.Tensor]
    args: tuple[Arg, ...]
    replaces: frozenset[str] = frozenset()


def fused_rows(graph: Graph, kept: Collection[str]) -> dict[str, Fused]:
    """By name of the node; none of a model in half precision, where a last bit of what it computes in float32 may be all that the
    bits of a token's logits differ by from the library's. `kept`: nodes that are computed as they are."""
    if any(each.dtype in _HALF for each in graph.types.values()) or not _there():  # LLVM itself takes 100 MiB
        return {}
    patterns = _Patterns(graph, kept)
    found: dict[str, Fused] = {}
    for node in graph.nodes:
        if node.name not in kept and (fused := patterns.at(node)) is not None:
            found[node.name] = fused
    replaced = frozenset[str]().union(*(fused.replaces for fused in found.values()))
    return {name: fused for name, fused in found.items() if name not in replaced}


class _Patterns:
    def __init__(self, graph: Graph, kept: Collection[str]) -> None:
        self._graph = graph
        self._kept = {*kept, *(ref.name for ref in graph.outputs)}

    def at(self, node: Node) -> Fused | None:
        match node.op, node.args:
            case "aten.rms_norm", (Ref() as rows, (int(),), Ref() as weight, epsilon) if self._float(
                rows, weight
            ):
                return Fused(rms_norm, (rows, weight, epsilon))
            case "aten.add.Tensor", (Ref() as one, Ref() as other, 1):
                return self._rotation(one, other)
            case "aten.silu", (Ref() as given,) if self._float(given):
                return Fused(silu, (given,))
            case "aten.mul.Tensor", (Ref() as one, Ref() as other):
                return self._gate(one, other) or self._gate(other, one)
        return None

    def _gate(self, silu: Ref, other: Ref) -> Fused | None:
        types = self._graph.types
        match self._only(silu, "aten.silu"):
            case Node(args=(Ref() as given,)) if types[given] == types[other] and self._float(given):
                return Fused(gate, (given, other), frozenset({silu.name}))
        return None

    def _rotation(self, straight: Ref, crossed: Ref) -> Fused | None:
        """x * cos + cat(-(second half of x), first half) * sin."""
        match self._only(straight, "aten.mul.Tensor"), self._only(crossed, "aten.mul.Tensor"):
            case Node(args=(Ref() as x, Ref() as cosines)), Node(args=(Ref() as turned, Ref() as sines)):
                pass
            case _:
                return None
        match self._only(turned, "aten.cat"):
            case Node(args=((Ref() as minus, Ref() as first), -1 | 3)):
                pass
            case _:
                return None
        match self._only(minus, "aten.neg"):
            case Node(args=(Ref() as second,)):
                pass
            case _:
                return None
        if not self._float(x, cosines, sines) or not self._turns(x, cosines, sines):
            return None
        width = self._graph.types[x].shape[3]
        assert isinstance(width, int)
        if not self._half(first, x, 0, width // 2) or not self._half(second, x, width // 2, width):
            return None
        between = (straight, crossed, turned, minus, first, second)
        return Fused(rotate, (x, cosines, sines), frozenset(ref.name for ref in between))

    def _turns(self, x: Ref, *angles: Ref) -> bool:
        """(1, heads, positions, width) and (1, 1, positions, width)."""
        shape = self._graph.types[x].shape
        if len(shape) != 4 or not isinstance(shape[3], int) or shape[3] % 2:
            return False
        return all(self._graph.types[each].shape == (shape[0], 1, *shape[2:]) for each in angles)

    def _half(self, ref: Ref, x: Ref, start: int, end: int) -> bool:
        match self._only(ref, "aten.slice.Tensor"):
            case Node(args=(of, -1 | 3, begin, int() as until, 1)):
                return of == x and (begin or 0) == start and min(until, 2 * (end - start)) == end
        return False

    def _only(self, ref: Ref, op: str) -> Node | None:
        """The node of that operator that makes it, where it is read once and for nothing else."""
        index = self._graph.node_index.get(ref.name)
        if index is None or ref.name in self._kept or len(self._graph.uses.get(ref, ())) != 1:
            return None
        node = self._graph.nodes[index]
        return node if node.op == op else None

    def _float(self, *refs: Ref) -> bool:
        types = [self._graph.types[ref] for ref in refs]
        return all(each.dtype == "float32" and each.shape for each in types)


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float | None) -> torch.Tensor:
    """`aten.rms_norm` of the last dimension. ValueError for what does not belong together: the code would read beyond it."""
    code = row_code.rms_norm()
    assert code is not None
    width = rows.shape[-1]
    if weight.shape != (width,) or not rows.dtype == weight.dtype == torch.float32:
        raise ValueError(f"rows {tuple(rows.shape)} and a weight {tuple(weight.shape)}")
    rows, weight = rows.contiguous(), weight.contiguous()
    made = torch.empty_like(rows)
    over_blocks(
        code,
        (rows.data_ptr(), weight.data_ptr(), made.data_ptr()),
        rows.numel() // width if width else 0,
        (width, float_bits(torch.finfo(torch.float32).eps if epsilon is None else epsilon)),
        products=2 * rows.numel(),
        threads=torch.get_num_threads(),
    )
    return made


def rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary positions: heads (batch, n, positions, width), with cosines and sines (batch, 1, positions, width). ValueError as above."""
    code = row_code.rotate()
    assert code is not None
    batch, count, positions, width = heads.shape
    if (
        not cosines.shape == sines.shape == (batch, 1, positions, width)
        or width % 2
        or not heads.dtype == cosines.dtype == sines.dtype == torch.float32
    ):
        raise ValueError(f"heads {tuple(heads.shape)} and angles {tuple(cosines.shape)}")
    if heads.stride(3) != 1:
        heads = heads.contiguous()
    cosines, sines = cosines.contiguous(), sines.contiguous()
    made = torch.empty(batch, positions, count, width)
    threads, size = torch.get_num_threads(), made.numel()
    addresses = [
        (each.data_ptr(), each.element_size() * each.stride(0)) for each in (heads, cosines, sines, made)
    ]
    for one in range(batch):
        over_blocks(
            code,
            [first + one * apart for first, apart in addresses],
            positions,
            (count, width // 2, heads.stride(1), heads.stride(2)),
            products=2 * size // batch,
            threads=threads,
        )
    return made.transpose(1, 2)


def gate(given: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """silu(given) * other, of one shape. ValueError as above."""
    code = row_code.gate()
    assert code is not None
    if given.shape != other.shape:
        raise ValueError(f"a gate {tuple(given.shape)} for {tuple(other.shape)}")
    return _silu(code, given, other)


def silu(given: torch.Tensor) -> torch.Tensor:
    """`aten.silu`. ValueError as above."""
    code = row_code.silu()
    assert code is not None
    return _silu(code, given)


def _silu(code: Function, *given: torch.Tensor) -> torch.Tensor:
    """Of the first, times the other."""
    if any(each.dtype != torch.float32 for each in given):
        raise ValueError("SiLU of float32 alone")
    given = tuple(each.contiguous() for each in given)
    made = torch.empty_like(given[0])
    over_blocks(
        code,
        [each.data_ptr() for each in (*given, made)],
        -(-made.numel() // LANES),
        (made.numel(),),
        products=_EXP_COSTS * made.numel(),
        threads=torch.get_num_threads(),
    )
    return made


@cache
def _there() -> bool:
    """Whether there is such code here, and it gives about what a library gives."""
    if any(code() is None for code in (row_code.rms_norm, row_code.rotate, row_code.silu, row_code.gate)):
        return False
    drawn = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=drawn)

    rows, weight, heads = numbers(3, 40), numbers(40), numbers(1, 5, 3, 40).transpose(1, 2)
    angles = [numbers(1, 1, 5, 40) for _ in range(2)]
    crossed = torch.cat([-heads[..., 20:], heads[..., :20]], -1)
    pairs: list[tuple[Any, Any]] = [
        (rms_norm(rows, weight, 1e-6), functional.rms_norm(rows, (40,), weight, 1e-6)),
        (rotate(heads, *angles), heads * angles[0] + crossed * angles[1]),
        (silu(4 * rows), functional.silu(4 * rows)),
        (gate(4 * rows, rows), functional.silu(4 * rows) * rows),
    ]
    return all(torch.allclose(found, expected, atol=1e-5, rtol=1e-5) for found, expected in pairs)
