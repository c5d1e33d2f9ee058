"""What a client gets while an answer is made."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fusion.runtime.serving.http import events
from fusion.runtime.serving.http.events import WholeAnswer, event


def test_an_event_is_one_line_however_its_reader_tells_lines_apart() -> None:
    said = {"text": "one\ntwo\r\x85\u2028three\u2029 äöü 中", "n": [1]}
    sent = event(said).decode()
    data, *rest = sent.splitlines()
    assert rest == [""] and sent.endswith("\n\n")
    assert json.loads(data.removeprefix("data: ")) == said and "中" in data


def test_a_whole_answer_goes_out_in_parts_between_which_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "PART_BYTES", 10)
    sent, turns = list[Any](), 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def send(message: Any) -> None:
        sent.append(message)

    async def main() -> None:
        beside = asyncio.create_task(others())
        answer: Any = WholeAnswer([b"[", *[b"1,"] * 50, b"1]"])
        await answer({"type": "http"}, None, send)
        beside.cancel()

    asyncio.run(main())
    head, *bodies = sent
    whole = b"".join(each["body"] for each in bodies)
    assert json.loads(whole) == [1] * 51
    assert dict(head["headers"])[b"content-length"] == str(len(whole)).encode()
    assert max(len(each["body"]) for each in bodies) <= 12 and turns >= 10
    assert [each["more_body"] for each in bodies] == [*[True] * (len(bodies) - 1), False]
