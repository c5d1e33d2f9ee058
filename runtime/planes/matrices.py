"""The variables of a stage that decodes, laid out as it reads them fastest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusion.dag.ir.graph import Graph, Ref
from fusion.runtime.planes.experts import (
    EXPERT_LINEAR,
    pack_experts,
    packable_experts,
    packed_expert_linear,
    padded_expert_linear,
)
from fusion.runtime.planes.packed import addmm, linear, pack, packable, row_by_row, rows_agree
from fusion.runtime.planes.plane import Tensors
from fusion.runtime.planes.quantised import StoredMatrices
from fusion.runtime.planes.stage_values import checked


class Matrices:
    """The variables of a stage as decoding reads them fastest: the matrices of linear layers and of experts packed, where the
    library does that here and a row's product has the same bits in any company (`rows_agree`)."""

    def __init__(self, graph: Graph, variables: Tensors, device: torch.device) -> None:
        self._graph = graph
        self._packed: set[str] = set()
        self.laid_out: dict[str, Any] = {}  # tensors, and packed experts
        self._wanted = wanted = packable(graph)
        experts = packable_experts(graph)
        self._stored = StoredMatrices(graph, device)
        self.rows_agree = self._stored.rows_agree and all(
            isinstance(node.args[2], Ref) and node.args[2].name in wanted.keys() | experts.keys()
            for node in graph.nodes
            if node.op in ("aten.addmm", EXPERT_LINEAR)
        )
        self._agree: dict[tuple[tuple[int, ...], torch.dtype], bool] = {}
        for variable in graph.variables:
            name, value = variable.name, checked(variables, variable).detach().to(device)
            packed: Any = None
            if name in wanted:
                matrix = value.t() if wanted[name] else value
                packed = pack(matrix)
                self._require_agreement(matrix, packed)
            elif name in experts:
                packed = pack_experts(value, transposed=experts[name])
                matrix = value[0].t() if experts[name] else value[0]
                self._require_agreement(matrix, None if packed is None else packed.matrices[0])
            if packed is not None:
                self._packed.add(name)
            own = self._stored.laid_out(name, value.contiguous()) if packed is None else packed
            self.laid_out[name] = own

    def _require_agreement(self, matrix: torch.Tensor, packed: torch.Tensor | None) -> None:
        kind = tuple(matrix.shape), matrix.dtype
        if kind not in self._agree:
            self._agree[kind] = self._agrees(matrix, packed)
        self.rows_agree &= self._agree[kind]

    def _agrees(self, matrix: torch.Tensor, packed: torch.Tensor | None) -> bool:
        product = torch._C._nn.linear if packed is None else linear
        used = matrix if packed is None else packed
        return rows_agree(lambda rows: product(rows, used, None), matrix.shape[1], matrix)

    def products(self, *, together: bool) -> dict[str, Callable[..., torch.Tensor]]:
        """What computes which node; `together`: sequences are run end to end."""
        found = dict(self._stored.products)
        for node in self._graph.nodes:
            match node.op, *node.args:
                case "aten.linear", _, Ref() as matrix, _:
                    if matrix.name in self._packed:
                        found[node.name] = linear
                    elif together and matrix.name not in self._wanted:
                        found[node.name] = row_by_row
                case "aten.addmm", _, _, Ref() as matrix, *_ if matrix.name in self._packed:
                    found[node.name] = addmm
                case "fusion.expert_linear", _, _, Ref() as matrix, *_:
                    packed = matrix.name in self._packed
                    found[node.name] = packed_expert_linear if packed else padded_expert_linear
        return found
