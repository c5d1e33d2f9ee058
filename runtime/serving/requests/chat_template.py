"""Chat templates of models, rendered where they can do no harm: in processes of their own, one for each model, under
limits of memory and time (`fusion.runtime.serving.requests.template_worker`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cachetools import LRUCache

from fusion.runtime.job.protocol import MAX_PROMPT_BYTES
from fusion.swarm.directory.records import JobId
from fusion.swarm.printable import one_line

WORKER = Path(__file__).with_name("template_worker.py")
MEMORY_BYTES = 512 << 20  # of address space; what becomes a text of MAX_PROMPT_BYTES takes a quarter of it
CPU_SECONDS = 2
# By the system. Where it is not, a template that takes longer may be at fault itself, and not just wait for others.
CPU_IS_BOUNDED = sys.platform != "win32"
TOO_MUCH = "it takes too long, or too much memory"
RENDER_SECONDS = 6.0  # on a busy machine, the start of the process included
WAIT_SECONDS = 10.0  # for a turn
RUNNING = 2  # at once
KEPT = 2  # processes that wait for the next messages of their model
KEPT_SECONDS = 60.0
REMEMBERED_MODELS = 1024


class TemplateFailed(ValueError):
    """The template cannot be rendered with these messages; says why, in one line."""


class TextTooLong(TemplateFailed):
    """It can, and what it writes is longer than the model reads."""


class TemplatesBusy(RuntimeError):
    """There was no turn, or too little of the machine's time in it."""


class ChatTemplates:
    """`render` for any model. `aclose` leaves no process."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(RUNNING)
        self._models: LRUCache[JobId, asyncio.Lock] = LRUCache(REMEMBERED_MODELS)
        # That which was used last comes last
        self._kept: dict[JobId, tuple[_Worker, asyncio.TimerHandle]] = {}
        self._busy: set[_Worker] = set()
        self._ending: set[asyncio.Task[None]] = set()

    async def render(
        self,
        model: JobId,
        template: str,
        variables: Mapping[str, Any],
        most_bytes: int = MAX_PROMPT_BYTES,
    ) -> str:
        """The text, of at most so many bytes of UTF-8. A model has one turn at a time, so that others get theirs. Raises
        TemplateFailed, TextTooLong, TemplatesBusy."""
        turn: asyncio.Lock = self._models.setdefault(model, asyncio.Lock())
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    await stack.enter_async_context(turn)
                    await stack.enter_async_context(self._turns)
            except TimeoutError:
                raise TemplatesBusy("this peer renders as many chats as it can: ask again later") from None
            return await self._render(model, template, variables, min(most_bytes, MAX_PROMPT_BYTES))

    async def aclose(self) -> None:
        for model in list(self._kept):
            self._drop(model)
        for worker in self._busy:
            self._end(worker)
        await asyncio.gather(*self._ending)

    async def _render(
        self, model: JobId, template: str, variables: Mapping[str, Any], most_bytes: int
    ) -> str:
        worker = self._taken(model)
        self._busy.add(worker)
        rendered = False
        try:
            async with asyncio.timeout(RENDER_SECONDS):
                text = await worker.render(template, variables, most_bytes)
            rendered = True
            return text
        except TimeoutError:  # before OSError, which it is one of
            if not CPU_IS_BOUNDED:
                raise TemplateFailed(TOO_MUCH) from None
            raise TemplatesBusy(
                f"this peer is too busy to render a chat in {RENDER_SECONDS:g} s: ask again later"
            ) from None
        except (EOFError, OSError):
            raise TemplateFailed(TOO_MUCH) from None
        except TextTooLong:
            rendered = True
            raise
        finally:
            self._busy.discard(worker)
            if rendered:
                self._keep(model, worker)
            else:
                self._end(worker)

    def _taken(self, model: JobId) -> _Worker:
        if model not in self._kept:
            return _Worker()
        worker, timer = self._kept.pop(model)
        timer.cancel()
        return worker

    def _keep(self, model: JobId, worker: _Worker) -> None:
        timer = asyncio.get_running_loop().call_later(KEPT_SECONDS, self._drop, model)
        self._kept[model] = worker, timer
        while len(self._kept) > KEPT:
            self._drop(next(iter(self._kept)))

    def _drop(self, model: JobId) -> None:
        worker, timer = self._kept.pop(model)
        timer.cancel()
        self._end(worker)

    def _end(self, worker: _Worker) -> None:
        ending = asyncio.create_task(worker.aclose())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


class _Worker:
    """One process, started when it is needed."""

    def __init__(self) -> None:
        self._starting: asyncio.Future[asyncio.subprocess.Process] | None = None

    async def render(self, template: str, variables: Mapping[str, Any], most_bytes: int) -> str:
        """Raises TemplateFailed, TextTooLong; EOFError, OSError where the process ended."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(_start())
        process = await asyncio.shield(self._starting)
        assert process.stdin is not None and process.stdout is not None
        asked = {"template": template, "variables": variables, "most_bytes": most_bytes}
        # Half of a surrogate pair, which a terminal may give, is the process's to refuse.
        data = json.dumps(asked, ensure_ascii=False).encode(errors="surrogatepass")
        process.stdin.write(len(data).to_bytes(4, "big") + data)
        await process.stdin.drain()
        head = await process.stdout.readexactly(5)
        length = int.from_bytes(head[1:], "big")
        if length > MAX_PROMPT_BYTES:
            raise EOFError
        said = str(await process.stdout.readexactly(length), "utf-8", "replace")
        match head[:1]:
            case b"t":
                return said
            case b"l":
                raise TextTooLong(f"it writes more than {most_bytes} bytes of text")
        raise TemplateFailed(one_line(said))

    async def aclose(self) -> None:
        if self._starting is None:
            return
        with contextlib.suppress(OSError):
            process = await self._starting
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _start() -> asyncio.subprocess.Process:
    limits = (MEMORY_BYTES, CPU_SECONDS)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", str(WORKER), str(os.getpid()), *map(str, limits)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
