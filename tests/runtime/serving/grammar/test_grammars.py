"""Schemas come from strangers: whatever follows one is JSON of it, and nothing else comes of the others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import psutil
import pytest
from support.served import Peer, swarm_of
from support.source_tokenizer import tokenizer_of_sources
from tokenizers import Tokenizer, decoders, models

from fusion.runtime.job.errors import JobFailed
from fusion.runtime.job.manifest import Manifest, ServeConfig
from fusion.runtime.serving.grammar import grammars, worker
from fusion.runtime.serving.grammar.grammars import Grammars
from fusion.runtime.serving.grammar.matcher import GrammarRefused, GrammarsBusy, GrammarSession
from fusion.runtime.serving.requests.json_schema import JSON_OBJECT, checked_schema
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.errors import BlobError
from fusion.swarm.transport import PeerId

pytestmark = pytest.mark.process

MODEL, OTHER = JobId("a" * 64), JobId("b" * 64)
US = PeerId("us")
BYTES = Manifest(
    name="bytes",
    kind="serve",
    graph=Digest("c" * 64),
    cuts=(),
    weights=(Digest("d" * 64),),
    proposed=(US,),
    author=US,
    serve=ServeConfig(cache="kv", max_sequence=64, vocabulary=300, end_tokens=(299,)),
    byte_level=True,
)
SHORT = {"type": "string", "maxLength": 8}
GOOD: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {
            "name": SHORT,
            "age": {"type": "integer", "minimum": -3, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["ä", 'q"\\', None]}, "maxItems": 3},
            "more": {"type": "object", "additionalProperties": False},
        },
        "required": ["name", "tags"],
        "additionalProperties": False,
    },
    "choice": {"anyOf": [{"const": {"a": [1, 2.5]}}, {"type": "boolean"}, {"type": "string", "pattern": "^[a-c]{2,5}$"}]},
    "tree": {
        "$defs": {"t": {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/t"}]}},
                        "required": ["next"], "additionalProperties": False}},
        "$ref": "#/$defs/t",
    },
    "date": {"type": "string", "format": "date"},
    "moment": {"type": "string", "format": "date-time"},
}  # fmt: skip


def doubled(kind: str, depth: int, leaf: dict[str, Any]) -> dict[str, Any]:
    names = {f"d{i}": {kind: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$defs": {**names, f"d{depth}": leaf}, "$ref": "#/$defs/d0"}


BAD: dict[str, dict[str, Any]] = {
    "a product of divisors": {"type": "integer", "multipleOf": 999983},
    "all of itself": doubled("allOf", 60, {"type": "string", "pattern": "a"}),
    "a loop": {"$ref": "#"},
    "two that refer to each other": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "patterns together": {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(1, 40)]},
    "nested patterns": {"type": "string", "pattern": "(" * 2000 + "a" + ")" * 2000},
    "looking ahead": {"type": "string", "pattern": "(?=a)b"},
    "alternatives": {"allOf": [{"anyOf": [{"properties": {f"{n}{i}": {}}} for n in "pq"]} for i in range(20)]},
    "a numerical range": {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.2e300},
    "no choice": {"enum": []},
    "what is not known": {"not": {}},
    "a type": {"type": "objec"},
    "no such place": {"$ref": "#/$defs/nowhere"},
}  # fmt: skip
# Of these the first token is known, and what comes after it is not to be had.
LATER: dict[str, dict[str, Any]] = {
    "repeated patterns": {"type": "string", "pattern": "^(((a{100}){100}){100}){100}$"},
    "too many properties": {"type": "object", "properties": {f"k{i:04d}": {} for i in range(1500)}},
    "one of many keys": {"enum": [{f"a{i}": i} for i in range(4000)]},
}
# Large, and yet harmless.
LARGE: dict[str, dict[str, Any]] = {
    "an enum": {"enum": [f"v{i:05d}" for i in range(5000)]},
    "any of itself": doubled("anyOf", 60, {"type": "boolean"}),
    "many items": {"type": "array", "minItems": 10**9, "maxItems": 10**9, "items": {"type": "array"}},
    "a long text": {"type": "string", "minLength": 10**6, "maxLength": 10**9},
    "many properties": {"type": "object", "properties": {f"k{i:04d}": {} for i in range(300)}, "required": ["k0299"]},
}  # fmt: skip


@asynccontextmanager
async def opened(home: Path) -> AsyncIterator[tuple[Grammars, Peer]]:
    """Afterwards no process is left."""
    async with swarm_of(1, home, seconds=300) as swarm:
        made = Grammars(swarm.peers[0].context)
        try:
            yield made, swarm.peers[0]
        finally:
            await made.aclose()
            async with asyncio.timeout(30):
                while workers():
                    await asyncio.sleep(0.01)


def workers() -> list[psutil.Process]:
    found = []
    for child in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if grammars.MODULE in child.cmdline() and child.environ().get("FUSION_TEST_HOME") == MARK:
                found.append(child)
    return found


MARK = f"{random.SystemRandom().getrandbits(64)}"


@pytest.fixture(autouse=True)
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_TEST_HOME", MARK)


async def session_of(
    made: Grammars,
    schema: dict[str, Any],
    tokens: Sequence[int] = (),
    manifest: Manifest = BYTES,
    job: JobId = MODEL,
) -> GrammarSession:
    text = checked_schema(json.dumps(schema))
    return await made.open(job, manifest, text, tokens, US, masks=True)


def allowed(session: GrammarSession, vocabulary: int) -> list[int]:
    bits = np.unpackbits(np.frombuffer(session.mask(), np.uint8), bitorder="little")
    assert not bits[vocabulary + 1 :].any() and bool(bits[vocabulary]) == session.accepts
    return [int(i) for i in bits[:vocabulary].nonzero()[0]]


def follow(session: GrammarSession, vocabulary: int, seed: int, most: int = 300) -> list[int]:
    """Tokens drawn from those that may come next, until none may."""
    draw, tokens = random.Random(seed), list[int]()
    while not session.complete and len(tokens) < most:
        tokens.append(draw.choice(allowed(session, vocabulary)))
        session.push(tokens[-1])
    return tokens


def test_a_process_that_has_answered_and_gone_is_heard() -> None:
    """Before it was told everything, as where it is quicker than we are."""

    async def main() -> str | None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            worker._answer(theirs, error="a pattern")
            theirs.close()
            return await grammars._request(ours, b"{}")

    assert asyncio.run(main()) == "a pattern"


@pytest.mark.parametrize("answer", [b"", b"{", b"\xff", b"[]", b"7", b"[" * 60_000, b'{"error": '])
def test_an_answer_of_a_worker_that_is_no_answer_is_as_if_it_had_gone(answer: bytes) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            theirs.sendall(struct.pack("<I", len(answer)) + answer)
            with pytest.raises(OSError):
                await grammars._request(ours, b"{}")

    asyncio.run(main())


@pytest.mark.parametrize("name", GOOD)
def test_whatever_follows_a_schema_is_json_of_it(name: str, tmp_path: Path) -> None:
    valid = jsonschema_rs.validator_for(GOOD[name], validate_formats=True)

    async def main() -> None:
        async with opened(tmp_path) as (made, _):
            for seed in range(12):
                with closing(await session_of(made, GOOD[name])) as session:
                    tokens = follow(session, 300, seed)
                    assert session.complete or name == "tree", bytes(tokens)
                    if session.complete:
                        valid.validate(json.loads(bytes(tokens)))
                at = random.Random(seed).randrange(len(tokens))
                # Whoever goes on with it goes on with the same tokens.
                with closing(await session_of(made, GOOD[name], tokens[:at])) as again:
                    for token in tokens[at:]:
                        assert token in allowed(again, 300)
                        again.push(token)
                    assert again.complete == session.complete

    asyncio.run(main())


def test_a_model_with_a_tokenizer_follows_by_its_own_tokens(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (made, peer):
            tokenizer = tokenizer_of_sources()
            ends = tokenizer.get_vocab_size()
            tokenizer.add_special_tokens(["<end>"])
            digest = await peer.context.blobs.put(tokenizer.to_str().encode())
            serve = ServeConfig(cache="kv", max_sequence=64, vocabulary=ends + 5, end_tokens=(ends,))
            manifest = replace(BYTES, byte_level=False, tokenizer=digest, serve=serve)
            schema = {"type": "object", "properties": {"return": {"enum": ["self", "None"]}, "a": {"type": "boolean"}},
                      "required": ["return", "a"], "additionalProperties": False}  # fmt: skip
            for seed in range(20):
                with closing(await session_of(made, schema, (), manifest)) as session:
                    tokens = follow(session, ends + 5, seed)
                assert session.complete and max(tokens) < ends
                text = tokenizer.decode(tokens)
                jsonschema_rs.validate(schema, json.loads(text))
                assert len(tokens) < len(text), "tokens of more than one character"

    asyncio.run(main())


def test_models_whose_tokens_spell_no_text_are_refused_in_one_line(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (made, peer):
            words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
            words.decoder = decoders.WordPiece()
            for data, line in (
                (words.to_str().encode(), "does not say which text each token stands for"),
                (b"{}", "cannot be read"),
                (b"\xff" * 100, "cannot be read"),
                (None, "it has no tokenizer"),
            ):
                digest = None if data is None else await peer.context.blobs.put(data)
                manifest = replace(BYTES, byte_level=False, tokenizer=digest)
                with pytest.raises(GrammarRefused, match=f"^response_format: not possible .*{line}"):
                    await session_of(made, {}, (), manifest)

    asyncio.run(main())


def test_what_a_schema_cannot_do(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (made, _):
            bystander = await session_of(made, GOOD["object"])
            for name, schema in BAD.items():
                with pytest.raises(GrammarRefused, match=r"^response_format: ") as found:
                    (await session_of(made, schema)).close()
                assert "\n" not in str(found.value) and len(str(found.value)) < 400, name
            for schema in LATER.values():
                with (
                    closing(await session_of(made, schema)) as session,
                    pytest.raises(JobFailed, match="takes too much"),
                ):
                    follow(session, 300, 1, 20)
            for schema in LARGE.values():
                with closing(await session_of(made, schema)) as session:
                    assert follow(session, 300, 1, 20)
            with closing(bystander):
                jsonschema_rs.validate(GOOD["object"], json.loads(bytes(follow(bystander, 300, 1))))

    asyncio.run(main())


def test_only_so_many_schemas_are_followed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_GRAMMARS", 2)

    async def main() -> None:
        async with opened(tmp_path) as (made, _):
            one, two = [await session_of(made, {"const": i}) for i in (1, 2)]
            again = await session_of(made, {"const": 1})
            assert len(workers()) == 3, "one for the model, one for each schema"
            with pytest.raises(GrammarsBusy):
                await session_of(made, {"const": 3})
            two.close()
            with closing(await session_of(made, {"const": 3})) as three:
                assert bytes(follow(three, 300, 0)) == b"3"
            # Whoever holds most gives way to whoever has none.
            late = await made.open(MODEL, BYTES, JSON_OBJECT, (), PeerId("them"), masks=True)
            assert allowed(late, 300) == [ord("{")]
            one.close(), again.close(), late.close()

    asyncio.run(main())


def test_models_with_schemas_are_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_MODELS", 2)
    monkeypatch.setattr(grammars, "IDLE_SECONDS", 2.0)

    async def main() -> None:
        async with opened(tmp_path) as (made, _):

            async def ask(name: str, peer: str) -> GrammarSession:
                return await made.open(
                    JobId(name * 64), BYTES, '{"enum":[1111111]}', (), PeerId(peer), masks=True
                )

            first, second = await ask("1", "stranger"), await ask("2", "stranger")
            with pytest.raises(GrammarsBusy):  # its own do not give way
                await ask("3", "stranger")
            # Whoever has most gives way to whoever has none.
            ours = await ask("a", "us")
            assert allowed(ours, 300) == allowed(first, 300) == [ord("1")]
            with pytest.raises(JobFailed, match="takes too much"):
                second.push(ord("1"))
            second.close()
            # With a name for each model strangers keep what they have for as long as it is used.
            with pytest.raises(GrammarsBusy):
                await ask("3", "another")
            for _ in range(6):
                ours.push(ord("1"))
                assert allowed(ours, 300) == [ord("1")]
                await asyncio.sleep(0.5)
            late = await ask("3", "another")
            assert allowed(late, 300) == [ord("1")]
            with pytest.raises(JobFailed, match="takes too much"):
                first.push(ord("1"))
            ours.push(ord("1"))
            assert ours.complete
            for session in (first, ours, late):
                session.close()
            (await ask("4", "a third")).close()  # without an answer a model gives way

    asyncio.run(main())


def test_the_time_of_a_schema_without_answers_ends_where_it_gets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers, later = list[asyncio.TimerHandle](), grammars._call_later

    def noted(*arguments: Any) -> asyncio.TimerHandle:
        timers.append(later(*arguments))
        return timers[-1]

    monkeypatch.setattr(grammars, "_call_later", noted)

    async def main() -> None:
        async with opened(tmp_path) as (made, _):
            for _ in range(3):
                with closing(await session_of(made, GOOD["date"])):
                    assert all(timer.cancelled() for timer in timers), "it would end under the answer"
                assert [timer.cancelled() for timer in timers].count(False) == 1

    asyncio.run(main())


def test_tokens_that_the_schema_does_not_allow_change_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (made, _):
            session = await made.open(MODEL, BYTES, '{"enum":[1,12]}', (), US, masks=False)
            assert not await session.push_soon((ord("x"),)) and not session.accepts
            assert not await session.push_soon((10**6,))
            assert await session.push_soon((ord("1"),)) and session.accepts and not session.complete
            assert await session.push_soon((ord("2"),)) and session.complete
            session.close()
            with pytest.raises(GrammarRefused, match="answered"):
                await session_of(made, {"enum": [1, 12]}, tuple(b"13"))

    asyncio.run(main())


def test_a_session_whose_process_died_says_so_and_the_next_gets_another(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (made, _):
            session = await session_of(made, GOOD["date"])
            for process in workers():
                process.kill()
            with pytest.raises(JobFailed, match="response_format"):
                follow(session, 300, 0)
            session.close()
            while not session.complete:  # it takes a moment until that is known
                with (
                    contextlib.suppress(JobFailed, GrammarRefused),
                    closing(await session_of(made, GOOD["date"])) as session,
                ):
                    follow(session, 300, 0)
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_model_that_could_not_be_read_while_nobody_waited_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Grammars._start

    async def failing(*_: object) -> None:
        await asyncio.sleep(0)
        raise BlobError("nobody has it now")

    async def main() -> None:
        async with opened(tmp_path) as (made, _):
            monkeypatch.setattr(Grammars, "_start", failing)
            asking = asyncio.create_task(session_of(made, GOOD["date"]))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            await asyncio.sleep(0.01)
            monkeypatch.setattr(Grammars, "_start", start)
            (await session_of(made, GOOD["date"])).close()

    asyncio.run(main())


def test_a_model_that_has_no_schema_is_not_kept_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only client left while its tokenizer was read."""
    monkeypatch.setattr(grammars, "KEPT_SECONDS", 0.1)

    async def main() -> None:
        async with opened(tmp_path) as (made, _):
            asking = asyncio.create_task(session_of(made, GOOD["date"]))
            async with asyncio.timeout(30):
                while not workers():
                    await asyncio.sleep(0.01)
                asking.cancel()
                await asyncio.wait([asking])
                while workers():
                    await asyncio.sleep(0.01)

    asyncio.run(main())
