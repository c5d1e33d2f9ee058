"""Products of rows with the stored matrix that each has chosen (`fusion.expert_linear_int8`, `_int4`): those of `quantised`, one
an expert, as `experts` has them of floats.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusion.runtime.planes.products.experts import by_expert
from fusion.runtime.planes.products.quantised import linear

Tensor = torch.Tensor
Linear = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


def of_experts(multiply: Linear, outputs: int | None = None) -> Callable[..., Tensor]:
    """The op with what multiplies rows with one stored matrix. `outputs`: of a matrix that is laid out otherwise than in rows."""

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
            least = None if minimums is None else minimums[expert]
            added = None if bias is None else bias[expert]
            return multiply(group, weight[expert], scales[expert], least, added)

        return by_expert(
            rows, ids, first, len(weight), weight.shape[1] if outputs is None else outputs, product
        )

    return expert_linear


expert_linear = of_experts(linear)  # on any device, a tile of a matrix as floats at a time
