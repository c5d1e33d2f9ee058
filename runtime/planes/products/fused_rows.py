"""Fuses nodes of a graph that decodes on a CPU in float32 into calls of machine code (`row_code`): RMS norm, rotary positions
(Su et al. 2021, RoFormer) and SiLU gates (Shazeer 2020, SwiGLU).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from fusion.dag.ir.graph import Arg, Graph, Node, Ref
from fusion.runtime.planes.products import row_code
from fusion.runtime.planes.products.machine_code import LANES, Function, float_bits, run_blocks

_HALF = ("bfloat16", "float16")
_SILU_MULTIPLY_ADDS = 8  # an element of SiLU takes as long as so many multiply-adds


class Fused(NamedTuple):
    """The function and arguments that compute a node, and the earlier nodes that are not needed then. Where a pattern is cut between
    stages, its nodes are computed one by one, with the same bits."""

    function: Callable[..., torch.Tensor]
    args: tuple[Arg, ...]
    replaces: frozenset[str] = frozenset()


def fused_rows(graph: Graph, unfused: Collection[str]) -> dict[str, Fused]:
    """Fused nodes by name, without those of `unfused`. None for a model in half precision: what it computes in float32 must have the
    library's bits, because a difference in the last one may change a token."""
    if (
        any(each.dtype in _HALF for each in graph.types.values()) or not _is_supported()
    ):  # loading LLVM takes 100 MiB
        return {}
    patterns = _Patterns(graph, unfused)
    fused_nodes: dict[str, Fused] = {}
    for node in graph.nodes:
        if node.name not in unfused and (fused := patterns.fuse(node)) is not None:
            fused_nodes[node.name] = fused
    replaced = frozenset[str]().union(*(fused.replaces for fused in fused_nodes.values()))
    return {name: fused for name, fused in fused_nodes.items() if name not in replaced}


class _Patterns:
    def __init__(self, graph: Graph, unfused: Collection[str]) -> None:
        self._graph = graph
        self._unfused = {*unfused, *(ref.name for ref in graph.outputs)}

    def fuse(self, node: Node) -> Fused | None:
        match node.op, node.args:
            case "aten.rms_norm", (Ref() as rows, (int(),), Ref() as weight, epsilon) if self._are_float(
                rows, weight
            ):
                return Fused(rms_norm, (rows, weight, epsilon))
            case "aten.add.Tensor", (Ref() as left, Ref() as right, 1):
                return self._rotation(left, right)
            case "aten.silu", (Ref() as value,) if self._are_float(value):
                return Fused(silu, (value,))
            case "aten.mul.Tensor", (Ref() as left, Ref() as right):
                return self._gate(left, right) or self._gate(right, left)
        return None

    def _gate(self, silu: Ref, other: Ref) -> Fused | None:
        types = self._graph.types
        match self._single_use(silu, "aten.silu"):
            case Node(args=(Ref() as gate_value,)) if types[gate_value] == types[other] and self._are_float(
                gate_value
            ):
                return Fused(gate, (gate_value, other), frozenset({silu.name}))
        return None

    def _rotation(self, straight: Ref, crossed: Ref) -> Fused | None:
        """Matches x * cos + cat(-(second half of x), first half) * sin."""
        match self._single_use(straight, "aten.mul.Tensor"), self._single_use(crossed, "aten.mul.Tensor"):
            case Node(args=(Ref() as x, Ref() as cosines)), Node(args=(Ref() as rotated, Ref() as sines)):
                pass
            case _:
                return None
        match self._single_use(rotated, "aten.cat"):
            case Node(args=((Ref() as negated, Ref() as first), -1 | 3)):
                pass
            case _:
                return None
        match self._single_use(negated, "aten.neg"):
            case Node(args=(Ref() as second,)):
                pass
            case _:
                return None
        if not self._are_float(x, cosines, sines) or not self._has_rotary_shapes(x, cosines, sines):
            return None
        width = self._graph.types[x].shape[3]
        assert isinstance(width, int)
        if not self._is_half(first, x, 0, width // 2) or not self._is_half(second, x, width // 2, width):
            return None
        replaced = (straight, crossed, rotated, negated, first, second)
        return Fused(rotate, (x, cosines, sines), frozenset(ref.name for ref in replaced))

    def _has_rotary_shapes(self, x: Ref, *angles: Ref) -> bool:
        """Whether the shapes are (1, heads, positions, width) and (1, 1, positions, width)."""
        shape = self._graph.types[x].shape
        if len(shape) != 4 or not isinstance(shape[3], int) or shape[3] % 2:
            return False
        return all(self._graph.types[each].shape == (shape[0], 1, *shape[2:]) for each in angles)

    def _is_half(self, ref: Ref, x: Ref, start: int, end: int) -> bool:
        match self._single_use(ref, "aten.slice.Tensor"):
            case Node(args=(of, -1 | 3, begin, int() as stop, 1)):
                return of == x and (begin or 0) == start and min(stop, 2 * (end - start)) == end
        return False

    def _single_use(self, ref: Ref, op: str) -> Node | None:
        """The node that computes `ref`, where it has that operator and one use."""
        index = self._graph.node_index.get(ref.name)
        if index is None or ref.name in self._unfused or len(self._graph.uses.get(ref, ())) != 1:
            return None
        node = self._graph.nodes[index]
        return node if node.op == op else None

    def _are_float(self, *refs: Ref) -> bool:
        types = [self._graph.types[ref] for ref in refs]
        return all(each.dtype == "float32" and each.shape for each in types)


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float | None) -> torch.Tensor:
    """`aten.rms_norm` over the last dimension. ValueError where shapes or dtypes do not match: the code would read beyond them."""
    code = row_code.rms_norm()
    assert code is not None
    width = rows.shape[-1]
    if weight.shape != (width,) or not rows.dtype == weight.dtype == torch.float32:
        raise ValueError(f"rows {tuple(rows.shape)} and a weight {tuple(weight.shape)}")
    rows, weight = rows.contiguous(), weight.contiguous()
    output = torch.empty_like(rows)
    run_blocks(
        code,
        (rows.data_ptr(), weight.data_ptr(), output.data_ptr()),
        rows.numel() // width if width else 0,
        (width, float_bits(torch.finfo(torch.float32).eps if epsilon is None else epsilon)),
        multiply_adds=2 * rows.numel(),
        threads=torch.get_num_threads(),
    )
    return output


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
    output = torch.empty(batch, positions, count, width)
    threads, size = torch.get_num_threads(), output.numel()
    pointers = [
        (each.data_ptr(), each.element_size() * each.stride(0)) for each in (heads, cosines, sines, output)
    ]
    for index in range(batch):
        run_blocks(
            code,
            [address + index * batch_stride for address, batch_stride in pointers],
            positions,
            (count, width // 2, heads.stride(1), heads.stride(2)),
            multiply_adds=2 * size // batch,
            threads=threads,
        )
    return output.transpose(1, 2)


def gate(gate_value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """silu(given) * other, of one shape. ValueError as above."""
    code = row_code.gate()
    assert code is not None
    if gate_value.shape != other.shape:
        raise ValueError(f"a gate {tuple(gate_value.shape)} for {tuple(other.shape)}")
    return _silu(code, gate_value, other)


def silu(value: torch.Tensor) -> torch.Tensor:
    """`aten.silu`. ValueError as above."""
    code = row_code.silu()
    assert code is not None
    return _silu(code, value)


def _silu(code: Function, *inputs: torch.Tensor) -> torch.Tensor:
    """silu(first input), times the second where there is one."""
    if any(each.dtype != torch.float32 for each in inputs):
        raise ValueError("SiLU of float32 alone")
    inputs = tuple(each.contiguous() for each in inputs)
    output = torch.empty_like(inputs[0])
    run_blocks(
        code,
        [each.data_ptr() for each in (*inputs, output)],
        -(-output.numel() // LANES),
        (output.numel(),),
        multiply_adds=_SILU_MULTIPLY_ADDS * output.numel(),
        threads=torch.get_num_threads(),
    )
    return output


@cache
def _is_supported() -> bool:
    """Whether this machine has the machine code, and it agrees with the library to rounding."""
    if any(code() is None for code in (row_code.rms_norm, row_code.rotate, row_code.silu, row_code.gate)):
        return False
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows, weight, heads = random(3, 40), random(40), random(1, 5, 3, 40).transpose(1, 2)
    angles = [random(1, 1, 5, 40) for _ in range(2)]
    crossed = torch.cat([-heads[..., 20:], heads[..., :20]], -1)
    pairs: list[tuple[Any, Any]] = [
        (rms_norm(rows, weight, 1e-6), functional.rms_norm(rows, (40,), weight, 1e-6)),
        (rotate(heads, *angles), heads * angles[0] + crossed * angles[1]),
        (silu(4 * rows), functional.silu(4 * rows)),
        (gate(4 * rows, rows), functional.silu(4 * rows) * rows),
    ]
    return all(torch.allclose(result, expected, atol=1e-5, rtol=1e-5) for result, expected in pairs)
