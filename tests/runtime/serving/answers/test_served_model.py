"""Tokenizers are read one after the other, with a rest: the process stands still while one is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from support.instant_loop import run

from fusion.runtime.serving.answers import served_model
from fusion.runtime.serving.answers.served_model import RESTS, ModelLoader


def test_after_a_tokenizer_no_other_one_is_read_for_a_multiple_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        now = asyncio.get_running_loop().time
        begun = list[float]()

        async def reads(make: Any, data: bytes) -> None:
            begun.append(now())
            await asyncio.sleep(len(data))
            if len(data) == 2:
                raise ValueError("it is none")

        monkeypatch.setattr(served_model.asyncio, "to_thread", reads)
        context: Any = SimpleNamespace(clock=SimpleNamespace(monotonic=now))
        loader = ModelLoader(context, lambda job, manifest: asyncio.sleep(0), 1.0)
        first = now()
        await asyncio.gather(*(loader._read(bytes(n)) for n in (3, 2, 1)), return_exceptions=True)
        second = first + 3 + RESTS * 3
        assert begun == pytest.approx([first, second, second + 2 + RESTS * 2])

    run(main())
