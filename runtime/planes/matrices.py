"""The variables of a stage that decodes, laid out as it reads them fastest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusion.dag.cutting.costs import type_bytes
from fusion.dag.ir.graph import Graph, Ref
from fusion.dag.rewrites.experts import EXPERT_LINEAR
from fusion.runtime.planes.input_sizes import HALF
from fusion.runtime.planes.kernels.available import kernels
from fusion.runtime.planes.plane import Tensors
from fusion.runtime.planes.products.experts import (
    fixed_expert_linear,
    pack_experts,
    packable_experts,
    packed_expert_linear,
    padded_expert_linear,
)
from fusion.runtime.planes.products.half import ByPiece, is_batch_invariant
from fusion.runtime.planes.products.packed import (
    FEW_ROWS,
    addmm,
    embedding,
    filling,
    linear,
    pack,
    packable,
    row_by_row,
    rows_agree,
)
from fusion.runtime.planes.products.stored import StoredMatrices
from fusion.runtime.planes.stage_values import checked

# What blocks add is in nobody's account, so that a stage of very many matrices of one row must not gain much by it.
_SPARE_BYTES = 64 << 20
_SPARE_SHARE = 8  # or the share of a stage's variables that is more


class Matrices:
    """The variables of a stage as decoding reads them fastest: the float32 matrices of linear layers and of experts packed, where
    that can be had here. Those in half precision are left as they are where a row's product has the same bits in any company, or
    on a CPU in that of its own piece (`by_piece`).
    `rows_agree`: whether that holds for every matrix, for so many rows at once (`least_rows`, 1 or FEW_ROWS). `fixed_rows`: as many as
    are run always where positions come singly; it holds then whatever the library does."""

    def __init__(self, graph: Graph, variables: Tensors, device: torch.device, fixed_rows: int = 0) -> None:
        self._graph = graph
        self._fixed = fixed_rows
        self._kernels = kernels() if device.type == "cuda" else None
        self._wanted, self._experts = packable(graph), packable_experts(graph)
        self._tied = _linear_matrices(graph) - self._wanted.keys()
        self._stored = StoredMatrices(graph, device)
        self.by_piece = ByPiece()
        self._packed: set[str] = set()
        self._alone: set[str] = set()  # matrices whose products are the same for one row as for several
        self._by_piece: set[str] = set()
        self._agree: dict[tuple[tuple[int, ...], torch.dtype], bool] = {}
        self._invariant: dict[tuple[tuple[int, ...], torch.dtype, bool], bool] = {}
        total = sum(type_bytes(variable.type) for variable in graph.variables)
        self._spare_bytes = max(_SPARE_BYTES, total // _SPARE_SHARE)
        self.rows_agree = bool(fixed_rows) or (self._stored.rows_agree and self._knows_all_products())
        self.laid_out: dict[str, Any] = {}  # tensors, and packed matrices and experts
        for variable in graph.variables:  # one after the other, as `variables` may read each from a file
            value = checked(variables, variable).detach().to(device)
            self.laid_out[variable.name] = self._lay_out(variable.name, value)
        multiplied = self._wanted.keys() | self._tied | self._experts.keys()
        by_library = multiplied - self._alone - self._by_piece - self._packed
        self.least_rows = FEW_ROWS if by_library and not fixed_rows else 1

    def _knows_all_products(self) -> bool:
        """Whether there is no product but with matrices that are looked at here."""
        known = self._wanted.keys() | self._experts.keys()
        return all(
            isinstance(node.args[2], Ref) and node.args[2].name in known
            for node in self._graph.nodes
            if node.op in ("aten.addmm", EXPERT_LINEAR)
        )

    def _lay_out(self, name: str, value: torch.Tensor) -> Any:
        """A variable as it is kept."""
        if not self._fixed and value.dtype in HALF and (name in self._wanted or name in self._tied):
            (self._alone if self._is_invariant(name, value) else self._by_piece).add(name)
            return value.contiguous()
        packed = None
        if not self._fixed and (name in self._wanted or name in self._experts):
            packed = self._pack(name, value)
        return self._stored.laid_out(name, value.contiguous()) if packed is None else packed

    def _is_invariant(self, name: str, matrix: torch.Tensor) -> bool:
        kind = tuple(matrix.shape), matrix.dtype, self._wanted.get(name, False)
        if kind not in self._invariant:
            self._invariant[kind] = is_batch_invariant(matrix, added=kind[2])
        return self._invariant[kind]

    def _pack(self, name: str, value: torch.Tensor) -> Any:
        """A matrix, or those of experts, packed; None where that cannot be had, or would take more memory than there is for it:
        the library's products have to do then."""
        is_expert = name not in self._wanted
        transposed = self._experts[name] if is_expert else self._wanted[name]
        matrices = value if is_expert else value[None]
        each = matrices[0].t() if transposed else matrices[0]
        added = len(matrices) * filling(each.shape[0]) * each.shape[1] * value.element_size()
        packed = None
        if added <= self._spare_bytes:
            packed = pack_experts(value, transposed=transposed) if is_expert else pack(each)
        if packed is None:
            self._require_agreement(each)
        else:
            self._packed.add(name)
            self._spare_bytes -= added
        return packed

    def _require_agreement(self, matrix: torch.Tensor) -> None:
        """(out, in): of the library's own products."""
        kind = tuple(matrix.shape), matrix.dtype
        if kind not in self._agree:
            self._agree[kind] = rows_agree(
                lambda rows: torch._C._nn.linear(rows, matrix, None), matrix.shape[1], matrix
            )
        self.rows_agree &= self._agree[kind]

    def products(self, *, together: bool) -> dict[str, Callable[..., torch.Tensor]]:
        """What computes which node; `together`: sequences are run end to end."""
        found = dict(self._stored.products)
        for node in self._graph.nodes:
            match node.op, *node.args:
                case "aten.linear", _, Ref() as matrix, _:
                    if (product := self._linear(matrix.name, together)) is not None:
                        found[node.name] = product
                case "aten.embedding", Ref() as table, *_ if table.name in self._packed:
                    found[node.name] = embedding
                case "aten.addmm", _, _, Ref() as matrix, *_ if matrix.name in self._packed:
                    found[node.name] = addmm
                case "aten.addmm", _, _, Ref() as matrix, *_ if together and matrix.name in self._by_piece:
                    found[node.name] = self.by_piece.addmm
                case "fusion.expert_linear", _, _, Ref() as matrix, *_:
                    found[node.name] = self._expert_linear(matrix.name, together)
        return found

    def _linear(self, matrix: str, together: bool) -> Callable[..., torch.Tensor] | None:
        """None: the library's, as it is."""
        if matrix in self._packed:
            return linear
        if together and matrix in self._by_piece:
            return self.by_piece.linear
        if together and not self._fixed and matrix not in self._wanted.keys() | self._alone:
            return row_by_row
        return None

    def _expert_linear(self, matrix: str, together: bool) -> Callable[..., torch.Tensor]:
        if matrix in self._packed:
            return packed_expert_linear
        if self._kernels is not None:
            kernel: Callable[..., torch.Tensor] = self._kernels.experts.expert_linear
            return kernel
        if self._fixed and together:
            return fixed_expert_linear(self._fixed)
        return padded_expert_linear


def _linear_matrices(graph: Graph) -> set[str]:
    """The variables that some `aten.linear` reads as its matrix."""
    read = {
        node.args[1].name
        for node in graph.nodes
        if node.op == "aten.linear" and isinstance(node.args[1], Ref)
    }
    return read & graph.variable_names
