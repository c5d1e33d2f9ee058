"""A stranger's file is data: it is read as it is, or refused in one line, before anything of its size is set aside."""

from __future__ import annotations

import functools
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.runtime.capture.gguf import header as gguf_header
from fusion.runtime.capture.gguf.header import GGUFHeader, read_header
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.model_files import check_model


def write(path: Path) -> bytes:
    writer = GGUFWriter(str(path), "llama")
    writer.add_uint8("a.byte", 200)
    writer.add_int64("a.long", -(1 << 40))
    writer.add_float64("a.double", 0.1)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "caf\u00e9\n")
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.texts", ["", "one", "two"])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("two", np.zeros((3, 2 * 34), np.uint8), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_what_a_file_says(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    data = write(path)
    check_model(path)
    header = read_header(path)
    assert header.values == {
        "general.architecture": "llama", "a.byte": 200, "a.long": -(1 << 40), "a.double": 0.1, "a.flag": True,
        "a.text": "caf\u00e9\n", "a.numbers": (1, 2, 3), "a.texts": ("", "one", "two"),
    }  # fmt: skip
    one, two = header.tensors["one"], header.tensors["two"]
    assert (one.shape, one.kind, one.size_bytes) == ((2, 3), "F32", 24)
    assert np.frombuffer(data, np.float32, 6, one.offset).tolist() == list(range(6))
    assert (two.shape, two.kind, two.row_bytes, two.size_bytes) == ((3, 64), "Q8_0", 68, 204)


# --- models in several files


def in_parts(folder: Path) -> Path:
    """The first of three files, as the `gguf` package writes them and llama-gguf-split does."""
    writer = GGUFWriter(None, "llama", split_max_tensors=1)
    writer.add_uint32("a.number", 7)
    for n, name in enumerate(("one", "two", "three")):
        writer.add_tensor(name, np.full((2, 3), n, np.float32))
    writer.write_header_to_file(folder / "model.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model-00001-of-00003.gguf"


def test_a_model_in_several_files(tmp_path: Path) -> None:
    header = read_header(in_parts(tmp_path))
    assert header.values["a.number"] == 7
    for n, name in enumerate(("one", "two", "three")):
        place = header.tensors[name]
        data = place.file.read_bytes()[place.offset : place.offset + place.size_bytes]
        assert np.frombuffer(data, np.float32).tolist() == [n] * 6
    assert len({place.file for place in header.tensors.values()}) == 3


def test_parts_that_do_not_fit_together_are_refused_in_one_line(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(JobError) as error:
            read_header(path)
        assert str(error.value).isprintable()
        return str(error.value)

    first, second, third = (tmp_path / f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3))
    assert in_parts(tmp_path) == first
    assert f"part 2 of 3: the first is {first.name}" in refusal(second)
    good = third.read_bytes()
    third.unlink()
    assert f"{third} cannot be read: No such file" in refusal(first)
    third.write_bytes(second.read_bytes())
    assert f"{third} does not say that it is part 3 of 3" in refusal(first)
    third.write_bytes(good.replace(b"three", b"threx").replace(b"split.no", b"split.xx"))
    assert "does not say that it is part 3 of 3" in refusal(first)
    third.write_bytes(good)
    first.rename(tmp_path / "other.gguf")
    assert "is one of '3' parts, and is not called as one" in refusal(tmp_path / "other.gguf")
    (tmp_path / "other.gguf").rename(first)
    second.write_bytes(second.read_bytes().replace(b"two", b"one"))
    assert "has 'one', as another part does" in refusal(first)


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(JobError) as error:
        read_header(path)
    message = str(error.value)
    assert message.isprintable() and len(message) < 400 and str(path) in message
    return message


def test_a_file_that_is_cut_off_anywhere_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    data = write(path)
    end = max(t.offset + t.size_bytes for t in read_header(path).tensors.values())
    for length in range(0, end, 7):
        refused(path, data[:length])
    assert "it is not whole" in refused(path, data[: end - 1])


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def file_of(
    entries: bytes = b"", tensors: bytes = b"", *, counts: tuple[int, int] = (0, 0), version: int = 3
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + entries + tensors + bytes(64)


def entry(kind: int, value: bytes, key: bytes = b"k") -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(*dims: int, name: bytes = b"t", kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def one_entry(kind: int, value: bytes, key: bytes = b"k") -> bytes:
    return file_of(entry(kind, value, key), counts=(0, 1))


HUGE = 1 << 62
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "another file": (lambda: b"PK\3\4" + bytes(60), "is not a GGUF file"),
    "an empty file": (lambda: b"", "is not a GGUF file"),
    "an old version": (lambda: file_of(version=1), "version 1; 2 and 3 are read"),
    "big-endian": (lambda: file_of(version=3 << 24), "2 and 3 are read, little-endian"),
    "more tensors than there are": (lambda: file_of(counts=(HUGE, 0)), "the limit is 65536"),
    "more values than there are": (lambda: file_of(counts=(0, HUGE)), "the limit is 65536"),
    "a long key": (lambda: one_entry(4, bytes(4), key=b"k" * 999), "has 999 bytes; the limit is 256"),
    "an endless key": (lambda: file_of(struct.pack("<Q", HUGE), counts=(0, 1)), "the limit is 256"),
    "a key without a name": (lambda: one_entry(4, bytes(4), key=b""), "that is empty"),
    "a key that is no text": (lambda: one_entry(4, bytes(4), key=b"\xff"), "UTF-8"),
    "a key that is not for terminals": (lambda: one_entry(99, b"", key=b"\x1b[2J\n"), "type that is not known"),
    "an endless text": (lambda: one_entry(8, struct.pack("<Q", HUGE)), "the limit is"),
    "a text beyond the file": (lambda: one_entry(8, struct.pack("<Q", 1 << 25)), "not whole"),
    "an endless list": (lambda: one_entry(9, struct.pack("<IQ", 4, HUGE)), "elements of lists"),
    "a list beyond the file": (lambda: one_entry(9, struct.pack("<IQ", 4, 1 << 20)), "not whole"),
    "an endless list of texts": (lambda: one_entry(9, struct.pack("<IQ", 8, 1 << 20)), "not whole"),
    "lists in lists": (lambda: one_entry(9, struct.pack("<IQ", 9, 1) * 20), "a list of lists"),
    "an unknown type": (lambda: one_entry(13, bytes(8)), "type that is not known (13)"),
    "the same key twice": (lambda: file_of(entry(4, bytes(4)) * 2, counts=(0, 2)), "says 'k' twice"),
    "no alignment": (
        lambda: one_entry(4, struct.pack("<I", 0), key=b"general.alignment"), "a power of two",
    ),
    "a part of a file": (lambda: one_entry(2, struct.pack("<H", 3), key=b"split.count"), "one of '3' parts"),
    "no dimensions": (lambda: file_of(b"", tensor(), counts=(1, 0)), "has 0 dimensions"),
    "many dimensions": (
        lambda: file_of(b"", text(b"t") + struct.pack("<I", 1 << 31), counts=(1, 0)), "2147483648 dimensions",
    ),
    "a product beyond 64 bits": (lambda: file_of(b"", tensor(HUGE, HUGE, HUGE), counts=(1, 0)), "not whole"),
    "an empty tensor": (lambda: file_of(b"", tensor(0, 4), counts=(1, 0)), "which F32 cannot have"),
    "half a block": (lambda: file_of(b"", tensor(33, kind=8), counts=(1, 0)), "which Q8_0 cannot have"),
    "an unknown kind of number": (lambda: file_of(b"", tensor(4, kind=4), counts=(1, 0)), "not known (4)"),
    "a tensor beyond the file": (lambda: file_of(b"", tensor(4, offset=HUGE), counts=(1, 0)), "not whole"),
    "a tensor askew": (lambda: file_of(b"", tensor(4, offset=3), counts=(1, 0)), "another tensor lies"),
    "two tensors in one place": (
        lambda: file_of(b"", tensor(4) + tensor(4, name=b"u"), counts=(2, 0)), "another tensor lies",
    ),
    "the same tensor twice": (
        lambda: file_of(b"", tensor(1) + tensor(1, offset=32), counts=(2, 0)) + bytes(64), "has 't' twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line_and_no_memory(case: str, tmp_path: Path) -> None:
    make, message = HOSTILE[case]
    refused(tmp_path / "warm.gguf", b"")  # what a first refusal imports is not the file's doing
    read_kinds()
    tracemalloc.start()
    try:
        assert message in refused(tmp_path / "model.gguf", make())
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def read_kinds() -> None:
    assert GGML_QUANT_SIZES[GGMLQuantizationType.Q8_0] == (32, 34)


@functools.cache
def whole(path: Path) -> bytes:
    return write(path)


@settings(max_examples=examples(100))
@given(st.data())
def test_a_damaged_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    damaged = bytearray(whole(path))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        new = data.draw(st.binary(min_size=0, max_size=9))
        damaged[at : at + data.draw(st.integers(0, 9))] = new
    path.write_bytes(damaged)
    try:
        header = read_header(path)
    except JobError as error:
        assert str(error).isprintable()
    else:
        assert isinstance(header, GGUFHeader)
        assert all(t.offset + t.size_bytes <= len(damaged) for t in header.tensors.values())


def test_a_header_that_is_longer_than_any_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_HEADER_BYTES", 100)
    write(tmp_path / "model.gguf")
    with pytest.raises(JobError, match="a header of more than 100 bytes"):
        read_header(tmp_path / "model.gguf")


def test_what_is_neither_a_directory_nor_such_a_file(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="is not a directory or a GGUF file"):
        check_model(tmp_path / "nothing")
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(JobError, match=r"model\.safetensors is not a GGUF file"):
        check_model(tmp_path / "model.safetensors")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(JobError, match="ends in its version: it is not whole"):
        check_model(tmp_path / "model.gguf")
    with pytest.raises(
        JobError, match=r"no config\.json.*it holds model\.gguf, which can be served as a file"
    ):
        check_model(tmp_path)
