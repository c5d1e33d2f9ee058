"""Renders chat templates in sandboxed processes, one for each model, with limits on memory and time
(`fusion.runtime.serving.requests.template_worker`)."""

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
MEMORY_BYTES = 512 << 20  # of address space; rendering MAX_PROMPT_BYTES takes a quarter of it
CPU_SECONDS = 2
# Whether the system limits CPU time. If not, a template that times out may be at fault itself and not just starved of CPU.
CPU_IS_BOUNDED = sys.platform != "win32"
TOO_MUCH = "it takes too long, or too much memory"
RENDER_SECONDS = 6.0  # on a busy machine, the start of the process included
WAIT_SECONDS = 10.0  # in the queue
RUNNING = 2  # at once
KEPT = 2  # idle processes that are reused for their model
KEPT_SECONDS = 60.0
REMEMBERED_MODELS = 1024


class TemplateFailed(ValueError):
    """The template cannot be rendered with these messages; the message says why, in one line."""


class TextTooLong(TemplateFailed):
    """The rendered text is longer than the model's context."""


class TemplatesBusy(RuntimeError):
    """The queue, or the render itself, timed out because the machine is busy."""


class ChatTemplates:
    """A pool of template processes. `aclose` leaves no process."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(RUNNING)
        self._models: LRUCache[JobId, asyncio.Lock] = LRUCache(REMEMBERED_MODELS)
        # Least recently used first
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
        """The rendered text, at most `most_bytes` of UTF-8. One render at a time for each model, so that no model starves others.
        Raises TemplateFailed, TextTooLong, TemplatesBusy."""
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
        worker = self._reuse_or_start(model)
        self._busy.add(worker)
        rendered = False
        try:
            async with asyncio.timeout(RENDER_SECONDS):
                text = await worker.render(template, variables, most_bytes)
            rendered = True
            return text
        except TimeoutError:  # a subclass of OSError, so caught first
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

    def _reuse_or_start(self, model: JobId) -> _Worker:
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
    """One process, started by the first render."""

    def __init__(self) -> None:
        self._starting: asyncio.Future[asyncio.subprocess.Process] | None = None

    async def render(self, template: str, variables: Mapping[str, Any], most_bytes: int) -> str:
        """Raises TemplateFailed, TextTooLong; EOFError, OSError where the process ended."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(_start())
        process = await asyncio.shield(self._starting)
        assert process.stdin is not None and process.stdout is not None
        request = {"template": template, "variables": variables, "most_bytes": most_bytes}
        # The process refuses half of a surrogate pair, which a terminal may give.
        data = json.dumps(request, ensure_ascii=False).encode(errors="surrogatepass")
        process.stdin.write(len(data).to_bytes(4, "big") + data)
        await process.stdin.drain()
        head = await process.stdout.readexactly(5)
        length = int.from_bytes(head[1:], "big")
        if length > MAX_PROMPT_BYTES:
            raise EOFError
        text = str(await process.stdout.readexactly(length), "utf-8", "replace")
        match head[:1]:
            case b"t":
                return text
            case b"l":
                raise TextTooLong(f"it writes more than {most_bytes} bytes of text")
        raise TemplateFailed(one_line(text))

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
