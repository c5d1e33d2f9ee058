"""What a file of features may hold, and what it is told where it holds something else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fusion.cli import main
from fusion.cli.asking.features import features_of
from fusion.runtime.job.protocol import MAX_SOURCE_BYTES


@pytest.mark.parametrize("shape", [(2, 3), (1, 2, 3)])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", "<f2"])
def test_frames_of_a_channel_lie_together(shape: tuple[int, ...], dtype: str, tmp_path: Path) -> None:
    numbers = np.arange(6, dtype=dtype).reshape(shape)
    np.save(tmp_path / "x.npy", numbers)
    assert features_of(tmp_path / "x.npy") == np.arange(6, dtype="<f4").tobytes()
    np.save(tmp_path / "turned.npy", np.asfortranarray(numbers))
    assert features_of(tmp_path / "turned.npy") == features_of(tmp_path / "x.npy")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3), np.int64), "no array of floating-point numbers"),
        (np.array([{}, {}], dtype=object), "no .npy file of numbers"),
        (np.zeros(3, np.float32), "not \\(channels, frames\\)"),
        (np.zeros((2, 0), np.float32), "not \\(channels, frames\\)"),
        (np.zeros((2, 2, 3), np.float32), "not \\(channels, frames\\)"),
        (np.full((2, 3), np.nan, np.float32), "not finite"),
        (np.zeros((2, MAX_SOURCE_BYTES // 8 + 1), np.float16), "at most"),
    ],
)
def test_other_files_are_refused_in_one_line(array: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, array, allow_pickle=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message) as error:
        features_of(path)
    assert "\n" not in str(error.value)


def test_nonsense_and_two_things_to_read_are_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.npy").write_bytes(b"PK\x03\x04 nonsense")
    for options in (
        ["--features", str(tmp_path / "x.npy")],
        ["--features", str(tmp_path / "none.npy")],
        ["text", "--features", str(tmp_path / "x.npy")],
        [],
    ):
        assert main.main(["generate", *options]) == 2
        assert capsys.readouterr().err.count("\n") == 1
