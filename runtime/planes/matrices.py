"""The variables of a decoding stage, prepacked for its products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusion.dag.cutting.costs import type_bytes
from fusion.dag.ir.graph import Graph, Ref
from fusion.dag.rewrites.experts import EXPERT_LINEAR
from fusion.runtime.planes.kernels.available import kernels
from fusion.runtime.planes.plane import Tensors
from fusion.runtime.planes.products import half_products
from fusion.runtime.planes.products.experts import (
    fixed_expert_linear,
    pack_experts,
    packable_experts,
    packed_expert_linear,
    padded_expert_linear,
)
from fusion.runtime.planes.products.half import HALF, ByPiece, is_half_batch_invariant
from fusion.runtime.planes.products.packed import (
    MIN_ROWS,
    addmm,
    embedding,
    is_batch_invariant,
    linear,
    pack,
    packable,
    padding_rows,
    row_by_row,
)
from fusion.runtime.planes.products.quantised_matrices import QuantisedMatrices
from fusion.runtime.planes.stage_values import checked_variable

# The padding of blocks is in no memory budget: a stage of very many matrices of one row must not gain much by it.
_MAX_PADDING_BYTES = 64 << 20
_MAX_PADDING_SHARE = 8  # or this share of the bytes of a stage's variables, if that is more


class Matrices:
    """The variables of a decoding stage (`prepacked`): float32 matrices of linear layers and of experts are packed, where this machine
    supports that. Matrices in half precision stay as they are. Where the library's products with them are batch-invariant, machine code with
    the same bits is used if there is any (`half_products`); otherwise, on a CPU, each piece has a product of its own (`by_piece`).

    `batch_invariant`: whether all products are, from `least_rows` rows on (1 or MIN_ROWS). `fixed_rows`: single positions always run in
    batches of so many rows, which makes every library batch-invariant; 0: they do not."""

    def __init__(self, graph: Graph, variables: Tensors, device: torch.device, fixed_rows: int = 0) -> None:
        self._graph = graph
        self._fixed_rows = fixed_rows
        self._kernels = kernels() if device.type == "cuda" else None
        self._linears, self._experts = packable(graph), packable_experts(graph)
        self._unpacked_linears = _linear_matrices(graph) - self._linears.keys()
        self._quantised = QuantisedMatrices(graph, device)
        self.by_piece = ByPiece()
        self._packed: set[str] = set()
        self._invariant_halves: set[str] = set()  # matrices in half precision with batch-invariant products
        self._by_piece: set[str] = set()
        self._half_code: set[str] = set()  # of these, those that machine code multiplies with the same bits
        self._invariant_library: dict[tuple[tuple[int, ...], torch.dtype], bool] = {}
        self._invariant_half: dict[tuple[tuple[int, ...], torch.dtype, bool], bool] = {}
        total = sum(type_bytes(variable.type) for variable in graph.variables)
        self._padding_budget = max(_MAX_PADDING_BYTES, total // _MAX_PADDING_SHARE)
        self.batch_invariant = bool(fixed_rows) or (
            self._quantised.batch_invariant and self._covers_all_products()
        )
        self.prepacked: dict[str, Any] = {}  # tensors, and packed matrices and experts
        for variable in graph.variables:  # one at a time: `variables` may read each from a file
            value = checked_variable(variables, variable).detach().to(device)
            self.prepacked[variable.name] = self._prepack(variable.name, value)
        multiplied = self._linears.keys() | self._unpacked_linears | self._experts.keys()
        by_library = multiplied - self._invariant_halves - self._by_piece - self._packed
        self.least_rows = MIN_ROWS if by_library and not fixed_rows else 1

    def _covers_all_products(self) -> bool:
        """Whether every product is with a matrix that is checked here."""
        known = self._linears.keys() | self._experts.keys()
        return all(
            isinstance(node.args[2], Ref) and node.args[2].name in known
            for node in self._graph.nodes
            if node.op in ("aten.addmm", EXPERT_LINEAR)
        )

    def _prepack(self, name: str, value: torch.Tensor) -> Any:
        if not self._fixed_rows and value.dtype in HALF and self._keep_half(name, value):
            return value.contiguous()
        packed = None
        if not self._fixed_rows and (name in self._linears or name in self._experts):
            packed = self._pack(name, value)
        return self._quantised.prepack(name, value.contiguous()) if packed is None else packed

    def _keep_half(self, name: str, value: torch.Tensor) -> bool:
        """Note how a matrix in half precision is multiplied. Whether it stays as it is, and its products are batch-invariant, or by piece."""
        is_expert = name in self._experts
        if not is_expert and name not in self._linears and name not in self._unpacked_linears:
            return False
        transposed = self._experts[name] if is_expert else self._linears.get(name, False)
        matrix = value[0] if is_expert else value
        invariant = self._is_half_invariant(matrix, transposed)
        if invariant and half_products.in_machine_code(matrix, transposed=transposed):
            self._half_code.add(name)
        elif is_expert:
            return False
        (self._invariant_halves if invariant else self._by_piece).add(name)
        return True

    def _is_half_invariant(self, matrix: torch.Tensor, transposed: bool) -> bool:
        kind = tuple(matrix.shape), matrix.dtype, transposed
        if kind not in self._invariant_half:
            self._invariant_half[kind] = is_half_batch_invariant(matrix, is_addmm=kind[2])
        return self._invariant_half[kind]

    def _pack(self, name: str, value: torch.Tensor) -> Any:
        """A packed matrix, or those of experts; None where they cannot be packed, or the padding exceeds its budget: then the library's
        products are used."""
        is_expert = name not in self._linears
        transposed = self._experts[name] if is_expert else self._linears[name]
        matrices = value if is_expert else value[None]
        first_matrix = matrices[0].t() if transposed else matrices[0]
        added_bytes = (
            len(matrices) * padding_rows(first_matrix.shape[0]) * first_matrix.shape[1] * value.element_size()
        )
        packed = None
        if added_bytes <= self._padding_budget:
            packed = pack_experts(value, transposed=transposed) if is_expert else pack(first_matrix)
        if packed is None:
            self._check_library_product(first_matrix)
        else:
            self._packed.add(name)
            self._padding_budget -= added_bytes
        return packed

    def _check_library_product(self, matrix: torch.Tensor) -> None:
        """Test the library's products with a matrix (out, in)."""
        kind = tuple(matrix.shape), matrix.dtype
        if kind not in self._invariant_library:
            self._invariant_library[kind] = is_batch_invariant(
                lambda rows: torch._C._nn.linear(rows, matrix, None), matrix.shape[1], matrix
            )
        self.batch_invariant &= self._invariant_library[kind]

    def products(self, *, batched: bool) -> dict[str, Callable[..., torch.Tensor]]:
        """Functions by the node that they compute in place of its operator. `batched`: sequences run end to end."""
        functions = dict(self._quantised.products)
        for node in self._graph.nodes:
            match node.op, *node.args:
                case "aten.linear", _, Ref() as matrix, _:
                    if (product := self._linear(matrix.name, batched)) is not None:
                        functions[node.name] = product
                case "aten.embedding", Ref() as table, *_ if table.name in self._packed:
                    functions[node.name] = embedding
                case "aten.addmm", _, _, Ref() as matrix, *_ if matrix.name in self._packed:
                    functions[node.name] = addmm
                case "aten.addmm", _, _, Ref() as matrix, *_ if matrix.name in self._half_code:
                    functions[node.name] = half_products.addmm
                case "aten.addmm", _, _, Ref() as matrix, *_ if batched and matrix.name in self._by_piece:
                    functions[node.name] = self.by_piece.addmm
                case "fusion.expert_linear", _, _, Ref() as matrix, *_:
                    functions[node.name] = self._expert_linear(matrix.name, batched)
        return functions

    def _linear(self, matrix: str, batched: bool) -> Callable[..., torch.Tensor] | None:
        """None: the operator itself."""
        if matrix in self._packed:
            return linear
        if matrix in self._invariant_halves:
            product = half_products.linear if matrix in self._half_code else torch._C._nn.linear
            return self.by_piece.unless_contiguous(product) if batched else product
        if batched and matrix in self._by_piece:
            return self.by_piece.linear
        if batched and not self._fixed_rows and matrix not in self._linears:
            return row_by_row
        return None

    def _expert_linear(self, matrix: str, batched: bool) -> Callable[..., torch.Tensor]:
        if matrix in self._packed:
            return packed_expert_linear
        if matrix in self._half_code:
            return half_products.expert_linear
        if self._kernels is not None:
            kernel: Callable[..., torch.Tensor] = self._kernels.experts.expert_linear
            return kernel
        if self._fixed_rows and batched:
            return fixed_expert_linear(self._fixed_rows)
        return padded_expert_linear


def _linear_matrices(graph: Graph) -> set[str]:
    """The variables that an `aten.linear` reads as its matrix."""
    matrices = {
        node.args[1].name
        for node in graph.nodes
        if node.op == "aten.linear" and isinstance(node.args[1], Ref)
    }
    return matrices & graph.variable_names
