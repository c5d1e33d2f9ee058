"""The processes that hold answers to schemas: one for each model that has read its tokenizer, and forked from it one for each
schema. Begun when they are needed, ended when nobody needed them for a while."""

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
MEMORY_BYTES = 2 << 30  # of address space, of any of them; with 128 000 tokens 0.3 GiB are used
GRAMMAR_BYTES = 512 << 20  # for a schema and its answers, beside what the model's process has already
MAX_MODELS, MAX_GRAMMARS = 4, 32  # at once
KEPT_SECONDS = 60.0  # without an answer
# Without a token, after which a schema or a model gives way to others': longer than a stage takes to be taken over.
IDLE_SECONDS = 30.0
LOAD_SECONDS = 120.0  # for a tokenizer, on a busy machine
COMPILE_SECONDS = 20.0  # for a schema, which gets a tenth of it of a processor
MAX_ANSWER_BYTES = 1 << 16  # of a worker, to a tokenizer or a schema
BUSY = "this peer follows as many schemas as it can: ask again later"


@dataclass(eq=False)
class _Grammar:
    """The process of one schema: whoever opens an answer waits for `ready` first."""

    model: _Model
    key: str
    control: socket.socket
    ready: asyncio.Task[None] | None = None
    users: int = 0
    used_at: float = 0.0  # when an answer had its last token
    ended: bool = False
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class _Model:
    job: JobId
    control: socket.socket
    ready: asyncio.Task[asyncio.subprocess.Process]
    vocabulary: int
    holder: PeerId  # for whom it counts: of those that have answers, whoever came first
    grammars: dict[str, _Grammar] = field(default_factory=dict)
    # Of answers, also of those that are being opened.
    holders: Counter[PeerId] = field(default_factory=Counter)
    used_at: float = 0.0  # as of a grammar
    timer: asyncio.TimerHandle | None = None

    @property
    def gone(self) -> bool:
        """Whether its process could not begin, or has ended by itself."""
        ready = self.ready
        if not ready.done() or ready.cancelled():
            return False
        return ready.exception() is not None or ready.result().returncode is not None


class Grammars:
    """`open` for any served model. `aclose` leaves no process. Where there are as many schemas, or models with some, as there may be,
    those without answers give way, and others as `fusion.swarm.shares` says."""

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
        holder: PeerId,
        *,
        masks: bool = False,
    ) -> GrammarSession:
        """An answer to `schema`, as `checked_schema` gives it, that has `tokens` already. `masks`: wanted after each push, and
        one at once. `holder`: for whom.

        Raises GrammarRefused where the schema, the model or the tokens do not allow it, GrammarsBusy, JobFailed, and
        BlobError where the tokenizer cannot be had."""
        model = self._model(job, manifest, holder)
        if not model.holders:
            self._count_for(model, holder)
        model.holders[holder] += 1  # nobody ends it meanwhile for having none
        if model.timer is not None:
            model.timer.cancel()
        try:
            grammar = await self._grammar(model, schema, holder)
        except BaseException:
            self._leave(model, holder)
            raise
        ours, theirs = socket.socketpair()
        _join(grammar)

        def used() -> None:
            grammar.used_at = model.used_at = self._clock()

        def closed() -> None:
            self._leave(model, holder)
            self._left(grammar)

        session = GrammarSession(ours, model.vocabulary, closed, used)
        try:
            with theirs:
                try:
                    socket.send_fds(grammar.control, [MASKS if masks else STATES], [theirs.fileno()])
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
        self, job: JobId, manifest: Manifest, schema: str, tokens: Sequence[int], holder: PeerId
    ) -> GrammarSession:
        """As `open`, with masks."""
        return await self.open(job, manifest, schema, tokens, holder, masks=True)

    # --- schemas

    async def _grammar(self, model: _Model, schema: str, holder: PeerId) -> _Grammar:
        """Compiled, and ready for answers."""
        await self._started(model)
        key = hashlib.sha256(schema.encode()).hexdigest()
        grammar = model.grammars.get(key)
        if grammar is None:
            self._make_room(holder)
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            grammar = model.grammars[key] = _Grammar(model, key, ours)
            self._shares.take(grammar, holder)
            grammar.ready = asyncio.create_task(_compile(model.control, ours, theirs, schema))
        assert grammar.ready is not None
        _join(grammar)  # nobody ends it meanwhile for having no answer
        try:
            await asyncio.shield(grammar.ready)
        except (GrammarRefused, JobFailed):
            self._end(grammar)
            raise
        except asyncio.CancelledError:
            if grammar.ready.cancelled():  # it had to give way, and we were not cancelled ourselves
                raise GrammarsBusy(BUSY) from None
            raise
        finally:
            self._left(grammar)
        self._shares.use(grammar)
        return grammar

    def _make_room(self, holder: PeerId) -> None:
        """GrammarsBusy where nobody has to give way."""
        if self._shares.room():
            return
        every = [grammar for model in self._models.values() for grammar in model.grammars.values()]
        self._shares.used({grammar: grammar.used_at for grammar in every})
        unused = next((grammar for grammar in every if not grammar.users), None)
        other = unused or self._shares.yields(holder, 1)
        if other is None:
            raise GrammarsBusy(BUSY)
        self._end(other)

    def _left(self, grammar: _Grammar) -> None:
        """An answer has ended."""
        grammar.users -= 1
        if not grammar.users and not grammar.ended:
            self._shares.use(grammar)
            grammar.timer = _later(KEPT_SECONDS, self._end, grammar)

    def _end(self, grammar: _Grammar) -> None:
        """It and its answers. Idempotent."""
        if grammar.ended:
            return
        grammar.ended = True
        if grammar.timer is not None:
            grammar.timer.cancel()
        assert grammar.ready is not None
        compiled = grammar.ready.done() and not grammar.ready.cancelled() and not grammar.ready.exception()
        self._shares.release(grammar, completed=compiled)
        with contextlib.suppress(OSError):
            grammar.control.shutdown(socket.SHUT_RDWR)  # the process sees it
        grammar.ready.cancel()
        grammar.ready.add_done_callback(lambda _: grammar.control.close())
        del grammar.model.grammars[grammar.key]
        self._rests(grammar.model)

    # --- models

    def _model(self, job: JobId, manifest: Manifest, holder: PeerId) -> _Model:
        model = self._models.get(job)
        if model is not None and model.gone:
            self._end_model(model)
            model = None
        if model is None:
            if manifest.serve is None or (manifest.tokenizer is None and not manifest.byte_level):
                raise GrammarRefused("response_format: not possible with this model: it has no tokenizer")
            self._make_room_for_model(holder)
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            ready = asyncio.create_task(self._start(job, manifest, ours, theirs))
            model = self._models[job] = _Model(job, ours, ready, manifest.serve.vocabulary, holder)
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

    def _make_room_for_model(self, holder: PeerId) -> None:
        """GrammarsBusy where none has to give way."""
        if self._model_shares.room():
            return
        every = self._models.values()
        self._model_shares.used({model: model.used_at for model in every})
        unused = next((model for model in every if not model.holders), None)
        other = unused or self._model_shares.yields(holder, 1)
        if other is None:
            raise GrammarsBusy(BUSY)
        self._end_model(other)

    def _leave(self, model: _Model, holder: PeerId) -> None:
        """An answer of its has ended."""
        model.holders[holder] -= 1
        if not model.holders[holder]:
            del model.holders[holder]
        if model.holders and model.holder not in model.holders:
            self._count_for(model, next(iter(model.holders)))
        self._rests(model)

    def _rests(self, model: _Model) -> None:
        """For a while, where it has neither answers nor schemas any more."""
        if not model.holders and not model.grammars and self._models.get(model.job) is model:
            model.timer = _later(KEPT_SECONDS, self._end_model, model)

    def _count_for(self, model: _Model, holder: PeerId) -> None:
        """From now on it counts for this one."""
        if self._models.get(model.job) is model:
            model.holder = holder
            self._model_shares.release(model)
            self._model_shares.take(model, holder)

    async def _start(
        self, job: JobId, manifest: Manifest, ours: socket.socket, theirs: socket.socket
    ) -> asyncio.subprocess.Process:
        """The model's process, once it has read the tokenizer."""
        assert manifest.serve is not None
        with theirs:
            data = b""
            if manifest.tokenizer is not None and not manifest.byte_level:
                blobs = self._context.blobs.of(job)
                data = bytes(await blobs.read(manifest.tokenizer, MAX_TOKENIZER_BYTES, [manifest.author]))
            numbers = (os.getpid(), MEMORY_BYTES, GRAMMAR_BYTES)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-s", "-m", MODULE, *map(str, numbers)),
                stdin=theirs.fileno(),
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
                    refused = await _request(ours, json.dumps(about).encode(), data)
            except (OSError, TimeoutError):
                refused = "its tokenizer takes too much time or memory"
            if refused is not None:
                raise GrammarRefused(f"response_format: not possible with this model: {refused}")
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


def _join(grammar: _Grammar) -> None:
    """One user more, and `Grammars._left` for each: the timer runs only while there are none."""
    grammar.users += 1
    if grammar.timer is not None:
        grammar.timer.cancel()


async def _compile(model: socket.socket, ours: socket.socket, theirs: socket.socket, schema: str) -> None:
    """A process for the schema. GrammarRefused says what is wrong with it."""
    with theirs:
        try:
            socket.send_fds(model, [b"g"], [theirs.fileno()])
        except OSError:
            raise JobFailed("response_format: the process that reads schemas has ended") from None
    try:
        async with asyncio.timeout(COMPILE_SECONDS):
            refused = await _request(ours, schema.encode())
    except (OSError, TimeoutError):
        raise GrammarRefused(TOO_MUCH) from None
    if refused is not None:
        raise GrammarRefused(f"response_format: {refused}")


async def _request(connection: socket.socket, text: bytes, data: bytes = b"") -> str | None:
    """What is wrong with it, if anything. OSError where the other end is not there any more, or answers what no worker does: it
    reads what strangers sent."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(BrokenPipeError):  # it may have answered and gone before we are done
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


def _later(seconds: float, call: Callable[..., None], *arguments: object) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, call, *arguments)
