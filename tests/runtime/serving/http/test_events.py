"""What a client gets while an answer is made."""

from __future__ import annotations

import json

from fusion.runtime.serving.http.events import event


def test_an_event_is_one_line_however_its_reader_tells_lines_apart() -> None:
    said = {"text": "one\ntwo\r\x85\u2028three\u2029 äöü 中", "n": [1]}
    sent = event(said).decode()
    data, *rest = sent.splitlines()
    assert rest == [""] and sent.endswith("\n\n")
    assert json.loads(data.removeprefix("data: ")) == said and "中" in data
