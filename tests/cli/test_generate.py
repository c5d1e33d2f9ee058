"""What `generate` asks a gateway for, as its options say."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusion.cli import client, generate, main
from fusion.cli.asking import settings
from fusion.cli.terminal.output import Output
from fusion.runtime.serving.requests.request import GenerateRequest
from fusion.swarm.errors import RemoteError


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


@pytest.mark.parametrize("error", [RemoteError("stage 1 of m has vanished"), KeyboardInterrupt()])
def test_what_ends_an_answer_is_told_on_a_line_of_its_own(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def broken(request: GenerateRequest, way: object, output: Output, trace: bool) -> None:
        output.write("def ")
        output.write("open(")
        raise error

    monkeypatch.setattr(generate, "_generate", broken)
    assert main.main(["generate", "def "]) in (1, 130)
    said = capsys.readouterr()
    assert said.out == "def open(\n" and said.err.startswith("fusion-peer: ")


def test_a_schema_may_begin_with_a_mark(tmp_path: Path) -> None:
    """As editors of Windows write them."""
    for name, encoding in (("plain", "utf-8"), ("marked", "utf-8-sig")):
        (tmp_path / name).write_text('{"type": "integer"}', encoding)
    assert settings.schema(tmp_path / "marked") == settings.schema(tmp_path / "plain")


def test_a_schema_is_called_as_its_option_is() -> None:
    told = settings.of_question(RemoteError("response_format: Invalid type: strin"))
    assert isinstance(told, ValueError) and str(told) == "json_schema: Invalid type: strin"
    other = RemoteError("stage 1: response_format: no")
    assert settings.of_question(other) is other


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("max_tokens: the model takes 32 positions", ValueError),
        ("prompt: at least one token", ValueError),
        ("stage 1 of m has no owner now", RemoteError),
    ],
)
def test_what_a_gateway_finds_wrong_with_the_question_is_bad_input(
    monkeypatch: pytest.MonkeyPatch, said: str, kind: type[Exception]
) -> None:
    async def refused(*_: object) -> AsyncIterator[None]:
        raise RemoteError(said)
        yield

    @asynccontextmanager
    async def connect(way: object) -> AsyncIterator[Any]:
        yield SimpleNamespace(transport=None, directory=None)

    async def nothing(*_: object) -> None:
        pass

    monkeypatch.setattr("fusion.runtime.serving.requests.client.generate", refused)
    monkeypatch.setattr(generate.client, "connect", connect)
    monkeypatch.setattr(generate.client, "gateway", nothing)
    monkeypatch.setattr(generate.job_client, "find_model", nothing)
    way = client.JoinOptions(home=Path("home"))
    with pytest.raises(kind, match=said):
        asyncio.run(generate._generate(GenerateRequest(prompt="def "), way, Output(), False))
