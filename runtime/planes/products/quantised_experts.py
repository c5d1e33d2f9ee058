"""Products of rows with the quantised matrix of the expert that each row is routed to (`fusion.expert_linear_int8`, `_int4`): one
product of `quantised` an expert, grouped as in `experts`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusion.runtime.planes.products.experts import by_expert
from fusion.runtime.planes.products.quantised import linear

Tensor = torch.Tensor
Linear = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


def expert_linear_by(multiply: Linear, outputs: int | None = None) -> Callable[..., Tensor]:
    """The operator, with `multiply` for one quantised matrix. `outputs`: columns of the result, where the matrix is packed."""

    def expert_linear(
        rows: Tensor,  # (rows, in)
        ids: Tensor,  # (rows,)
        weight: Tensor,  # (held, out, in) int8, or (held, out, in / 2) uint8
        scales: Tensor,  # (held, out, groups)
        minimums: Tensor | None,
        bias: Tensor | None,  # (held, out)
        first: int,
        of: int,
    ) -> Tensor:
        """(rows, out), in the dtype of the rows."""

        def product(group: Tensor, expert: int) -> Tensor:
            expert_minimums = None if minimums is None else minimums[expert]
            expert_bias = None if bias is None else bias[expert]
            return multiply(group, weight[expert], scales[expert], expert_minimums, expert_bias)

        return by_expert(
            rows, ids, first, len(weight), weight.shape[1] if outputs is None else outputs, product
        )

    return expert_linear


expert_linear = expert_linear_by(linear)  # on any device; dequantises a tile at a time
