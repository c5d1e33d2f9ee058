"""What decoding lays out of a stage, and what that may add to its memory."""

from __future__ import annotations

import pytest
import torch

from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import infer
from fusion.runtime.planes import matrices
from fusion.runtime.planes.matrices import Matrices
from fusion.runtime.planes.products.experts import PackedExperts
from fusion.runtime.planes.products.packed import Packed


def with_experts(experts: int, linears: int) -> tuple[Graph, dict[str, torch.Tensor]]:
    """A product with each of so many small matrices, and one with those of experts."""
    row, ids = Input("x", TensorType((4, 8), "float32")), Input("ids", TensorType((4,), "int64"))
    shapes = {"experts": (experts, 8, 8), **{f"w{i}": (8, 8) for i in range(linears)}}
    types = {name: TensorType(shape, "float32") for name, shape in shapes.items()}
    known = {Ref("x"): row.type, Ref("ids"): ids.type, **{Ref(name): type_ for name, type_ in types.items()}}
    nodes = []
    for i in range(linears):
        args = (Ref("x"), Ref(f"w{i}"), None)
        nodes.append(Node(f"y{i}", "aten.linear", args, infer("aten.linear", args, known)))
    args = (Ref("x"), Ref("ids"), Ref("experts"), None, 0, experts, False)
    nodes.append(Node("y", "fusion.expert_linear", args, infer("fusion.expert_linear", args, known)))
    variables = tuple(Variable(name, type_) for name, type_ in types.items())
    graph = Graph((row, ids), variables, tuple(nodes), tuple(Ref(node.name) for node in nodes))
    return graph, {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("spare", "packed"), [(20, {"experts", "w0", "w1", "w2"}), (9, {"experts", "w0"}), (2, {"w0", "w1"})]
)
def test_packing_adds_no_more_than_its_allowance(
    spare: int, packed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = 8 * 8 * 4  # bytes of zeros that a matrix of 8 rows of 8 gets in a block of 16
    monkeypatch.setattr(matrices, "_MAX_PADDING_BYTES", spare * filled)
    monkeypatch.setattr(matrices, "_MAX_PADDING_SHARE", 1 << 20)
    graph, values = with_experts(experts=8, linears=3)
    found = Matrices(graph, values, torch.device("cpu"))
    assert {
        name for name, laid in found.prepacked.items() if isinstance(laid, Packed | PackedExperts)
    } == packed
    assert found.least_rows == (1 if len(packed) == 4 else 4)
    rows, ids = torch.randn(4, 8), torch.tensor([0, 7, 3, 3])
    product = found.products(batched=False)["y"]
    wanted = torch.stack([values["experts"][i] @ row for i, row in zip(ids.tolist(), rows, strict=True)])
    torch.testing.assert_close(product(rows, ids, found.prepacked["experts"], None, 0, 8, False), wanted)
