"""Whatever the API's own description allows, and what it does not allow, is answered, and never with a mistake of ours."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from support.http_api import TEMPLATE, served_over_http

pytestmark = [pytest.mark.slow, pytest.mark.process]

CASES = {
    ("/v1/completions", "POST"): 1000,
    ("/v1/chat/completions", "POST"): 1000,
    ("/v1/responses", "POST"): 500,
    ("/v1/embeddings", "POST"): 20,
    ("/v1/models/{model}", "GET"): 300,
    ("/v1/models", "GET"): 20,
    ("/health", "GET"): 20,
    ("/metrics", "GET"): 20,
}
LEAST = 2000  # of them; where there is little to vary there are fewer cases
SECONDS = 800.0


@contextmanager
def served(home: Path) -> Iterator[str]:
    """The URL of an API in front of a model, served by a loop in a thread."""
    ready, done = threading.Event(), threading.Event()
    urls = list[str]()

    async def main() -> None:
        async with served_over_http(home, template=TEMPLATE, seconds=SECONDS) as (swarm, http):
            urls.append(http.url.removesuffix("/v1"))
            ready.set()
            await asyncio.to_thread(done.wait, SECONDS)
            await swarm.freed()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert ready.wait(60)
        yield urls[0]
    finally:
        done.set()
        thread.join()


def test_two_thousand_cases(tmp_path: Path) -> None:
    import schemathesis  # for seconds of the collection of every run that leaves this test out
    from schemathesis import GenerationMode

    with served(tmp_path) as url:
        described = requests.get(f"{url}/openapi.json", timeout=30).json()
        schema = schemathesis.openapi.from_dict(described)
        operations = {
            (each.ok().path, each.ok().method.upper()): each.ok() for each in schema.get_all_operations()
        }
        assert operations.keys() == CASES.keys()
        statuses: dict[str, dict[int, int]] = {}
        for key, count in CASES.items():
            found = statuses[" ".join(key)] = {}
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                strategy = operations[key].as_strategy(generation_mode=mode)
                with suppress(Unsatisfiable):  # nothing is wrong of what takes no parameters
                    _ask(strategy, url, count // 2, found)
        print(statuses)
        assert sum(sum(found.values()) for found in statuses.values()) >= LEAST
        assert all(found.get(200) for key, found in statuses.items() if "embeddings" not in key)
        assert requests.get(f"{url}/health", timeout=30).status_code == 200


def _ask(strategy: object, url: str, count: int, found: dict[int, int]) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)  # type: ignore[arg-type]
    def one(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model", ""), str):
            few = dict.fromkeys(("max_tokens", "max_output_tokens"), 4)
            case.body |= {"model": "llama", **few}  # else hardly any would be answered
        if case.path_parameters and len(found) % 2:
            case.path_parameters["model"] = "llama"
        answer = case.call(base_url=url)
        found[answer.status_code] = found.get(answer.status_code, 0) + 1
        assert answer.status_code < 500, (case.method, case.path, case.body, answer.text)

    one()
