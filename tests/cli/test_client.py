"""Whom a command asks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from fusion.cli import client


def test_no_peer_is_asked_by_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids can be chosen: the first of all in any order would be whoever wants to be."""

    async def peers(context: Any) -> tuple[Any, ...]:
        return tuple(SimpleNamespace(peer=f"peer-{n}") for n in range(4))

    monkeypatch.setattr(client, "working_peers", peers)
    context: Any = SimpleNamespace(transport=None)
    assert {asyncio.run(client.gateway(context, None)) for _ in range(200)} == {f"peer-{n}" for n in range(4)}
