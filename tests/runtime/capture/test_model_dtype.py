from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fusion.runtime.capture.model_dtype import model_dtype, stored_dtypes, stored_shapes
from fusion.runtime.job.errors import JobError


@pytest.mark.parametrize(
    ("asked", "said", "stored", "chosen"),
    [
        (None, None, {}, "float32"),
        (None, None, {"float32": 8, "bfloat16": 900}, "bfloat16"),
        (None, "float16", {"bfloat16": 900}, "float16"),
        ("float32", "float16", {"bfloat16": 900}, "float32"),
    ],
)
def test_what_is_asked_goes_before_what_the_config_says_and_that_before_the_files(
    asked: str | None, said: str | None, stored: dict[str, int], chosen: str
) -> None:
    assert model_dtype(asked, said, stored, "model") == chosen


@pytest.mark.parametrize(
    ("asked", "said", "message"),
    [
        ("int8", None, "dtype: auto, float32, bfloat16 or float16, not 'int8'"),
        (None, "float64", "model of float64"),
    ],
)
def test_a_dtype_in_which_no_model_runs_is_refused(asked: str | None, said: str | None, message: str) -> None:
    with pytest.raises(JobError, match=message) as error:
        model_dtype(asked, said, {}, "model")
    assert "\n" not in str(error.value)


def test_headers_tell_what_the_files_hold(tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"w": torch.zeros(3, 5, dtype=torch.bfloat16), "ids": torch.zeros(9, dtype=torch.int64)}, first)
    save_file({"w": torch.zeros(7), "half": torch.zeros(2, dtype=torch.float16)}, second)
    assert stored_dtypes([first, second, first]) == {"bfloat16": 30, "float32": 28, "float16": 4}
    second.write_bytes(b"nonsense")
    with pytest.raises(JobError, match=r"b\.safetensors is not a safetensors file"):
        stored_dtypes([first, second])


def test_what_a_damaged_header_says_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = json.dumps({"w": {"dtype": "a\n\x1b[1m" * 99, "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(JobError, match=r"not all of one: .*unknown variant") as refused:
        stored_shapes(path)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 400 + len(str(path))
