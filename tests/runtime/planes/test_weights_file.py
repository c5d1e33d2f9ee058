from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from fusion.dag.ir.graph import TensorType, Variable
from fusion.runtime.job.errors import JobError
from fusion.runtime.planes.weights_file import WeightsFile, tensors_bytes_of, weights_bytes_of

VALUES = {
    "b": torch.arange(12, dtype=torch.float32).view(3, 4),
    "a": torch.arange(5).to(torch.bfloat16),
    "ids": torch.arange(7),
    "Äpfel": torch.randn(2, 3).to(torch.float16),
    "wide": torch.randn(3, dtype=torch.float64),
    "mask": torch.tensor([True, False, True]),
    "bytes": torch.arange(9, dtype=torch.uint8),
    "small": torch.arange(-4, 4, dtype=torch.int8),
    "short": torch.arange(3, dtype=torch.int16),
    "word": torch.arange(3, dtype=torch.int32),
    "scalar": torch.tensor(3.5),
    "none": torch.empty(0, 4),
}
VARIABLES = [
    Variable(name, TensorType(tuple(v.shape), str(v.dtype).removeprefix("torch.")), "parameter", True, ())
    for name, v in VALUES.items()
]


def written(path: Path) -> bytes:
    found = weights_bytes_of(VARIABLES, lambda wanted: {v.name: VALUES[v.name] for v in wanted})
    data = b"".join(bytes(piece) for piece in found.pieces)
    assert len(data) == found.size_bytes
    path.write_bytes(data)
    return data


def test_the_bytes_are_those_of_the_library_of_the_format(tmp_path: Path) -> None:
    assert written(tmp_path / "w") == save(VALUES)


def test_tensors_in_memory_are_written_as_the_library_does() -> None:
    metadata = {"state": "3 \u00e4"}
    found = tensors_bytes_of({**VALUES, "t": torch.arange(6).view(2, 3).t()}, metadata)
    data = b"".join(bytes(piece) for piece in found.pieces)
    assert len(data) == found.size_bytes
    assert data == save({**VALUES, "t": torch.arange(6).view(2, 3).t().contiguous()}, metadata)


def test_each_tensor_is_asked_for_alone_and_read_alone(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def read(wanted: object) -> dict[str, torch.Tensor]:
        asked.append([v.name for v in wanted])  # type: ignore[attr-defined]
        return {name: VALUES[name].t() if name == "b" else VALUES[name] for name in asked[-1]}

    transposed = [
        Variable("b", TensorType((4, 3), "float32"), "parameter", True, ()), *(v for v in VARIABLES if v.name != "b")
    ]  # fmt: skip
    data = b"".join(bytes(piece) for piece in weights_bytes_of(transposed, read).pieces)
    assert sorted(asked) == sorted([v.name] for v in VARIABLES)
    (tmp_path / "w").write_bytes(data)
    found = WeightsFile(tmp_path / "w", len(VARIABLES))
    assert set(found) == set(VALUES) and len(found) == len(VALUES)
    for name, value in VALUES.items():
        assert torch.equal(found[name], value.t() if name == "b" else value)
        assert found[name].dtype == value.dtype
    assert found.get("other") is None
    found["word"].zero_()  # of the reader alone
    assert torch.equal(found["word"], VALUES["word"])


def test_a_weight_of_another_shape_or_dtype_is_refused() -> None:
    for wrong in (torch.zeros(4, 3), torch.zeros(3, 4, dtype=torch.float16)):
        pieces = weights_bytes_of(VARIABLES[:1], lambda _, wrong=wrong: {"b": wrong}).pieces  # type: ignore[misc]
        with pytest.raises(JobError, match="the weight b is"):
            list(pieces)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[" * 3000,
        b"[1]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 47]}}',
        b'{"a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [16, 64]}}',
        b'{"a": {"dtype": "F32", "shape": [-3, -4], "data_offsets": [0, 48]}}',
        b'{"a": {"dtype": "F32", "shape": [true, 12], "data_offsets": [0, 48]}}',
        b'{"a": {"dtype": "F99", "shape": [12], "data_offsets": [0, 48]}}',
        b'{"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [12], "data_offsets": [48, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [' + b"1," * 40 + b'12], "data_offsets": [0, 48]}}',
    ],
)
def test_nonsense_is_refused_in_one_line(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "w"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(48))
    with pytest.raises(JobError) as error:
        dict(WeightsFile(path, 1))
    assert "\n" not in str(error.value)


def test_a_header_that_claims_more_than_the_file_or_the_tensors_need_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "w"
    text = json.dumps({f"tensor{i}": {} for i in range(200_000)}).encode()
    for length, data in ((1 << 60, b"{}"), (len(text), text), (0, b"")):
        path.write_bytes(length.to_bytes(8, "little") + data)
        with pytest.raises(JobError, match="no file of 3 tensors"):
            WeightsFile(path, 3)
    path.write_bytes(b"123")
    with pytest.raises(JobError, match="no file of 3 tensors"):
        WeightsFile(path, 3)


def test_a_file_that_became_shorter_is_told(tmp_path: Path) -> None:
    data = written(tmp_path / "w")
    found = WeightsFile(tmp_path / "w", len(VARIABLES))
    (tmp_path / "w").write_bytes(data[:-30])
    with pytest.raises(JobError):
        dict(found)
