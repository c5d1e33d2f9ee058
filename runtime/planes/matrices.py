"""The variables of a stage that decodes, laid out as it reads them fastest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusion.dag.cutting.costs import type_bytes
from fusion.dag.ir.graph import Graph, Ref
from fusion.dag.rewrites.experts import EXPERT_LINEAR
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
from fusion.runtime.planes.products.quantised import StoredMatrices
from fusion.runtime.planes.stage_values import checked

_HALF = frozenset({torch.bfloat16, torch.float16})
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
        self._packed: set[str] = set()
        self.laid_out: dict[str, Any] = {}  # tensors, and packed matrices and experts
        self._wanted = wanted = packable(graph)
        experts = packable_experts(graph)
        self._stored = StoredMatrices(graph, device)
        self.rows_agree = bool(fixed_rows) or (
            self._stored.rows_agree
            and all(
                isinstance(node.args[2], Ref) and node.args[2].name in wanted.keys() | experts.keys()
                for node in graph.nodes
                if node.op in ("aten.addmm", EXPERT_LINEAR)
            )
        )
        self._agree: dict[tuple[tuple[int, ...], torch.dtype], bool] = {}
        tied = _linear_matrices(graph) - wanted.keys()
        total = sum(type_bytes(variable.type) for variable in graph.variables)
        spare = max(_SPARE_BYTES, total // _SPARE_SHARE)
        self._alone: set[str] = set()  # matrices whose products are the same for one row as for several
        self.by_piece = ByPiece()
        self._by_piece: set[str] = set()
        invariant: dict[tuple[tuple[int, ...], torch.dtype, bool], bool] = {}
        for variable in graph.variables:  # one after the other, as `variables` may read each from a file
            name, value = variable.name, checked(variables, variable).detach().to(device)
            if fixed_rows:
                self.laid_out[name] = self._stored.laid_out(name, value.contiguous())
                continue
            packed: Any = None
            if value.dtype in _HALF and (name in wanted or name in tied):
                sort = tuple(value.shape), value.dtype, wanted.get(name, False)
                if sort not in invariant:
                    invariant[sort] = is_batch_invariant(value, added=sort[2])
                (self._alone if invariant[sort] else self._by_piece).add(name)
                self.laid_out[name] = value.contiguous()
                continue
            if name in wanted or name in experts:
                transposed = wanted[name] if name in wanted else experts[name]
                matrices = value[None] if name in wanted else value
                each = matrices[0].t() if transposed else matrices[0]
                added = len(matrices) * filling(each.shape[0]) * each.shape[1] * value.element_size()
                if added <= spare:
                    packed = pack(each) if name in wanted else pack_experts(value, transposed=transposed)
                if packed is None:
                    self._require_agreement(each)
                else:
                    self._packed.add(name)
                    spare -= added
            own = self._stored.laid_out(name, value.contiguous()) if packed is None else packed
            self.laid_out[name] = own
        few = (
            set()
            if self._fixed
            else (wanted.keys() | tied | experts.keys()) - self._alone - self._by_piece - self._packed
        )
        self.least_rows = FEW_ROWS if few else 1

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
                    if matrix.name in self._packed:
                        found[node.name] = linear
                    elif together and matrix.name in self._by_piece:
                        found[node.name] = self.by_piece.linear
                    elif (
                        together and not self._fixed and matrix.name not in self._wanted.keys() | self._alone
                    ):
                        found[node.name] = row_by_row
                case "aten.embedding", Ref() as table, *_ if table.name in self._packed:
                    found[node.name] = embedding
                case "aten.addmm", _, _, Ref() as matrix, *_ if matrix.name in self._packed:
                    found[node.name] = addmm
                case "aten.addmm", _, _, Ref() as matrix, *_ if together and matrix.name in self._by_piece:
                    found[node.name] = self.by_piece.addmm
                case "fusion.expert_linear", _, _, Ref() as matrix, *_:
                    if matrix.name in self._packed:
                        found[node.name] = packed_expert_linear
                    elif self._kernels is not None:
                        found[node.name] = self._kernels.experts.expert_linear
                    elif self._fixed and together:
                        found[node.name] = fixed_expert_linear(self._fixed)
                    else:
                        found[node.name] = padded_expert_linear
        return found


def _linear_matrices(graph: Graph) -> set[str]:
    """The variables that some `aten.linear` reads as its matrix."""
    read = {
        node.args[1].name
        for node in graph.nodes
        if node.op == "aten.linear" and isinstance(node.args[1], Ref)
    }
    return read & graph.variable_names
