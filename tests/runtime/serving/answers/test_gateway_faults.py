"""What a gateway says when an answer cannot be given: one line, and nothing is left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.served import VOCABULARY, captured, model, reference, swarm_of

from fusion.dag.ir import serialise
from fusion.runtime.job.errors import JobError, JobFailed, Unsupported
from fusion.runtime.job.manifest import Manifest, ServeConfig
from fusion.runtime.planes import kv_cache
from fusion.runtime.serving.answers.failover import FailoverConfig
from fusion.runtime.serving.requests.client import generate
from fusion.runtime.serving.requests.request import Answer, GenerateRequest
from fusion.runtime.serving.ring import stage_memory
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import RemoteError, SwarmError
from fusion.swarm.identity import Identity
from fusion.swarm.transport import PeerId


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_ids": (1, 2), "max_tokens": 95}, r"max_tokens: .* so at most 94 tokens can follow, not 95"),
        ({"prompt_ids": (VOCABULARY,)}, "prompt_ids: this model's tokens are 0 to 127, not 128"),
        ({"prompt_ids": ()}, "prompt: at least one token"),
        ({"prompt": "hello"}, "this model has no tokenizer"),
        ({"prompt_ids": (1,), "model": "bard"}, "nobody serves 'bard'; there are: gpt2"),
    ],
)
def test_a_request_that_cannot_work_is_one_line_before_anything_runs(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm:
            await swarm.serve("gpt2", 1)
            with pytest.raises(RemoteError, match=message) as caught:
                await swarm.ask(**fields)
            assert "\n" not in str(caught.value)
            assert swarm.peers[0].service._hosted and not swarm.peers[0].open_sessions
            assert (await swarm.ask(prompt_ids=(1,), max_tokens=2)).finish == "length"

    asyncio.run(main())


def test_a_swarm_that_serves_nothing_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(1, tmp_path) as swarm:
            with pytest.raises(RemoteError, match="the swarm serves none now"):
                await swarm.ask(prompt_ids=(1,))

    asyncio.run(main())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": "a", "prompt_ids": (1,)},
        {"prompt": "a", "max_tokens": 0},
        {"prompt": "\udcff"},
        {"prompt_ids": (1 << 64,)},
    ],
)
def test_requests_are_checked_where_they_are_made(fields: dict[str, Any]) -> None:
    with pytest.raises(JobError):
        GenerateRequest(**fields)


@pytest.mark.parametrize(
    ("kind", "header", "payload"),
    [
        ("generate", {}, b"x"),
        ("generate", {"prompt": "text"}, b"\xff"),
        ("generate", {"prompt": "ids"}, b"1234567"),
        ("generate", {"prompt": "ids", "model": 3}, bytes(8)),
        ("generate", {"prompt": "ids", "temperature": -2.0}, bytes(8)),
        ("surprise", {}, b""),
    ],
)
def test_hostile_requests_get_one_error(
    kind: str, header: dict[str, Any], payload: bytes, tmp_path: Path
) -> None:
    async def main() -> None:
        async with swarm_of(1, tmp_path) as swarm, swarm.client() as transport:
            stream = await transport.open(swarm.peers[0].id, "/fusion/generate/1")
            await stream.send(kind, header, [payload])
            assert (await stream.receive()).kind == "error"

    asyncio.run(main())


@pytest.mark.parametrize("beside", [{"logits": True}, {"top_logprobs": 20}], ids=["logits", "top_logprobs"])
def test_what_is_told_beside_tokens_waits_in_bounds_for_a_client_that_reads_slowly(
    beside: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fusion.runtime.serving.answers.gateway_session.UNREAD_BYTES", 5 * 4 * VOCABULARY)
    monkeypatch.setattr("fusion.swarm.streams.memory_stream.BUFFERED_BYTES", 1)

    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm, swarm.client() as transport:
            await swarm.serve("gpt2", 1)
            request = GenerateRequest(prompt_ids=(1, 2), max_tokens=40, **beside)
            stream = await transport.open(swarm.peers[1].id, "/fusion/generate/2")
            header, prompt = request.to_frame()
            await stream.send("generate", header, [prompt])
            tokens = []
            while (frame := await stream.receive()).kind == "token":
                tokens.append(frame.header["id"])
                assert len(frame.payload) == (4 * VOCABULARY if "logits" in beside else 0)
                assert len(frame.header.get("top_logprobs", ())) == beside.get("top_logprobs", 0)
                if len(tokens) == 1:
                    await swarm.freed()  # nothing is made that would have to wait
            assert frame.kind == "done" and tokens == reference("gpt2", (1, 2), 40)

    asyncio.run(main())


@pytest.mark.heavy
@pytest.mark.parametrize("how", ["kill", "close"])
def test_a_client_that_goes_frees_the_session_on_every_stage(how: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path) as swarm:
            await swarm.serve("llama", 3)
            request = GenerateRequest(prompt_ids=(1, 2), max_tokens=40)
            async with swarm.client() as transport:
                pieces = generate(transport, swarm.peers[0].id, request)
                await anext(pieces)
                assert all(peer.open_sessions for peer in swarm.peers)
                if how == "kill":
                    swarm.network.kill(transport.peer_id)
                else:
                    await pieces.aclose()
                await swarm.freed()
                await pieces.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stage_that_vanishes_is_named_and_everything_else_is_freed(victim: int, tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(4, tmp_path) as swarm:
            await swarm.serve("llama", 3)
            async with swarm.client() as transport:
                request = GenerateRequest(prompt_ids=(1, 2), max_tokens=40)
                pieces = generate(transport, swarm.peers[3].id, request)
                await anext(pieces)
                swarm.network.kill(swarm.owners[victim].id)
                with pytest.raises(
                    RemoteError, match=rf"stage {victim} of llama on .* (vanished|cannot be reached)"
                ):
                    async for _ in pieces:
                        pass
            await swarm.freed()
            with pytest.raises(RemoteError, match=rf"stage {victim} of llama"):
                await swarm.ask(3, prompt_ids=(1,), max_tokens=1)

    asyncio.run(main())


def test_a_new_owner_is_found_although_the_old_route_is_still_fresh(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path) as swarm:
            job = await swarm.serve("gpt2", 2)
            assert (await swarm.ask(prompt_ids=(4,), max_tokens=3)).route[1] == swarm.peers[1].id
            old, new = swarm.peers[1], swarm.peers[2]
            old.hosting.pop().cancel()
            await old.context.leases.release(job, 1)
            await swarm.hold(new, job, 1)
            answer = await swarm.ask(prompt_ids=(4,), max_tokens=8)
            assert answer.route == (swarm.peers[0].id, new.id)
            assert list(answer.tokens) == reference("gpt2", (4,), 8)

    asyncio.run(main())


def test_a_stage_without_an_owner_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path) as swarm:
            job = await swarm.serve("gpt2", 2)
            await swarm.peers[1].context.leases.release(job, 1)
            with pytest.raises(RemoteError, match="stage 1 of gpt2 needs a peer"):
                await swarm.ask(prompt_ids=(4,))

    asyncio.run(main())


def test_sessions_beyond_what_a_peer_lends_are_refused_and_its_others_go_on(tmp_path: Path) -> None:
    weights = sum(p.numel() * 4 for p in model("gpt2").parameters())

    async def main() -> None:
        async with swarm_of(2, tmp_path, memory_bytes=weights + 100_000) as swarm:
            await swarm.serve("gpt2", 1)
            async with swarm.client() as transport:
                pieces = generate(
                    transport, swarm.peers[1].id, GenerateRequest(prompt_ids=(1,), max_tokens=95)
                )
                await anext(pieces)  # 96 positions: 3 layers * 2 * 32 * 4 bytes * 96 = 73 728 bytes
                with pytest.raises(RemoteError, match=r"stage 0 of gpt2 on .* no memory for another session"):
                    await swarm.ask(prompt_ids=(1,), max_tokens=95)
                assert isinstance([p async for p in pieces][-1], Answer)
            assert (await swarm.ask(prompt_ids=(1,), max_tokens=95)).finish == "length"

    asyncio.run(main())


def test_answers_that_outgrow_the_memory_together_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each has what its prompt needs, and all of them more than there is: some go on once others are done."""
    weights = sum(p.numel() * 4 for p in model("gpt2").parameters())
    monkeypatch.setattr(kv_cache, "BLOCK_POSITIONS", 8)
    monkeypatch.setattr(stage_memory, "MEMORY_BLOCK", 8)
    caplog.set_level("INFO")

    async def main() -> None:
        position_bytes = 3 * 2 * 32 * 4
        async with swarm_of(
            2, tmp_path, memory_bytes=weights + 70 * position_bytes, failover=FailoverConfig()
        ) as swarm:
            await swarm.serve("gpt2", 1)

            async def ask(prompt: tuple[int, ...]) -> None:
                while True:
                    try:
                        answer = await swarm.ask(prompt_ids=prompt, max_tokens=40)
                    except RemoteError as error:  # a new one is told at once, one that nobody runs gives way
                        assert "no memory for another session" in str(error) or "is full" in str(error), error
                        await asyncio.sleep(0.05)
                    else:
                        assert list(answer.tokens) == reference("gpt2", prompt, 40)
                        return

            for _ in range(8):  # on a busy machine one may be done before the next begins
                await asyncio.gather(*(ask((i, i + 1)) for i in range(1, 5)))
                if any("(full); looking for another way" in record.message for record in caplog.records):
                    return
            pytest.fail("no answer had to look for another way")

    asyncio.run(main())


@pytest.mark.parametrize("broken", ["graph", "weights"])
def test_a_job_whose_blobs_are_wrong_fails_in_one_line(broken: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(1, tmp_path) as swarm:
            peer = swarm.peers[0]
            good = await peer.context.blobs.put(serialise.encode(captured("gpt2", "kv")))
            bad = await peer.context.blobs.put(b"not what it says")
            manifest = Manifest(
                name="odd",
                kind="serve",
                graph=bad if broken == "graph" else good,
                cuts=(),
                weights=(bad,),
                proposed=(PeerId("x"),),
                author=Identity.generate().peer_id,
                serve=ServeConfig(cache="kv", max_sequence=8, vocabulary=VOCABULARY),
            )
            with pytest.raises(Exception, match=f"the {broken}.* of odd: ") as caught:
                await peer.service.host(JobId("a" * 64), manifest, 0, 1)
            assert isinstance(caught.value, Unsupported if broken == "graph" else JobFailed)
            assert not peer.service._hosted

    asyncio.run(main())


@pytest.mark.parametrize("token", [-1, VOCABULARY, 1 << 63])
def test_a_token_that_the_model_does_not_have_ends_the_link_of_whoever_says_it(
    token: int, tmp_path: Path
) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm:
            job = await swarm.serve("gpt2", 1)
            stage = swarm.owners[0].service._hosted[job, 0].stage

            def lie(session: Any, tokens: Any, frames: Any) -> None:
                said = {"session": session.id, "position": tokens[0].position, "finish": ""}
                session.gateway.post("token", {**said, "id": token})

            stage._answer = lie  # type: ignore[method-assign]
            with pytest.raises(RemoteError, match=r"stage 0 of gpt2 on .* vanished"):
                await swarm.ask(prompt_ids=(1, 2), max_tokens=5)
            assert not swarm.peers[1].service.gateway._sessions._sessions
            await swarm.freed()

    asyncio.run(main())


def test_a_last_stage_that_never_ends_an_answer_gives_no_more_than_was_asked_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm:
            job = await swarm.serve("gpt2", 1)
            stage = swarm.owners[0].service._hosted[job, 0].stage

            def endless(session: Any, tokens: Any, frames: Any) -> None:
                for position in range(tokens[0].position, tokens[0].position + 50):
                    said = {"session": session.id, "id": 1, "position": position, "finish": ""}
                    session.gateway.post("token", said)

            stage._answer = endless  # type: ignore[method-assign]
            answer = await swarm.ask(prompt_ids=(1, 2), max_tokens=5)
            assert (len(answer.tokens), answer.finish) == (5, "length")
            await swarm.freed()

    asyncio.run(main())


def test_progress_is_known_where_the_first_stage_runs(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm:
            job = await swarm.serve("gpt2", 2)
            progress = swarm.peers[0].service.progress(job)
            assert progress is not None and (progress.state, progress.stages) == ("running", 2)
            assert swarm.peers[1].service.progress(job) is None

    asyncio.run(main())


def test_streams_for_stages_that_are_not_here_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(1, tmp_path) as swarm, swarm.client() as transport:
            for hello in (
                {"job": "b" * 64, "from": -1, "to": 0},
                {"job": 5},
                {"job": "b", "from": None, "to": 0},
            ):
                stream = await transport.open(swarm.peers[0].id, "/fusion/ring/1")
                await stream.send("hello", hello)
                assert (await stream.receive()).kind == "error"
                with pytest.raises(SwarmError):
                    await stream.receive()

    asyncio.run(main())
