"""Products with chosen matrices that are stored as int8 and int4: those of the matrices that are meant, a row's bits its own."""

from __future__ import annotations

import pytest
import torch

from fusion.dag.cutting.cuts import split
from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import infer
from fusion.dag.ir.serialise import validate
from fusion.runtime.capture.quantised_weights import quantised
from fusion.runtime.planes.plane import Piece
from fusion.runtime.planes.products import experts, quantised_experts, quantised_matrices
from fusion.runtime.planes.products.quantised import dequantised
from fusion.runtime.planes.torch_decoding import TorchDecodingStage

HELD, OUT, IN, FIRST, OF = 3, 48, 64, 2, 6
Values = dict[str, torch.Tensor]


def values_of(kind: str, dtype: torch.dtype = torch.float32) -> Values:
    torch.manual_seed(0)
    parts = quantised(torch.randn(HELD, OUT, IN), "int8" if kind == "int8" else "int4")
    return {**dict(zip("wsm", parts, strict=False)), "b": torch.randn(HELD, OUT).to(dtype)}


def meant(values: Values) -> torch.Tensor:
    return dequantised(values["w"], values["s"], values.get("m"))


def graph_of(values: Values, rows: TensorType, *, shown: bool = False) -> Graph:
    """One product; `shown`: whose scales are an output too."""
    types = {n: TensorType(tuple(v.shape), str(v.dtype).removeprefix("torch.")) for n, v in values.items()}
    inputs = Input("x", rows), Input("ids", TensorType(rows.shape[:1], "int64"))
    minimums = Ref("m") if "m" in values else None
    args = (Ref("x"), Ref("ids"), Ref("w"), Ref("s"), minimums, Ref("b"), FIRST, OF)
    known = {Ref(n): t for n, t in types.items()} | {Ref(i.name): i.type for i in inputs}
    op = "fusion.expert_linear_int8" if types["w"].dtype == "int8" else "fusion.expert_linear_int4"
    variables = tuple(Variable(n, t, trainable=False) for n, t in types.items())
    outputs = (Ref("y"), *([Ref("s")] if shown else []))
    return Graph(inputs, variables, (Node("y", op, args, infer(op, args, known)),), outputs, ())


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_products_are_those_with_the_matrices_that_are_meant(kind: str, dtype: str, count: int) -> None:
    values = values_of(kind, getattr(torch, dtype))
    rows = torch.randn(count, IN).to(getattr(torch, dtype))
    ids = torch.randint(0, OF, (count,))
    exact = experts.expert_linear(rows.float(), ids, meant(values), values["b"].float(), FIRST, OF, False)
    graph = graph_of(values, TensorType((count, IN), dtype))
    validate(graph)
    stage = TorchDecodingStage(split(graph, ())[0], values)
    stage.open("s", count)
    (laid,) = stage.run([Piece("s", 0, {"x": rows, "ids": ids})])
    plain = quantised_experts.expert_linear(rows, ids, *(values.get(n) for n in "wsmb"), FIRST, OF)
    close = 1e-5 if dtype == "float32" else 1e-2
    for found in (laid["result/0"], plain):
        assert found.dtype == rows.dtype and found.shape == (count, OUT)
        torch.testing.assert_close(found.float(), exact, rtol=close, atol=close * float(exact.abs().max()))
        assert not found[(ids < FIRST) | (ids >= FIRST + HELD)].any()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_row_has_the_same_bits_in_any_company(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_of(kind)
    rows, ids = torch.randn(40, IN), torch.randint(FIRST, FIRST + HELD, (40,))
    for code in (True, False):
        if not code:
            monkeypatch.setattr(quantised_matrices, "product", lambda *_: None)
        matrices = quantised_matrices.QuantisedMatrices(
            graph_of(values, TensorType((40, IN), "float32")), torch.device("cpu")
        )
        assert matrices.batch_invariant and ("y" in matrices.products) == code
        product = matrices.products.get("y", quantised_experts.expert_linear)
        laid = [matrices.prepack(n, values[n]) if n in values else None for n in "wsm"]
        assert sum(part.numel() for part in laid if part is not None) == sum(
            values[n].numel() for n in "wsm" if n in values
        )
        whole = product(rows, ids, *laid, values["b"], FIRST, OF)
        for at in range(40):
            alone = product(rows[at : at + 1], ids[at : at + 1], *laid, values["b"], FIRST, OF)
            assert torch.equal(alone[0], whole[at])


def test_what_something_else_reads_too_stays_as_it_is_stored() -> None:
    values = values_of("int8")
    graph = graph_of(values, TensorType((1, IN), "float32"), shown=True)
    matrices = quantised_matrices.QuantisedMatrices(graph, torch.device("cpu"))
    assert not matrices.products and matrices.prepack("w", values["w"]) is values["w"]
    few = graph_of({name: value[:, :8] for name, value in values.items()}, TensorType((1, IN), "float32"))
    assert not quantised_matrices.QuantisedMatrices(few, torch.device("cpu")).products, (
        "blocks would take twice the bytes"
    )
