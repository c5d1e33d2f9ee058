"""Templates come with models from strangers: they render as transformers renders them, and nothing else comes of them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from fusion.runtime.job.protocol import MAX_PROMPT_BYTES
from fusion.runtime.serving.requests import chat_template
from fusion.runtime.serving.requests.chat_template import (
    WORKER,
    ChatTemplates,
    TemplateFailed,
    TemplatesBusy,
    TextTooLong,
)
from fusion.swarm.directory.records import JobId

pytestmark = pytest.mark.process

MODEL, OTHER = JobId("a" * 64), JobId("b" * 64)
MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Grüße\n{{ 7 * 7 }}"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, None]}}}],
    },
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
GOOD = [
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
    "{%- for m in messages %}\n    {%- if m.role == 'user' %}\n        {{- m.content }}\n    {%- endif %}\n{%- endfor %}",
    "{% if tools %}\n{{ tools | tojson(indent=2) }}\n{% endif %}{{ messages | tojson }}",
    "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{% set n = namespace(found=false) %}{% for m in messages %}{% set n.found = true %}{% endfor %}{{ n.found }}",
    "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
    "{% macro say(m) %}[{{ m.role }}]{% endmacro %}{{ say(messages[0]) }}{{ dict(a=1).items() | list }}",
    "{{ strftime_now('%Y')[:2] }}{{ messages[0].content.split(' ')[::-1] | join('+') | upper }}",
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BAD = {
    "a range": "{% for i in range(10**9) %}x{% endfor %}",
    "loops": ENDLESS,
    "a product": "{{ 'a' * 10**10 }}",
    "a list": "{{ [0] * 10**10 }}",
    "a power": "{{ 10 ** 10 ** 10 }}",
    "padding": "{{ 'a'.ljust(10**11) }}",
    "a format": "{{ '%99999999999d' % 3 }}",
    "doubling": "{% set n = namespace(x='a' * 99999) %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "writing": "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "a class": "{{ ''.__class__.__mro__ }}",
    "a module": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "a namespace": "{{ namespace(_x=1) }}",
    "changing": "{{ messages.clear() }}",
    "macros": "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}",
    "nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "syntax": "{% if %}",
    "including": "{% include '/etc/passwd' %}",
    "its own word": "{{ raise_exception('roles must\n take turns') }}",
}


def variables(**more: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "tools": TOOLS, "bos_token": "<s>", "eos_token": "</s>", **more}


@asynccontextmanager
async def templates() -> AsyncIterator[ChatTemplates]:
    """Afterwards no process is left."""
    opened = ChatTemplates()
    try:
        yield opened
    finally:
        await opened.aclose()
        assert workers() == []


def workers() -> list[int]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if str(WORKER) in child.cmdline():
                found.append(child.pid)
    return found


def test_they_render_as_transformers_renders_them() -> None:
    async def main() -> None:
        async with templates() as opened:
            for template in GOOD:
                [expected], _ = render_jinja_template(
                    conversations=[MESSAGES], tools=TOOLS, chat_template=template, add_generation_prompt=True,
                    bos_token="<s>", eos_token="</s>",
                )  # fmt: skip
                given = variables(add_generation_prompt=True)
                assert await opened.render(MODEL, template, given) == expected, template
            assert len(workers()) == 1, "one process for all chats of a model"

    asyncio.run(main())


def test_what_a_template_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 1)
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 60.0)  # how fast the machine is does not count here

    async def main() -> None:
        async with templates() as opened:
            said = {}
            for name, template in BAD.items():
                with pytest.raises(TemplateFailed) as found:
                    await opened.render(MODEL, template, variables())
                said[name] = str(found.value)
            assert said["its own word"] == "roles must take turns"
            assert said["loops"] == "it takes too long, or too much memory"
            assert "unsafe" in said["a class"]
            assert await opened.render(MODEL, GOOD[0], variables())

    asyncio.run(main())


def test_a_machine_without_time_for_it_is_no_mistake_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.0)

    async def main() -> None:
        async with templates() as opened:
            with pytest.raises(TemplatesBusy, match="too busy to render a chat in 0 s"):
                await opened.render(MODEL, GOOD[0], variables())

    asyncio.run(main())


def test_one_that_never_ends_keeps_no_other_model_waiting() -> None:
    async def main() -> None:
        async with templates() as opened:
            endless = [asyncio.create_task(opened.render(MODEL, ENDLESS, variables())) for _ in range(3)]
            await asyncio.sleep(0)
            assert await opened.render(OTHER, GOOD[0], variables())
            assert not any(task.done() for task in endless)
            for task in endless:
                task.cancel()
            await asyncio.gather(*endless, return_exceptions=True)

    asyncio.run(main())


def test_two_models_never_share_a_process_and_few_are_kept() -> None:
    async def main() -> None:
        async with templates() as opened:
            seen = set[int]()
            for number in range(4):
                await opened.render(JobId(f"{number:064x}"), GOOD[0], variables())
                seen |= set(workers())
            assert len(seen) == 4
            async with asyncio.timeout(10):
                while len(workers()) > chat_template.KEPT:
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_the_process_can_open_nothing() -> None:
    async def main() -> None:
        async with templates() as opened:
            await opened.render(MODEL, GOOD[0], variables())
            [worker] = workers()
            process = psutil.Process(worker)
            if sys.platform == "linux":
                assert process.rlimit(psutil.RLIMIT_NOFILE) == (0, 0)
                assert process.rlimit(psutil.RLIMIT_AS)[1] == chat_template.MEMORY_BYTES

    asyncio.run(main())


CONTENT = "{{ messages[0].content }}"


def test_a_text_has_so_many_bytes_and_one_that_has_more_costs_no_process() -> None:
    async def main() -> None:
        async with templates() as opened:

            async def said(text: str, *most: int) -> str:
                return await opened.render(MODEL, CONTENT, {"messages": [{"content": text}]}, *most)

            assert await said("é" * 500, 1000) == "é" * 500
            before = workers()
            with pytest.raises(TextTooLong, match="more than 1000 bytes"):
                await said("é" * 500 + "a", 1000)
            large = "中\u2028é" * 1_000_000
            assert await said(large) == large
            with pytest.raises(TextTooLong):
                await said("é" * (MAX_PROMPT_BYTES // 2 + 1))
            assert workers() == before
            with pytest.raises(TemplateFailed, match="surrogates not allowed"):
                await said("half of a pair: \ud800")

    asyncio.run(main())
