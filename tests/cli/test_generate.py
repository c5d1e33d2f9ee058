"""What `generate` asks a gateway for, as its options say."""

from __future__ import annotations

import pytest

from fusion.cli import generate, main
from fusion.runtime.serving.requests.request import GenerateRequest


@pytest.mark.parametrize(("options", "guesses"), [([], True), (["--no-guesses"], False)])
def test_guesses_can_be_left_out(monkeypatch: pytest.MonkeyPatch, options: list[str], guesses: bool) -> None:
    asked = list[GenerateRequest]()

    async def record(request: GenerateRequest, *_: object) -> None:
        asked.append(request)

    monkeypatch.setattr(generate, "_generate", record)
    assert main.main(["generate", "def ", *options]) == 0
    assert [request.guesses for request in asked] == [guesses]
