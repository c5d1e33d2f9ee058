"""A snapshot that the swarm does not come to serve is taken back: the model before keeps the name. What of a model's files is not
followed is said."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusion.cli import client, job_client, plan, serve
from fusion.cli.terminal.output import Output
from fusion.runtime.belief import reading
from fusion.runtime.job.errors import JobFailed
from fusion.runtime.job.manifest import MAX_STAGES, ServeConfig
from fusion.runtime.launch import prepare_serving as preparing
from fusion.runtime.launch.serving_spec import ServingSpec
from fusion.runtime.serving.requests import chat_trial
from fusion.runtime.serving.requests.chat_format import ChatFormat
from fusion.swarm.errors import SwarmError

assert serve.MOST_STAGES == MAX_STAGES
SPEC = ServingSpec(path=Path(), name="gpt")


@pytest.mark.parametrize("error", [JobFailed, SwarmError, asyncio.CancelledError])
@pytest.mark.parametrize("step", [40, None])
def test_what_does_not_come_to_answer_is_taken_back(
    step: int | None, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    record, stopped, launched = object(), list[object](), list[float]()

    async def nothing(*_: object, **__: object) -> tuple[()]:
        return ()

    async def offer(*_: object) -> str:
        return "ab" * 32

    async def fails(*_: object) -> None:
        raise error("nothing moved for 180 s")

    async def read_belief(*_: object, **__: object) -> Any:
        return SimpleNamespace(over=False, record=record)

    async def stop(context: object, given: object, author: object) -> None:
        stopped.append(given)

    monkeypatch.setattr(client, "working_peers", nothing)
    monkeypatch.setattr(serve, "offer", offer)
    monkeypatch.setattr(serve, "until_held", fails)
    monkeypatch.setattr(reading, "read_belief", read_belief)
    monkeypatch.setattr(job_client, "stop", stop)
    prepared = SimpleNamespace(job="ab" * 32, manifest=None)

    def prepare_serving(
        *_: object, note: Callable[[str], None], now: Callable[[], float], **__: object
    ) -> Any:
        note("num_beams 4 is not followed")
        launched.append(now() - time.time())
        return prepared

    monkeypatch.setattr(preparing, "prepare_serving", prepare_serving)
    context: Any = SimpleNamespace(
        directory=SimpleNamespace(links=nothing, now=lambda: time.time() + 3600),
        transport=None,
        blobs=SimpleNamespace(store=None),
        home=Path(),
    )
    author: Any = None
    stderr = io.StringIO()
    with pytest.raises(error):
        asyncio.run(serve._hand_over(context, SPEC, author, Output(stderr=stderr), step))
    assert stopped == ([] if step is None else [record])
    assert ("end that with: fusion-peer jobs stop abababababab" in stderr.getvalue()) == (step is None)
    assert "num_beams 4 is not followed\n" in stderr.getvalue()
    assert launched == [pytest.approx(3600, abs=60)], "by the swarm's clock: ours was behind"


async def fault(form: ChatFormat) -> str:
    return f"at fault: {form.template}"


def test_a_plan_says_what_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "generation_config.json").write_text('{"num_beams": 4}')
    config = ServeConfig(cache="kv", max_sequence=8, vocabulary=50)

    async def nobody(*_: object) -> None:
        raise SwarmError("no peer")

    chat = {"chat_template.jinja": b"{% for m in messages %}"}
    model = SimpleNamespace(unread=("score.weight",), chat=chat, unknown_tokens=3)
    found = SimpleNamespace(config=config, model=model)
    monkeypatch.setattr(preparing, "read_servable", lambda *_: found)
    monkeypatch.setattr(plan, "takers", nobody)
    monkeypatch.setattr(chat_trial, "template_fault", fault)
    stdout, stderr = io.StringIO(), io.StringIO()
    context: Any = SimpleNamespace(home=tmp_path)
    with pytest.raises(SwarmError, match="no peer"):
        asyncio.run(
            plan.plan_model(context, replace(SPEC, path=tmp_path), Output(stdout=stdout, stderr=stderr))
        )
    assert stderr.getvalue().splitlines() == [
        "generation_config.json asks for num_beams 4, which answers do not follow",
        "its files hold tensors that the model has no place for: 'score.weight'",
        "at fault: {% for m in messages %}",
        "its tokenizer has tokens that the model does not have (3): a text with one of them is refused",
    ]
    assert not stdout.getvalue()
