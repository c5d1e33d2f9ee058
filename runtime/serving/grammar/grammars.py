"""The processes that enforce schemas: one for each model, which has loaded the tokenizer, and one for each schema, forked from that.
Started on demand, ended when idle."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobFailed
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.text import MAX_TOKENIZER_BYTES
from fusion.runtime.serving.grammar.matcher import (
    MASKS,
    STATES,
    TOO_MUCH,
    GrammarRefused,
    GrammarsBusy,
    GrammarSession,
    GrammarTooCostly,
)
from fusion.swarm.directory.records import JobId
from fusion.swarm.printable import one_line
from fusion.swarm.shares import Shares
from fusion.swarm.transport import PeerId

MODULE = "fusion.runtime.serving.grammar.worker"
MEMORY_BYTES = 2 << 30  # of address space, of each process; a vocabulary of 128 000 tokens needs 0.3 GiB
GRAMMAR_BYTES = 512 << 20  # of a schema's process, beside the memory of the model's process
MAX_MODELS, MAX_GRAMMARS = 4, 32  # at once
KEPT_SECONDS = 60.0  # without a completion
# Without a token, after which a schema or a model may be preempted: longer than the takeover of a stage.
IDLE_SECONDS = 30.0
LOAD_SECONDS = 120.0  # for a tokenizer, on a busy machine
COMPILE_SECONDS = 20.0  # for a schema, whose CPU time is a tenth of that
MAX_ANSWER_BYTES = 1 << 16  # of a worker's reply to a tokenizer or a schema
BUSY = "this peer follows as many schemas as it can: ask again later"


@dataclass(eq=False)
class _Grammar:
    """The process of one schema; `ready` is done once it has compiled the schema."""

    model: _Model
    key: str
    control: socket.socket
    ready: asyncio.Task[None] | None = None
    users: int = 0
    used_at: float = 0.0  # time of the last token of a completion
    ended: bool = False
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class _Model:
    job: JobId
    control: socket.socket
    ready: asyncio.Task[asyncio.subprocess.Process]
    vocabulary: int
    tenant: PeerId  # that it is charged to: the first of those that have completions
    grammars: dict[str, _Grammar] = field(default_factory=dict)
    # Completions of each tenant, including those that are being opened.
    tenants: Counter[PeerId] = field(default_factory=Counter)
    used_at: float = 0.0  # as of a grammar
    timer: asyncio.TimerHandle | None = None

    @property
    def gone(self) -> bool:
        """Whether its process failed to start, or has ended by itself."""
        ready = self.ready
        if not ready.done() or ready.cancelled():
            return False
        return ready.exception() is not None or ready.result().returncode is not None


class Grammars:
    """`open` for any served model. `aclose` leaves no process. At the limit of schemas, or of models, one without completions is ended,
    else one is preempted by the rules of `fusion.swarm.shares`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._models: dict[JobId, _Model] = {}
        self._clock = context.clock.monotonic
        self._shares: Shares[_Grammar] = Shares(self._clock, MAX_GRAMMARS, IDLE_SECONDS)
        self._model_shares: Shares[_Model] = Shares(self._clock, MAX_MODELS, IDLE_SECONDS)
        self._ending: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        for model in list(self._models.values()):
            self._end_model(model)
        await asyncio.gather(*self._ending)

    async def open(
        self,
        job: JobId,
        manifest: Manifest,
        schema: str,
        tokens: Sequence[int],
        tenant: PeerId,
        *,
        masks: bool = False,
    ) -> GrammarSession:
        """Open a completion with `schema`, a result of `checked_schema`, that has `tokens` already. `masks`: send one at once and after
        each push.

        Raises GrammarRefused where the schema, the model or the tokens do not allow it, GrammarsBusy, JobFailed, and BlobError
        where the tokenizer is not available."""
        model = self._model(job, manifest, tenant)
        if not model.tenants:
            self._charge_to(model, tenant)
        model.tenants[tenant] += 1  # so that it is not ended as idle meanwhile
        if model.timer is not None:
            model.timer.cancel()
        try:
            grammar = await self._grammar(model, schema, tenant)
        except BaseException:
            self._leave(model, tenant)
            raise
        local, remote = socket.socketpair()
        _add_user(grammar)

        def used() -> None:
            grammar.used_at = model.used_at = self._clock()

        def closed() -> None:
            self._leave(model, tenant)
            self._remove_user(grammar)

        session = GrammarSession(local, model.vocabulary, closed, used)
        try:
            with remote:
                try:
                    socket.send_fds(grammar.control, [MASKS if masks else STATES], [remote.fileno()])
                except OSError:
                    raise GrammarTooCostly(TOO_MUCH) from None
            if not await session.push_soon(tokens):
                raise GrammarRefused("answered: not the beginning of an answer that the schema allows")
        except BaseException as error:
            session.close()
            if isinstance(error, JobFailed):  # its process has ended
                self._end(grammar)
            raise
        return session

    async def open_masked(
        self, job: JobId, manifest: Manifest, schema: str, tokens: Sequence[int], tenant: PeerId
    ) -> GrammarSession:
        """As `open`, with masks."""
        return await self.open(job, manifest, schema, tokens, tenant, masks=True)

    # --- schemas

    async def _grammar(self, model: _Model, schema: str, tenant: PeerId) -> _Grammar:
        """The process of the schema, which has compiled it."""
        await self._started(model)
        key = hashlib.sha256(schema.encode()).hexdigest()
        grammar = model.grammars.get(key)
        if grammar is None:
            self._make_room(tenant)
            local, remote = socket.socketpair()
            local.setblocking(False)
            grammar = model.grammars[key] = _Grammar(model, key, local)
            self._shares.take(grammar, tenant)
            grammar.ready = asyncio.create_task(_compile(model.control, local, remote, schema))
        assert grammar.ready is not None
        _add_user(grammar)  # so that it is not ended as idle meanwhile
        try:
            await asyncio.shield(grammar.ready)
        except (GrammarRefused, JobFailed):
            self._end(grammar)
            raise
        except asyncio.CancelledError:
            if grammar.ready.cancelled():  # it was preempted; this caller was not cancelled
                raise GrammarsBusy(BUSY) from None
            raise
        finally:
            self._remove_user(grammar)
        self._shares.use(grammar)
        return grammar

    def _make_room(self, tenant: PeerId) -> None:
        """End a schema's process where there are too many. GrammarsBusy where none may be preempted."""
        if self._shares.room():
            return
        every = [grammar for model in self._models.values() for grammar in model.grammars.values()]
        self._shares.used({grammar: grammar.used_at for grammar in every})
        unused = next((grammar for grammar in every if not grammar.users), None)
        other = unused or self._shares.yields(tenant, 1)
        if other is None:
            raise GrammarsBusy(BUSY)
        self._end(other)

    def _remove_user(self, grammar: _Grammar) -> None:
        """A completion of the schema has ended."""
        grammar.users -= 1
        if not grammar.users and not grammar.ended:
            self._shares.use(grammar)
            grammar.timer = _call_later(KEPT_SECONDS, self._end, grammar)

    def _end(self, grammar: _Grammar) -> None:
        """End the schema's process and its completions. Idempotent."""
        if grammar.ended:
            return
        grammar.ended = True
        if grammar.timer is not None:
            grammar.timer.cancel()
        assert grammar.ready is not None
        compiled = grammar.ready.done() and not grammar.ready.cancelled() and not grammar.ready.exception()
        self._shares.release(grammar, completed=compiled)
        with contextlib.suppress(OSError):
            grammar.control.shutdown(socket.SHUT_RDWR)  # the process then ends
        grammar.ready.cancel()
        grammar.ready.add_done_callback(lambda _: grammar.control.close())
        del grammar.model.grammars[grammar.key]
        self._start_idle_timer(grammar.model)

    # --- models

    def _model(self, job: JobId, manifest: Manifest, tenant: PeerId) -> _Model:
        model = self._models.get(job)
        if model is not None and model.gone:
            self._end_model(model)
            model = None
        if model is None:
            if manifest.serve is None or (manifest.tokenizer is None and not manifest.byte_level):
                raise GrammarRefused("response_format: not possible with this model: it has no tokenizer")
            self._make_room_for_model(tenant)
            local, remote = socket.socketpair()
            local.setblocking(False)
            ready = asyncio.create_task(self._start(job, manifest, local, remote))
            model = self._models[job] = _Model(job, local, ready, manifest.serve.vocabulary, tenant)
        return model

    async def _started(self, model: _Model) -> None:
        try:
            await asyncio.shield(model.ready)
        except asyncio.CancelledError:
            if model.ready.cancelled():
                raise GrammarsBusy(BUSY) from None
            raise
        except Exception:
            self._end_model(model)
            raise
        self._model_shares.use(model)

    def _make_room_for_model(self, tenant: PeerId) -> None:
        """End a model's process where there are too many. GrammarsBusy where none may be preempted."""
        if self._model_shares.room():
            return
        every = self._models.values()
        self._model_shares.used({model: model.used_at for model in every})
        unused = next((model for model in every if not model.tenants), None)
        other = unused or self._model_shares.yields(tenant, 1)
        if other is None:
            raise GrammarsBusy(BUSY)
        self._end_model(other)

    def _leave(self, model: _Model, tenant: PeerId) -> None:
        """A completion of the tenant with this model has ended."""
        model.tenants[tenant] -= 1
        if not model.tenants[tenant]:
            del model.tenants[tenant]
        if model.tenants and model.tenant not in model.tenants:
            self._charge_to(model, next(iter(model.tenants)))
        self._start_idle_timer(model)

    def _start_idle_timer(self, model: _Model) -> None:
        """Start the idle timer of a model that has neither completions nor schemas any more."""
        if not model.tenants and not model.grammars and self._models.get(model.job) is model:
            model.timer = _call_later(KEPT_SECONDS, self._end_model, model)

    def _charge_to(self, model: _Model, tenant: PeerId) -> None:
        """Charge the model's process to this tenant from now on."""
        if self._models.get(model.job) is model:
            model.tenant = tenant
            self._model_shares.release(model)
            self._model_shares.take(model, tenant)

    async def _start(
        self, job: JobId, manifest: Manifest, local: socket.socket, remote: socket.socket
    ) -> asyncio.subprocess.Process:
        """Start the model's process and wait until it has loaded the tokenizer."""
        assert manifest.serve is not None
        with remote:
            data = b""
            if manifest.tokenizer is not None and not manifest.byte_level:
                blobs = self._context.blobs.of(job)
                data = bytes(await blobs.read(manifest.tokenizer, MAX_TOKENIZER_BYTES, [manifest.author]))
            numbers = (os.getpid(), MEMORY_BYTES, GRAMMAR_BYTES)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-s", "-m", MODULE, *map(str, numbers)),
                stdin=remote.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        try:
            about = {
                "kind": "bytes" if manifest.byte_level else "tokenizer",
                "vocabulary": manifest.serve.vocabulary,
                "end_tokens": list(manifest.serve.end_tokens),
                "length": len(data),
            }
            try:
                async with asyncio.timeout(LOAD_SECONDS):
                    error_message = await _request(local, json.dumps(about).encode(), data)
            except (OSError, TimeoutError):
                error_message = "its tokenizer takes too much time or memory"
            if error_message is not None:
                raise GrammarRefused(f"response_format: not possible with this model: {error_message}")
        except BaseException:
            await _killed(process)
            raise
        return process

    def _end_model(self, model: _Model) -> None:
        if self._models.get(model.job) is not model:
            return
        del self._models[model.job]
        ready = model.ready
        started = ready.done() and not ready.cancelled() and not ready.exception()
        self._model_shares.release(model, completed=started)
        for grammar in list(model.grammars.values()):
            self._end(grammar)
        if model.timer is not None:
            model.timer.cancel()
        model.ready.cancel()
        ending = asyncio.create_task(_end_process(model))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


def _add_user(grammar: _Grammar) -> None:
    """Add a user; each needs a `Grammars._remove_user`. The idle timer runs only while there are none."""
    grammar.users += 1
    if grammar.timer is not None:
        grammar.timer.cancel()


async def _compile(model: socket.socket, local: socket.socket, remote: socket.socket, schema: str) -> None:
    """Fork a process for the schema and have it compiled. GrammarRefused says what is wrong with the schema."""
    with remote:
        try:
            socket.send_fds(model, [b"g"], [remote.fileno()])
        except OSError:
            raise JobFailed("response_format: the process that reads schemas has ended") from None
    try:
        async with asyncio.timeout(COMPILE_SECONDS):
            error_message = await _request(local, schema.encode())
    except (OSError, TimeoutError):
        raise GrammarRefused(TOO_MUCH) from None
    if error_message is not None:
        raise GrammarRefused(f"response_format: {error_message}")


async def _request(connection: socket.socket, text: bytes, data: bytes = b"") -> str | None:
    """Send a request; returns the worker's error message, or None. OSError where the worker has ended, or its reply is invalid: it
    processes strangers' data."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(BrokenPipeError):  # it may have replied and ended before it has read everything
        await loop.sock_sendall(connection, struct.pack("<I", len(text)) + text)
        await loop.sock_sendall(connection, data)
    head = await _exactly(connection, 4)
    answer = await _exactly(connection, min(struct.unpack("<I", head)[0], MAX_ANSWER_BYTES))
    try:
        match json.loads(answer):
            case {"error": error}:
                return None if error is None else one_line(str(error))
            case dict():
                return None
    except (ValueError, RecursionError):
        pass
    raise ConnectionError("the answer is no JSON object")


async def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = await asyncio.get_running_loop().sock_recv(connection, count - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return bytes(data)


async def _end_process(model: _Model) -> None:
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await _killed(await model.ready)
    model.control.close()


async def _killed(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _call_later(seconds: float, call: Callable[..., None], *arguments: object) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, call, *arguments)
