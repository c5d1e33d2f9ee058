"""Products of rows with a matrix, for decoding: matrices packed once for oneDNN where that can be had.

Whoever decodes in a batch must get the bits that it gets alone. A product of one row goes another way through the library
than that of several, so there are always a few (`padded`); above one, a row's bits were the same however many rows there
were, and where, on every machine that we have seen. `rows_agree` looks whether that holds here. Four rows at least, because
matrices that no cache holds are read faster for four than for two (6.7 against 9.6 ms for 100 MB; one row with a plain
matrix: 8.0).

In half precision a library without instructions for it takes row after row, each by itself: then a row's product has the bits
of a run of one, which are those of any program that decodes, and nothing is padded or packed (`rows_agree` from one row on).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusion.dag.ir.graph import Graph, Ref

PACKING_BYTES = 12 << 10  # beside its own that a packed matrix was seen to take, at most
FEW_ROWS = 4  # at least, where a product of one row goes another way
_TRIED_ROWS = (1, 2, 3, FEW_ROWS, 5, 6, 8, 12, 16, 24, 40)
_PACKED_DTYPES = frozenset({torch.float32, torch.bfloat16})


def padded(rows: int, parts: int = 4, least: int = FEW_ROWS) -> int:
    """How many rows are run for `rows`: as they are where products agree from one row on (`least` 1); else four at least, and
    only so many counts between one power of two and the next, because the library makes code for each count that it meets,
    which takes milliseconds."""
    if least == 1:
        return rows
    step = max(2, (1 << (rows - 1).bit_length()) // (2 * parts))
    return max(least, -(-rows // step) * step)


def packable(graph: Graph) -> dict[str, bool]:
    """The variables that are read as the matrix of `aten.linear` and of nothing else, or of `aten.addmm` (True: its matrix
    is stored the other way round)."""
    read: dict[str, set[bool | None]] = {}
    for node in graph.nodes:
        for ref in node.refs():
            use: bool | None = None
            if node.op == "aten.linear" and ref == node.args[1] and ref != node.args[0]:
                use = False
            elif node.op == "aten.addmm" and ref == node.args[2] and ref not in node.args[:2]:
                bias = node.args[0]
                plain = node.args[3:] == (1, 1) and isinstance(bias, Ref)
                use = True if plain and isinstance(bias, Ref) and len(graph.types[bias].shape) == 1 else None
            read.setdefault(ref.name, set()).add(use)
    uses = {name: next(iter(found)) for name, found in read.items() if len(found) == 1}
    return {name: use for name, use in uses.items() if use is not None and name in graph.variable_names}


def pack(matrix: torch.Tensor) -> torch.Tensor | None:
    """(out, in) for `linear`; None where it cannot be packed here."""
    if matrix.device.type != "cpu" or matrix.dtype not in _PACKED_DTYPES or matrix.dim() != 2:
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous(), None)  # type: ignore[no-any-return]
    except (RuntimeError, AttributeError):
        return None


def linear(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """rows (..., in) with a packed (out, in): (..., out)."""
    return torch.ops.mkldnn._linear_pointwise(rows, matrix, bias, "none", [], "")  # type: ignore[no-any-return]


def addmm(bias: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor, *_: object) -> torch.Tensor:
    """`aten.addmm` with beta and alpha 1 and a packed matrix."""
    return linear(rows, matrix, bias)


def row_by_row(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`aten.linear` for a matrix that is not packed, such as one that is an embedding as well: each row by itself."""
    width = rows.shape[-1]
    found = [torch._C._nn.linear(row, matrix, bias) for row in rows.reshape(-1, 1, width)]
    return torch.cat(found).view(*rows.shape[:-1], matrix.shape[0])


def rows_agree(
    product: Callable[[torch.Tensor], torch.Tensor], width: int, like: torch.Tensor, least: int = FEW_ROWS
) -> bool:
    """Whether a row's product has the same bits among others as among `least`. `like`: dtype and device of the rows."""
    made = torch.Generator().manual_seed(0)
    most = _TRIED_ROWS[-1]
    rows = torch.randn(1, most, width, generator=made).to(like.device, like.dtype)
    order = torch.randperm(most, generator=made)
    whole = product(rows)
    return torch.equal(product(rows[:, order]), whole[:, order]) and all(
        torch.equal(product(rows[:, :count]), whole[:, :count])
        for count in _TRIED_ROWS[:-1]
        if count >= least
    )
