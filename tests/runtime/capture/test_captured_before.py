"""A model that was captured before, in a home: the same graph without capturing it again."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.families import build, config

from fusion.dag.ir import serialise
from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType
from fusion.runtime.capture import sources
from fusion.runtime.capture.huggingface import HuggingFaceModel
from fusion.runtime.capture.lowering import captured_before
from fusion.runtime.capture.lowering.captured_before import FOLDER, CapturedBefore

CAPTURE = HuggingFaceModel.capture
_TYPE = TensorType((3, 2), "float32")
GRAPH = Graph((Input("x", _TYPE),), (), (Node("y", "aten.relu", (Ref("x"),), (_TYPE,)),), (Ref("y"),))


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories of models that are captured."""
    found: list[Path] = []

    def counted(self: HuggingFaceModel, **arguments: int) -> Graph:
        found.append(self.directory)
        return CAPTURE(self, **arguments)

    monkeypatch.setattr(HuggingFaceModel, "capture", counted)
    return found


def test_a_model_is_captured_once(tmp_path: Path, captures: list[Path]) -> None:
    model = tmp_path / "model"
    build(config("llama")).save_pretrained(model)
    remember = CapturedBefore(tmp_path / "home").of
    first, second, alone = (sources.in_files(model, None, each) for each in (remember, remember, None))
    assert len(captures) == 2  # the last one anew
    assert (
        serialise.encode(first.inference)
        == serialise.encode(second.inference)
        == serialise.encode(alone.inference)
    )
    assert first.about == second.about == alone.about
    sources.in_files(model, "bfloat16", remember)
    assert len(captures) == 3
    values = config("llama")
    values.rms_norm_eps *= 2
    build(values).save_pretrained(model)
    changed = sources.in_files(model, None, remember)
    assert len(captures) == 4 and serialise.encode(changed.inference) != serialise.encode(first.inference)


def test_a_damaged_file_is_ignored_and_the_last_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def of(name: str) -> tuple[Graph, int]:
        def capture() -> tuple[Graph, int]:
            made.append(name)
            return GRAPH, 1 << 40

        return CapturedBefore(tmp_path).of(name, capture)

    assert of("a") == of("a") == (GRAPH, 1 << 40) and made == ["a"]
    [file] = (tmp_path / FOLDER).iterdir()
    for damaged in (b"", file.read_bytes()[:-1], b"\0" * 4096):
        file.write_bytes(damaged)
        assert of("a") == (GRAPH, 1 << 40)
    assert made == ["a"] * 4
    monkeypatch.setattr(captured_before, "REMEMBERED", 2)
    for name in "bcd":
        of(name)
    assert len(list((tmp_path / FOLDER).iterdir())) == 2
    monkeypatch.setattr(captured_before, "_code", list)
    of("d")
    assert made[-2:] == ["d", "d"]


def test_a_home_that_takes_no_files_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_bytes(b"no folder")
    found = CapturedBefore(tmp_path).of("a", lambda: (GRAPH, 7))
    assert found == (GRAPH, 7)
