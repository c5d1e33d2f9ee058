"""What `generate` asks a gateway for, as its options say."""

from __future__ import annotations

import io

import pytest

from fusion.cli import generate, main
from fusion.cli.terminal.output import Output
from fusion.runtime.serving.requests.request import GenerateRequest


@pytest.mark.parametrize(("options", "guesses"), [([], True), (["--no-guesses"], False)])
def test_guesses_can_be_left_out(monkeypatch: pytest.MonkeyPatch, options: list[str], guesses: bool) -> None:
    asked = list[GenerateRequest]()

    async def record(request: GenerateRequest, *_: object) -> None:
        asked.append(request)

    monkeypatch.setattr(generate, "_generate", record)
    assert main.main(["generate", "def ", *options]) == 0
    assert [request.guesses for request in asked] == [guesses]


def test_what_the_encoding_of_the_output_has_not_is_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: GenerateRequest, way: object, output: Output, trace: bool) -> None:
        output.write("hé\n")

    written = io.BytesIO()
    monkeypatch.setattr(generate, "_generate", answer)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main.main(["generate", "def "]) == 0 and written.getvalue() == b"h?\n"
