"""Samples from files: what is read, what is held out, and the error for a wrong file."""

from __future__ import annotations

import io
import json
import pickle
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from fusion.runtime.datasets import dataset
from fusion.runtime.datasets import npz as npz_module
from fusion.runtime.datasets.dataset import Dataset, parted, with_progress
from fusion.runtime.datasets.image_folders import ImageFolders
from fusion.runtime.datasets.jsonl import JsonLines
from fusion.runtime.datasets.npz import Npz
from fusion.runtime.datasets.sources import encoder, read_tokenizer
from fusion.runtime.job.errors import JobError

LIMIT = 1 << 20


def silent(line: str) -> None:
    pass


def test_a_tokenizer_neither_cuts_nor_pads_texts() -> None:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<pad>": 2}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.enable_truncation(2)
    made.enable_padding(length=6, pad_id=2, pad_token="<pad>")
    assert encoder(read_tokenizer(made.to_str().encode()))("a b a b") == [0, 1, 0, 1]


# --- npz


def npz(folder: Path, **arrays: Any) -> Path:
    path = folder / "data.npz"
    np.savez(path, **arrays)
    return path


def test_named_arrays_of_an_npz(tmp_path: Path) -> None:
    path = npz(tmp_path, x=np.arange(6.0).reshape(3, 2), y=np.array([1, 2, 3]), junk=np.array(["a"]))
    source = Npz(path)
    assert source.names == ("x", "y", "junk")
    found = source.read(["y", "x"], LIMIT, silent)
    assert list(found) == ["y", "x"] and found["x"].dtype == np.float32 and found["y"].dtype == np.int64
    assert found["x"][2].tolist() == [4.0, 5.0]


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": np.zeros((3, 2)), "y": np.zeros(4)}, "as many samples each: x has 3, y has 4"),
        ({"x": np.float64(1), "y": np.zeros(1)}, "x has shape ()"),
        ({"x": np.array(["a"]), "y": np.zeros(1)}, "x is of dtype <U1"),
        ({"x": np.zeros((1 << 18, 1)), "y": np.zeros(1)}, "data.limit_bytes leaves room for 1048576"),
        (
            {"x": np.zeros((1 << 16, 1)), "y": np.zeros((1 << 17, 1))},
            "data.limit_bytes leaves room for 524288",
        ),
        ({"x": np.array([{}], dtype=object), "y": np.zeros(1)}, "allow_pickle=False"),
    ],
)
def test_arrays_that_are_no_samples(tmp_path: Path, arrays: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError) as error:
        Npz(npz(tmp_path, **arrays)).read(["x", "y"], LIMIT, silent)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_arrays_of_the_other_byte_order_are_as_those_of_ours(tmp_path: Path) -> None:
    path = npz(tmp_path, x=np.array([1.5, 2], ">f8"), y=np.array([1, 2], ">i4"))
    found = Npz(path).read(["x", "y"], LIMIT, silent)
    assert found["x"].dtype == np.float32 and found["x"].dtype.isnative and found["x"].tolist() == [1.5, 2]
    assert found["y"].dtype == np.int32 and found["y"].dtype.isnative and found["y"].tolist() == [1, 2]


@pytest.mark.filterwarnings("error")
def test_a_number_beyond_float32_is_named(tmp_path: Path) -> None:
    path = npz(tmp_path, x=np.array([[0.0, np.inf], [1.0, 1e300]]))
    with pytest.raises(
        JobError, match=r"data\.npz: x of sample 1 \(the first is 0\) is 1e\+300; numbers must be"
    ):
        Npz(path).read(["x"], LIMIT, silent)
    infinite = Npz(npz(tmp_path, x=np.array([0.0, np.inf]))).read(["x"], LIMIT, silent)
    assert np.isinf(infinite["x"]).tolist() == [False, True]  # somebody's own


@pytest.mark.parametrize("dtype", ["float16", "float32", ">f8"])
@pytest.mark.parametrize("block_bytes", [1, 20, 1 << 24])
def test_a_sample_with_a_nan_is_named(
    tmp_path: Path, dtype: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npz_module, "BLOCK_BYTES", block_bytes)
    x = np.zeros((9, 2), dtype)
    x[7:, 1] = np.nan
    path = npz(tmp_path, x=x, y=np.arange(9), none=np.zeros((9, 0)))
    assert list(Npz(path).read(["y", "none"], LIMIT, silent)) == ["y", "none"]  # nobody reads the other one
    with pytest.raises(JobError, match=r"data\.npz: x of sample 7 \(the first is 0\) has a NaN"):
        Npz(path).read(["x"], LIMIT, silent)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("number", "says"),
    [("1e300", "is 1e\\+300"), ("NaN", "finite"), ("1e400", "finite"), ("-Infinity", "finite")],
)
def test_a_json_number_that_float32_has_not_is_named(tmp_path: Path, number: str, says: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"x": [1, 2.5]}\n' * 5000 + f'{{"x": [1, {number}]}}\n')
    with pytest.raises(JobError, match=rf"'x' of sample 5000 .*{says}"):
        JsonLines(path, (), encoder(None), 0).read(["x"], LIMIT, silent)


@pytest.mark.parametrize("says", ["is damaged", "is encrypted"])
def test_an_npz_that_cannot_be_unpacked(tmp_path: Path, says: str) -> None:
    path = tmp_path / "data.npz"
    np.savez_compressed(path, x=np.zeros(9))
    data = bytearray(path.read_bytes())
    if says == "is encrypted":
        for flags in (6, data.index(b"PK\x01\x02") + 8):
            data[flags] |= 1
    else:
        data[30 + int.from_bytes(data[26:28], "little") + int.from_bytes(data[28:30], "little")] = 0xFF
    path.write_bytes(data)
    with pytest.raises(JobError, match=rf"data\.npz.*{says}"):
        Npz(path).read(["x"], LIMIT, silent)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 nonsense", pickle.dumps({"x": 1}), b"\x93NUMPY"])
def test_a_file_that_is_no_npz(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data.npz"
    path.write_bytes(content)
    with pytest.raises(JobError, match=r"data\.npz is not an \.npz file"):
        Npz(path)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (True,)}",
        f"{{'descr': '|V0', 'fortran_order': False, 'shape': ({10**20},)}}",
        "{1: 2, 'a': 3}",
    ],
)
def test_an_array_whose_header_makes_no_sense(tmp_path: Path, header: str) -> None:
    path, text = tmp_path / "data.npz", header.encode() + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\0" + len(text).to_bytes(2, "little") + text + bytes(64))
    with pytest.raises(JobError, match=r"data\.npz is damaged"):
        Npz(path).read(["x"], LIMIT, silent)


def test_an_array_that_is_shorter_than_it_says(tmp_path: Path) -> None:
    whole = io.BytesIO()
    np.lib.format.write_array(whole, np.zeros((8, 8)))
    path = tmp_path / "data.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", whole.getvalue()[:-9])
    with pytest.raises(JobError):
        Npz(path).read(["x"], LIMIT, silent)


# --- images


def images(folder: Path) -> Path:
    for name, colour, count in (("cat", (255, 0, 0), 2), ("dog", (0, 0, 255), 3)):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (100, 60), colour).save(folder / name / f"{i}.png")
    (folder / ".hidden").mkdir()
    (folder / "cat" / ".checkpoints").mkdir()
    Image.new("RGB", (4, 4)).save(folder / "cat" / ".checkpoints" / "0.png")
    (folder / "cat" / ".DS_Store").write_bytes(b"x")
    return folder


def test_a_folder_is_a_class(tmp_path: Path) -> None:
    source = ImageFolders(images(tmp_path), (4, 5))
    assert source.classes == {"labels": ("cat", "dog")}
    found = source.read(["images", "labels"], LIMIT, silent)
    assert found["labels"].tolist() == [0, 0, 1, 1, 1]
    assert found["images"].shape == (5, 3, 4, 5) and found["images"].dtype == np.uint8
    assert (found["images"][0, 0] == 255).all() and (found["images"][4, 2] == 255).all()
    assert (found["images"][0, 1:] == 0).all()


def test_an_image_of_more_than_8_bits_is_refused(tmp_path: Path) -> None:
    """Pillow would cut what is above 255 off, and so make most of it white."""
    folder = images(tmp_path)
    Image.fromarray(np.full((4, 4), 4000, np.uint16)).save(folder / "cat" / "scan.png")
    with pytest.raises(JobError, match=r"cat/scan\.png has more than 8 bits"):
        ImageFolders(folder, (4, 4)).read(["images"], LIMIT, silent)


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    folder = images(tmp_path)
    (folder / "dog" / "notes.txt").write_text("woof")
    with pytest.raises(JobError, match=r"dog/notes\.txt is not an image"):
        ImageFolders(folder, (4, 4)).read(["images"], LIMIT, silent)
    data = (folder / "cat" / "0.png").read_bytes()
    (folder / "cat" / "1.png").write_bytes(data[:-30])
    with pytest.raises(JobError, match=r"cat/1\.png cannot be read as an image"):
        ImageFolders(folder, (4, 4)).read(["images"], LIMIT, silent)
    with pytest.raises(JobError, match=r"data\.limit_bytes"):
        ImageFolders(folder, (4000, 4000)).read(["images"], LIMIT, silent)
    (tmp_path / "empty").mkdir()
    with pytest.raises(JobError, match="a folder of images for each class"):
        ImageFolders(tmp_path / "empty", (4, 4))


# --- JSONL


ROWS = [
    {"text": "good", "label": "yes", "x": [1.5, 2], "n": 3, "ok": True},
    {"text": "so bad\u2028", "label": "no", "x": [0, 1], "n": -1, "ok": False},
]


def jsonl(folder: Path, rows: list[Any]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    return path


def lines(path: Path, sequence: int = 6) -> JsonLines:
    return JsonLines(path, ("label",), lambda text: text.encode(), sequence)


def test_fields_of_json_lines(tmp_path: Path) -> None:
    source = lines(jsonl(tmp_path, ROWS))
    assert source.names == ("text", "label", "x", "n", "ok", "text_mask")
    found = source.read(["text", "text_mask", "label", "x", "n", "ok"], LIMIT, silent)
    assert found["label"].tolist() == [1, 0]  # in the order of their names
    assert found["text"].tolist() == [[*b"good", 0, 0], [*b"so bad"]]
    assert found["text_mask"].tolist() == [[True] * 4 + [False] * 2, [True] * 6]
    assert found["x"].dtype == np.float32 and found["x"].tolist() == [[1.5, 2], [0, 1]]
    assert found["n"].dtype == np.int64 and found["ok"].dtype == np.bool_


def test_a_field_that_is_called_as_a_mask_would_be_is_read_as_it_stands(tmp_path: Path) -> None:
    rows = [{**row, "text_mask": [0, 1, 1]} for row in ROWS]
    source = lines(jsonl(tmp_path, rows))
    assert source.names == ("text", "label", "x", "n", "ok", "text_mask")
    for names in (["text_mask"], ["text_mask", "text"], ["text", "text_mask"]):
        assert source.read(names, LIMIT, silent)["text_mask"].tolist() == [[0, 1, 1]] * 2


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([*ROWS, {"text": "x", "label": "no"}], ":3: no field 'x' (it has: text, label)"),
        ([{**ROWS[0], "text": 3}, ROWS[1]], "'text' must be numbers"),
        ([ROWS[0], {**ROWS[1], "text": 3}], ":2: 'text' is no text"),
        ([ROWS[0], {**ROWS[1], "x": [1]}], "'x' must be numbers, or lists of them of one shape"),
        ([ROWS[0], {**ROWS[1], "x": None}], "'x' must be numbers"),
        ([{"text": "x"}], "data.classes"),
        ([ROWS[0], [1]], ":2: a line must be an object"),
        ([], "holds no line"),
    ],
)
def test_lines_that_are_no_samples(tmp_path: Path, rows: list[Any], says: str) -> None:
    with pytest.raises(JobError) as error:
        lines(jsonl(tmp_path, rows)).read(["text", "label", "x"], LIMIT, silent)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_text_needs_a_length_and_json_a_syntax(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"train\.sequence must be at least 1"):
        lines(jsonl(tmp_path, ROWS), 0).read(["text"], LIMIT, silent)
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": 1}\n{"text"\n')
    with pytest.raises(JobError, match=r"data\.jsonl:2: not JSON"):
        lines(path)


def test_a_mark_before_the_first_line_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"x": 1}\r\n{"x": 2}\r\n')
    source = JsonLines(path, (), encoder(None), 8)
    assert source.read(["x"], LIMIT, silent)["x"].tolist() == [1, 2]


def test_half_of_a_character_is_no_text(tmp_path: Path) -> None:
    """JSON can say it, and what cuts texts at a length writes it; UTF-8 cannot, and no tokenizer takes it."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "whole \\ud83d\\ude00"}\n{"text": "half \\ud83d"}\n')
    with pytest.raises(JobError, match=r"data\.jsonl:2: 'text' holds half of a character"):
        JsonLines(path, (), encoder(None), 8).read(["text"], LIMIT, silent)


def test_json_lines_are_not_held_in_memory(tmp_path: Path) -> None:
    rows, size = 6000, 2000
    path = tmp_path / "data.jsonl"
    with path.open("w") as file:
        for i in range(rows):
            text = chr(97 + i % 26) * size
            file.write(json.dumps({"text": text, "label": f"c{i % 3}", "x": [i, i / 2]}) + "\n")
    tracemalloc.start()
    try:
        source = JsonLines(path, ("label",), encoder(None), 4)
        found = source.read(["text", "label", "x"], LIMIT, silent)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < path.stat().st_size / 4
    assert found["label"].tolist() == [i % 3 for i in range(rows)]
    assert found["x"].dtype == np.float32 and found["x"][5000].tolist() == [5000, 2500]
    assert found["text"][27].tolist() == [98] * 4


@pytest.mark.parametrize("rows", [ROWS[:1], [*ROWS, ROWS[0]]])
@pytest.mark.parametrize("field", ["text", "label", "n"])
def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path, rows: list[Any], field: str) -> None:
    source = lines(jsonl(tmp_path, ROWS))
    jsonl(tmp_path, rows)
    with pytest.raises(JobError, match="changed while it was read"):
        source.read([field], LIMIT, silent)


def test_a_field_that_the_first_line_lacks_is_none_that_nobody_knows_of(tmp_path: Path) -> None:
    """A parameter with a default that is called so would keep it without an error."""
    lines = JsonLines(jsonl(tmp_path, [{"y": 1}, {"y": 2, "weight": 0.5}]), (), encoder(None), 0)
    assert lines.names == ("y", "weight")
    with pytest.raises(JobError, match=r":1: no field 'weight' \(it has: y\)"):
        lines.read(["weight"], LIMIT, silent)
    assert lines.read(["y"], LIMIT, silent)["y"].tolist() == [1, 2]
    assert JsonLines(jsonl(tmp_path, [{}]), (), encoder(None), 0).names == ()


def test_numbers_that_differ_far_down_are_still_one_array_or_none(tmp_path: Path) -> None:
    whole = [{"x": 1}] * 5000
    found = JsonLines(jsonl(tmp_path, [*whole, {"x": 0.5}]), (), encoder(None), 0).read(["x"], LIMIT, silent)
    assert found["x"].dtype == np.float32 and found["x"][-2:].tolist() == [1, 0.5]
    for wrong in ([1], "one", None):
        with pytest.raises(JobError, match="'x' must be numbers, or lists of them of one shape"):
            JsonLines(jsonl(tmp_path, [*whole, {"x": wrong}]), (), encoder(None), 0).read(
                ["x"], LIMIT, silent
            )


# --- held out


def test_a_share_is_held_out_evenly_and_nothing_is_in_both() -> None:
    arrays = {"x": np.arange(10), "y": np.arange(10) * 2}
    found = parted(arrays, 0.3, "data")
    assert found.held_out is not None and found.held_out["x"].tolist() == [0, 4, 7]
    assert sorted([*found.train["x"], *found.held_out["x"]]) == list(range(10))
    assert (found.train["y"] == 2 * found.train["x"]).all()
    assert parted(arrays, 0.0, "data") == Dataset(arrays, None)
    assert parted({"x": np.arange(1)}, 0.5, "data").held_out is None  # nothing would be left


def test_held_out_samples_are_like_the_others() -> None:
    arrays = {"x": np.zeros((4, 2), np.float32)}
    assert parted(arrays, {"x": np.ones((1, 2), np.float32)}, "data").held_out is not None
    with pytest.raises(
        JobError, match=r"data\.held_out: x is float32 \(3,\) a sample, and in data\.path float32 \(2,\)"
    ):
        parted(arrays, {"x": np.ones((1, 3), np.float32)}, "data")


def test_labels_of_held_out_samples_are_places_among_the_same_classes(tmp_path: Path) -> None:
    """Also where a class is not among them: the places of the others are no lower for it."""
    folder, held = images(tmp_path / "all"), tmp_path / "held"
    (held / "dog").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(held / "dog" / "0.png")
    known = ImageFolders(folder, (4, 4)).classes
    assert ImageFolders(held, (4, 4), known).read(["labels"], LIMIT, silent)["labels"].tolist() == [1]
    (held / "fox").mkdir()
    with pytest.raises(JobError, match=r"held/fox is of a class that is not trained on"):
        ImageFolders(held, (4, 4), known)

    rows = [{"label": "cat", "x": 1}, {"label": "dog", "x": 2}]
    lines = JsonLines(jsonl(tmp_path, rows), ("label",), encoder(None), 0)
    assert lines.read(["label"], LIMIT, silent)["label"].tolist() == [0, 1]
    others = JsonLines(jsonl(tmp_path, rows[1:]), ("label",), encoder(None), 0, lines.classes)
    assert others.read(["label"], LIMIT, silent)["label"].tolist() == [1]
    strange = JsonLines(
        jsonl(tmp_path, [{"label": "fox", "x": 3}]), ("label",), encoder(None), 0, lines.classes
    )
    with pytest.raises(JobError, match=r":1: 'label' is 'fox', a class that is not trained on"):
        strange.read(["label"], LIMIT, silent)


def test_two_samples_stand_for_all() -> None:
    assert Dataset({"x": np.arange(5)}, None).example()["x"].tolist() == [0, 1]
    assert Dataset({"x": np.arange(1)}, None).example()["x"].tolist() == [0, 0]


def test_packing_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(dataset, "REPORT_SECONDS", 0.0)
    assert list(with_progress(range(3), 3, "lines", lines.append)) == [0, 1, 2]
    assert lines[-1] == "packing the data: 2 of 3 lines"
