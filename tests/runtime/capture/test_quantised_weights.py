"""Weights as int8 and int4: how far off, and read a tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from fusion.dag.ir.graph import TensorType, Variable
from fusion.dag.rewrites.expert_groups import part_of
from fusion.dag.rewrites.quantise import LAYOUTS, Kind, Source
from fusion.runtime.capture.quantised_weights import quantised, quantised_read
from fusion.runtime.job.errors import JobError
from fusion.runtime.planes.products.quantised import dequantised

ROWS, COLUMNS = 24, 96


def back(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return dequantised(*(*parts, None)[:3])  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1e-5, 0.02, 30.0])
def test_int8_is_off_by_half_a_step_at_most(size: float) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(ROWS, COLUMNS) * size
    matrix[0, :32] = 0
    parts = quantised(matrix, "int8")
    assert [tuple(p.shape) for p in parts] == [(ROWS, COLUMNS), (ROWS, 3)] and parts[0].min() >= -127
    step = matrix.view(ROWS, 3, 32).abs().amax(-1, keepdim=True) / 127
    off = (back(parts) - matrix).abs().view(ROWS, 3, 32)
    assert (off <= 0.505 * step + 2**-24).all()
    assert back(parts)[0, :32].abs().max() == 0


@pytest.mark.parametrize("size", [1e-3, 0.02, 30.0])
def test_int4_is_off_by_half_a_step_at_most(size: float) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(ROWS, COLUMNS) * size
    matrix[1] = 0.25
    parts = quantised(matrix, "int4")
    assert [tuple(p.shape) for p in parts] == [(ROWS, COLUMNS // 2), (ROWS, 3), (ROWS, 3)]
    least, most = matrix.view(ROWS, 3, 32).aminmax(dim=-1, keepdim=True)
    step = (most - least) / 15
    off = (back(parts) - matrix).abs().view(ROWS, 3, 32)
    assert (off <= 0.505 * step + 2**-10 * torch.maximum(least.abs(), step) + 2**-23).all()
    assert back(parts)[1].eq(0.25).all()


def test_numbers_of_the_store_come_back_as_they_are() -> None:
    torch.manual_seed(0)
    matrix = back(quantised(torch.randn(ROWS, COLUMNS), "int8"))
    torch.testing.assert_close(back(quantised(matrix, "int8")), matrix, rtol=2e-3, atol=0)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
def test_a_model_with_other_numbers_is_refused_in_one_line(kind: Kind, bad: float) -> None:
    variable = Variable("layer.weight", TensorType((ROWS, COLUMNS), "float32"))
    values = {"layer.weight": torch.randn(ROWS, COLUMNS)}
    values["layer.weight"][3, 40] = bad
    source = Source(variable, LAYOUTS[kind], transposed=False)
    read = quantised_read(lambda variables: {v.name: values[v.name] for v in variables}, [source])
    with pytest.raises(JobError, match=r"^--quantization: layer\.weight [^\n]*$"):
        read(source.variables)


def test_a_part_of_the_experts_is_made_of_these_alone() -> None:
    torch.manual_seed(0)
    values = torch.randn(5, COLUMNS, ROWS)
    variable = Variable("up", TensorType((5, COLUMNS, ROWS), "float32"))
    source = Source(variable, LAYOUTS["int4"], transposed=True)
    assert source.shape == (5, ROWS, COLUMNS)
    asked: list[tuple[str, tuple[int, ...]]] = []

    def read(wanted: Iterable[Variable]) -> dict[str, torch.Tensor]:
        found = {}
        for each in wanted:
            asked.append((each.name, tuple(d for d in each.type.shape if isinstance(d, int))))
            part = part_of(each.name)
            found[each.name] = values if part is None else values[part.start : part.stop]
        return found

    made = quantised_read(read, [source])
    whole = made(source.variables)
    assert [tuple(whole[v.name].shape) for v in source.variables] == [v.type.shape for v in source.variables]
    assert (back(tuple(whole.values())) - values.mT).abs().max() < 0.25  # half a step of the widest group
    parts = [
        Variable(f"{v.name}:1-3", TensorType((2, *v.type.shape[1:]), v.type.dtype)) for v in source.variables
    ]
    found = made(parts)
    assert asked == [("up", (5, COLUMNS, ROWS)), ("up:1-3", (2, COLUMNS, ROWS))]
    assert all(torch.equal(found[f"{name}:1-3"], whole[name][1:3]) for name in source.names)


def test_one_tensor_is_read_at_a_time_and_only_what_is_asked_for() -> None:
    torch.manual_seed(0)
    names = ("a", "b", "turned", "plain")
    shapes = {name: (COLUMNS, ROWS) if name == "turned" else (ROWS, COLUMNS) for name in names}
    values = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    variables = {name: Variable(name, TensorType(shapes[name], "bfloat16")) for name in names}
    kinds: dict[str, Kind] = {"a": "int8", "b": "int4", "turned": "int8"}
    sources = [Source(variables[name], LAYOUTS[kind], name == "turned") for name, kind in kinds.items()]
    asked: list[list[str]] = []

    def read(wanted: Iterable[Variable]) -> dict[str, torch.Tensor]:
        asked.append([v.name for v in wanted])
        return {name: values[name] for name in asked[-1]}

    stage = [*sources[2].variables, variables["plain"], *sources[0].variables]
    found = quantised_read(read, sources)(stage)
    assert asked == [["plain"], ["turned"], ["a"]]
    assert set(found) == {"turned:int8", "turned:scales", "plain", "a:int8", "a:scales"}
    for source in (sources[0], sources[2]):
        for variable in source.variables:
            assert found[variable.name].shape == variable.type.shape
    exact = values["turned"].t().float()
    assert (back((found["turned:int8"], found["turned:scales"])) - exact).abs().max() < 0.02
