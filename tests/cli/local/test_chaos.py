"""`fusion-peer chaos` as a command: what is said where it cannot go on."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from fusion.cli import main
from fusion.cli.local import chaos


def test_it_ends_with_its_parent_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cleared: list[bool] = []

    async def works(*_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleared.append(True)

    monkeypatch.setattr(chaos, "_chaos", works)
    not_our_parent = os.getpid()
    assert main.main(["chaos", "--json", "--stop-with", str(not_our_parent)]) == 1
    assert capsys.readouterr().err == "fusion-peer: stopped: the process that started it is gone\n"
    assert cleared == [True]
