"""Matrices stored as int8 and int4: the values are those of the matrix that they stand for, and a row's bits its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from support.captured_once import captured_once
from support.families import build, config, greedy

from fusion.dag.cutting.cuts import split
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import DType, Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import infer
from fusion.dag.ir.serialise import validate
from fusion.dag.rewrites.quantise import Kind, Source, quantise
from fusion.runtime.capture.capture import variables_from_module
from fusion.runtime.capture.quantised_weights import quantised_read
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.planes.plane import Piece
from fusion.runtime.planes.products import machine_code, quantised_matrices
from fusion.runtime.planes.products.packed import in_blocks, is_batch_invariant
from fusion.runtime.planes.products.quantised import InBlocks, dequantised, embedding, linear
from fusion.runtime.planes.products.quantised_code import product
from fusion.runtime.planes.torch_decoding import TorchDecodingStage

POSITIONS = 64
MIXTURES = ("mixtral", "gpt-oss")
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def stored(bits: int, rows: int, columns: int, group: int, half: bool, minimums: bool) -> Parts:
    chance = torch.Generator().manual_seed(bits + rows)
    dtype = torch.float16 if half else torch.float32
    if bits == 8:
        weight = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=chance)
    else:
        weight = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=chance)
    scales = (torch.randn(rows, columns // group, generator=chance) * 0.02).to(dtype)
    return weight, scales, (torch.randn(scales.shape, generator=chance) * 0.1).to(dtype) if minimums else None


def blocks(parts: Parts) -> tuple[InBlocks, Parts]:
    weight, scales, minimums = parts
    code = product(
        8 if weight.dtype == torch.int8 else 4, scales.dtype == torch.float16, minimums is not None
    )
    assert code is not None, "no machine code here: is llvmlite installed?"
    laid = in_blocks(weight), in_blocks(scales), None if minimums is None else in_blocks(minimums)
    columns = weight.shape[1] * (1 if weight.dtype == torch.int8 else 2)
    return InBlocks(code, len(weight), columns, scales.shape[1]), laid


def number_by_number(
    weight: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None
) -> torch.Tensor:
    """What the op-set says that a stored matrix stands for, written out; float64."""
    rows, groups = scales.shape
    columns = weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1)
    found = torch.zeros(rows, columns, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            scale = float(scales[row, column * groups // columns])
            if weight.dtype == torch.uint8:
                byte = int(weight[row, column // 2])
                q = byte >> 4 if column % 2 else byte & 15
            else:
                q = int(weight[row, column])
            if minimums is not None:
                found[row, column] = scale * q + float(minimums[row, column * groups // columns])
            else:
                found[row, column] = scale * (q - 8 if weight.dtype == torch.uint8 else q)
    return found


KINDS = [(bits, half, minimums) for bits in (8, 4) for half in (True, False) for minimums in (False, True)]


@pytest.mark.parametrize(("bits", "half", "minimums"), KINDS)
def test_products_and_rows_are_those_of_the_matrix_that_is_meant(
    bits: int, half: bool, minimums: bool
) -> None:
    torch.manual_seed(0)
    for rows, columns, group in ((19, 64, 32), (16, 24, 6), (1, 48, 16)):
        parts = stored(bits, rows, columns, group, half, minimums)
        meant = number_by_number(*parts)
        torch.testing.assert_close(dequantised(*parts), meant.float(), rtol=1e-6, atol=1e-6)
        made, laid = blocks(parts)
        ids = torch.tensor([[0, rows - 1], [rows // 2, 0]])
        bias = torch.randn(rows)
        for count in range(1, 8):
            given = torch.randn(1, count, columns)
            expected = (given.double() @ meant.t() + bias).float()
            for found in (linear(given, *parts, bias), made.linear(given, *laid, bias)):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(embedding(*parts, ids, torch.float32), dequantised(*parts)[ids])
        assert torch.equal(made.embedding(*laid, ids, torch.float32), dequantised(*parts)[ids])


@pytest.mark.parametrize(("bits", "half", "minimums"), KINDS)
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(
    bits: int, half: bool, minimums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, laid = blocks(stored(bits, 200, 96, 32, half, minimums))
    given = torch.randn(1, 40, 96)
    assert is_batch_invariant(lambda rows: made.linear(rows, *laid, None), 96, given)
    whole = made.linear(given, *laid, None)
    assert all(
        torch.equal(made.linear(given[:, n : n + 1], *laid, None), whole[:, n : n + 1]) for n in range(40)
    )
    monkeypatch.setattr(machine_code, "_THREAD_MULTIPLY_ADDS", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(made.linear(given, *laid, None), whole)


def test_the_order_of_the_sums_is_the_one_that_is_written() -> None:
    """So any machine has the same bits: a chain of fused multiply-adds for each group, then one with its scale."""
    made, laid = blocks(parts := stored(8, 16, 64, 32, True, False))
    given = torch.randn(1, 64)
    weight, scales, _ = parts
    # A float64 holds the product of two float32 numbers; what the sum then loses to rounding twice is rarer than 2 ** -28.
    total = torch.zeros(16)
    for group in range(2):
        inner = torch.zeros(16)
        for column in range(32 * group, 32 * group + 32):
            inner = (given[0, column].double() * weight[:, column] + inner.double()).float()
        total = (inner.double() * scales[:, group] + total.double()).float()
    assert torch.equal(made.linear(given, *laid, None)[0], total)


def test_half_precision_comes_and_goes() -> None:
    made, laid = blocks(parts := stored(4, 32, 64, 32, True, True))
    bias = torch.randn(32).bfloat16()
    given = torch.randn(2, 3, 64).bfloat16()
    found = made.linear(given, *laid, bias)
    assert found.dtype == torch.bfloat16 and found.shape == (2, 3, 32)
    exact = given.float() @ dequantised(*parts).t() + bias.float()
    torch.testing.assert_close(found.float(), exact, rtol=1e-2, atol=1e-2)
    assert (
        torch.equal(found, linear(given, *parts, bias))
        or (found - linear(given, *parts, bias)).abs().max() < 0.1
    )
    with pytest.raises(IndexError):
        made.embedding(*laid, torch.tensor([-1]), torch.float32)
    with pytest.raises(IndexError):
        made.embedding(*laid, torch.tensor([32]), torch.float32)


# --- hostile graphs

X = Input("x", TensorType((1, 3, 64), "float32"))
GOOD = {
    "w": ((16, 64), "int8"),
    "s": ((16, 2), "float16"),
    "m": ((16, 2), "float16"),
    "b": ((16,), "float32"),
}
HOSTILE: list[tuple[str, dict[str, tuple[tuple[int, ...], str]]]] = [
    ("of rank 2", {"w": ((16, 64), "uint8")}), ("of rank 2", {"w": ((1024,), "int8")}), ("of rank 2", {"s": ((32,), "float16")}),
    ("float32 or float16", {"s": ((16, 2), "int8")}), ("float32 or float16", {"s": ((16, 2), "float64")}),
    ("3 groups", {"s": ((16, 3), "float16")}), ("16 groups", {"s": ((16, 16), "float16")}), ("no group", {"s": ((16, 0), "float16")}),
    ("rows of weight and scales", {"s": ((8, 2), "float16")}), ("input features", {"w": ((16, 32), "int8")}),
    ("0 columns", {"w": ((16, 0), "int8")}), ("minimums", {"m": ((16, 1), "float16")}), ("minimums", {"m": ((16, 2), "float32")}),
    ("bias", {"b": ((8,), "float32")}), ("bias", {"b": ((16,), "float16")}),
]  # fmt: skip


def one_product(sizes: dict[str, tuple[tuple[int, ...], str]], result: tuple[int, ...] = (1, 3, 16)) -> Graph:
    variables = tuple(Variable(name, TensorType(*type_)) for name, type_ in sizes.items())
    args = Ref("x"), Ref("w"), Ref("s"), Ref("m"), Ref("b")
    node = Node("y", "fusion.linear_int8", args, (TensorType(result, "float32"),))
    return Graph((X,), variables, (node,), (Ref("y"),), ())


def test_the_good_one_is_taken() -> None:
    validate(one_product(GOOD))


@pytest.mark.parametrize(("why", "changed"), HOSTILE, ids=[f"{n}-{w}" for n, (w, _) in enumerate(HOSTILE)])
def test_sizes_that_do_not_fit_are_refused(why: str, changed: dict[str, Any]) -> None:
    with pytest.raises(GraphError, match=why):
        validate(one_product({**GOOD, **changed}))


def test_another_result_and_another_dtype_are_refused() -> None:
    with pytest.raises(GraphError, match="gives"):
        validate(one_product(GOOD, (1, 3, 17)))
    types = {
        Ref("t"): TensorType((4, 64), "int8"),
        Ref("s"): TensorType((4, 2), "float32"),
        Ref("i"): TensorType((3,), "int64"),
    }
    table = Ref("t"), Ref("s"), None
    assert infer("fusion.embedding_int8", (*table, Ref("i"), DType("float16")), types)[0].shape == (3, 64)
    for indices, dtype in ((Ref("s"), "float32"), (Ref("i"), "int8")):
        with pytest.raises(GraphError, match="indices"):
            infer("fusion.embedding_int8", (*table, indices, DType(dtype)), types)


def odd_stage(graph: Graph, values: dict[str, torch.Tensor]) -> torch.Tensor:
    validate(graph)
    stage = TorchDecodingStage(split(graph, ())[0], values)
    stage.open("s", 4)
    given = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(1))
    return stage.run([Piece("s", 0, {"x": given})])[0]["result/0"]


def test_a_matrix_that_something_else_reads_too_is_read_as_it_is_stored() -> None:
    """A graph that nobody would capture, but anybody may send."""
    weight, scales, minimums = stored(8, 16, 64, 32, True, True)
    assert minimums is not None
    values = {"w": weight, "s": scales, "m": minimums, "b": torch.zeros(16)}
    plain = one_product(GOOD)
    expected = odd_stage(plain, values)
    wide = TensorType((16, 64), "float32")
    also = Node("z", "aten.to.dtype", (Ref("w"), DType("float32")), (wide,))
    total = Node("t", "aten.sum", (Ref("z"), None), (TensorType((), "float32"),))
    sums = Node("e", "aten.add.Tensor", (Ref("y"), Ref("t"), 1), plain.nodes[0].results)
    odd = Graph(plain.inputs, plain.variables, (*plain.nodes, also, total, sums), (Ref("e"),), ())
    torch.testing.assert_close(odd_stage(odd, values), expected + weight.float().sum(), rtol=1e-4, atol=1e-2)


# --- whole models


def large(family: str) -> Any:
    """With matrices of experts in whole groups of 32."""
    found = config(family)
    if family in MIXTURES:
        found.intermediate_size = 96
    return found


@cache
def served(family: str, kind: Kind) -> tuple[Any, Graph, dict[str, torch.Tensor], tuple[Source, ...]]:
    module = build(large(family))
    # At as many positions as other tests capture it at.
    graph = captured_once(module, training=False, maximum_sequence=module.config.max_position_embeddings)
    graph = serving_graph(graph, maximum_sequence=POSITIONS)
    found = quantise(graph, kind)
    values = variables_from_module(module)
    read = quantised_read(lambda variables: {v.name: values[v.name] for v in variables}, found.sources)
    return module, found.graph, read(found.graph.variables), found.sources


def stages_of(graph: Graph, values: dict[str, torch.Tensor], count: int) -> list[TorchDecodingStage]:
    cuts = [len(graph.nodes) * i // count for i in range(1, count)]
    return [TorchDecodingStage(stage, values) for stage in split(graph, cuts)]


def run(
    stages: list[TorchDecodingStage], chunks: dict[str, tuple[int, list[int]]]
) -> dict[str, torch.Tensor]:
    """The logits of each session's last position."""
    values = {
        name: {"input_ids": torch.tensor([ids]), "position_ids": torch.arange(start, start + len(ids))[None]}
        for name, (start, ids) in chunks.items()
    }
    for stage in stages:
        pieces = [Piece(name, chunks[name][0], values[name]) for name in chunks]
        for name, made in zip(chunks, stage.run(pieces), strict=True):
            values[name].update(made)
    return {name: found["result/0"][0, -1] for name, found in values.items()}


def answer(stages: list[TorchDecodingStage], prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    for stage in stages:
        stage.open("answer", POSITIONS)
    logits = [run(stages, {"answer": (0, prompt)})["answer"]]
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < count:
        logits.append(run(stages, {"answer": (len(prompt) + len(tokens) - 1, tokens[-1:])})["answer"])
        tokens.append(int(logits[-1].argmax()))
    return tokens, torch.stack(logits)


CASES = [
    pytest.param("llama", "int8", marks=pytest.mark.slow),
    ("gpt2", "int8"),
    pytest.param("llama", "int4", marks=pytest.mark.slow),
    pytest.param("gpt2", "int4", marks=pytest.mark.slow),
    ("mixtral", "int4"),
    pytest.param("mixtral", "int8", marks=pytest.mark.slow),
    pytest.param("gpt-oss", "int8", marks=pytest.mark.slow),  # whose matrices lie the other way round
    pytest.param("gpt-oss", "int4", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_three_stages_answer_as_transformers_with_the_matrices_that_are_meant(
    family: str, kind: Kind
) -> None:
    module, graph, values, sources = served(family, kind)
    ops = {node.op for node in graph.nodes}
    assert {f"fusion.linear_{kind}", "fusion.embedding_int8"} <= ops and "fusion.expert_linear" not in ops
    assert (f"fusion.expert_linear_{kind}" in ops) == (family in MIXTURES)
    meant = build(large(family))
    own = dict(variables_from_module(meant))
    for source in sources:
        parts = [*(values[name] for name in source.names), None][:3]
        matrix = dequantised(*parts)  # type: ignore[arg-type]
        own[source.variable.name].copy_(matrix.mT if source.transposed else matrix)
    prompt = [3, 141, 59, 26, 53, 58, 97]
    expected, exact = greedy(meant, prompt, 12)
    tokens, logits = answer(stages_of(graph, values, 3), prompt, 12)
    assert tokens == expected
    assert (logits - exact).abs().max() <= 1e-4 * exact.abs().max()
    assert torch.equal(logits, answer(stages_of(graph, values, 1), prompt, 12)[1])
    assert greedy(module, prompt, 12)[1].sub(exact).abs().max() > 1e-3, "nothing was quantised"


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_sessions_together_get_what_they_get_alone(family: str, kind: Kind) -> None:
    _, graph, values, _ = served(family, kind)
    compare_company(graph, values)


def compare_company(graph: Graph, values: dict[str, torch.Tensor]) -> None:
    stages = stages_of(graph, values, 2)
    assert all(stage.batched for stage in stages)
    chance = random.Random(5)
    texts = {f"s{i}": [chance.randrange(256) for _ in range(6 + 5 * i)] for i in range(5)}
    alone = {}
    for name, ids in texts.items():
        for stage in stages:
            stage.open(name, POSITIONS)
        alone[name] = run(stages, {name: (0, ids[:4])}), run(stages, {name: (4, ids[4:])})
        for stage in stages:
            stage.open(name, POSITIONS)
    both: list[Callable[[list[int]], tuple[int, list[int]]]] = [
        lambda ids: (0, ids[:4]),
        lambda ids: (4, ids[4:]),
    ]
    for turn, piece in enumerate(both):
        found = run(stages, {name: piece(ids) for name, ids in texts.items()})
        assert all(torch.equal(found[name], alone[name][turn][name]) for name in texts)


@pytest.mark.parametrize(("rows", "packed"), [(1, False), (17, False), (112, True), (125, True)])
def test_blocks_do_not_take_many_times_the_bytes_of_a_matrix(rows: int, packed: bool) -> None:
    types = {"w": TensorType((rows, 64), "int8"), "s": TensorType((rows, 2), "float16")}
    given = Input("x", TensorType((1, 4, 64), "float32"))
    args = (Ref("x"), Ref("w"), Ref("s"), None, None)
    made = infer("fusion.linear_int8", args, {Ref("x"): given.type, **{Ref(n): t for n, t in types.items()}})
    variables = tuple(Variable(name, type_, trainable=False) for name, type_ in types.items())
    graph = Graph((given,), variables, (Node("y", "fusion.linear_int8", args, made),), (Ref("y"),))
    matrices = quantised_matrices.QuantisedMatrices(graph, torch.device("cpu"))
    weight = torch.zeros(rows, 64, dtype=torch.int8)
    assert (matrices.prepack("w", weight) is not weight) == packed == ("y" in matrices.products)
    assert matrices.prepack("w", weight).numel() <= weight.numel() * 9 / 8


def test_without_machine_code_the_values_are_the_same_and_company_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, graph, values, _ = served("llama", "int8")
    _, expected = answer(stages_of(graph, values, 1), [1, 2, 3], 4)
    monkeypatch.setattr(quantised_matrices, "product", lambda *_: None)
    _, found = answer(stages_of(graph, values, 1), [1, 2, 3], 4)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    compare_company(graph, values)
