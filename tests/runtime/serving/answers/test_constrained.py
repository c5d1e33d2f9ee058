"""Answers that follow a schema: JSON of it, whatever the model would say, and whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from support.served import Swarm, reference, swarm_of

from fusion.runtime.serving.answers.failover import FailoverConfig
from fusion.runtime.serving.requests.client import generate
from fusion.runtime.serving.requests.ends import Ends
from fusion.runtime.serving.requests.json_schema import checked_schema
from fusion.runtime.serving.requests.request import Answer, GenerateRequest, Piece
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.runtime.serving.ring.session import Opening
from fusion.runtime.serving.ring.stage import RingStage
from fusion.runtime.serving.ring.stage_session import StageRunner
from fusion.swarm.errors import RemoteError
from fusion.swarm.transport import PeerId

pytestmark = [pytest.mark.process, pytest.mark.heavy]

PROMPT = "def "
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy", 7]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TEXT = checked_schema(json.dumps(SCHEMA))
TOKENS = 90
PATIENT = FailoverConfig(recover_seconds=60)
SETTINGS = {
    "greedy": Sampling(),
    "seeded": Sampling(temperature=1.2, seed=5),
    "everything": Sampling(
        temperature=0.9, seed=6, top_k=40, top_p=0.98, repetition_penalty=1.2, frequency_penalty=0.5,
        presence_penalty=0.2, logit_bias=((ord("{"), -100.0), (ord("7"), 5.0), (ord("Z"), 100.0)),
    ),
}  # fmt: skip


async def answer_while(
    swarm: Swarm, sampling: Sampling, faults: dict[int, Callable[[], Any]] | None = None, **fields: Any
) -> tuple[list[Piece], Answer]:
    """After the token with that index, each fault happens."""
    asked = {"prompt": PROMPT, "max_tokens": TOKENS, "schema": TEXT, "sampling": sampling, **fields}
    request, found = GenerateRequest(**asked), list[Piece]()
    gateway = swarm.peers[-1].id
    async with swarm.client() as transport, aclosing(generate(transport, gateway, request)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Answer):
                return found, piece
            found.append(piece)
            if faults and piece.index in faults:
                faults[piece.index]()
    raise AssertionError("no answer")


@pytest.mark.parametrize("name", SETTINGS)
def test_an_answer_is_json_of_its_schema_alone_in_a_batch_and_streamed(name: str, tmp_path: Path) -> None:
    sampling = SETTINGS[name]

    async def main() -> None:
        async with swarm_of(3, tmp_path, failover=PATIENT, seconds=300) as swarm:
            await swarm.serve("llama", 2, byte_level=True)
            pieces, alone = await answer_while(swarm, sampling)
            jsonschema_rs.validate(SCHEMA, json.loads(alone.text))
            assert alone.finish == "stop" and alone.text == bytes(alone.tokens).decode()
            assert "".join(piece.text for piece in pieces) == alone.text
            together = await asyncio.gather(
                *(answer_while(swarm, sampling) for _ in range(3)),
                *(swarm.ask(prompt_ids=(1, 2, 3), max_tokens=30) for _ in range(2)),
            )
            assert [each.tokens for _, each in together[:3]] == [alone.tokens] * 3
            assert [list(each.tokens) for each in together[3:]] == [reference("llama", (1, 2, 3), 30)] * 2
            _, probable = await answer_while(swarm, sampling, top_logprobs=2)
            assert probable.tokens == alone.tokens
            _, cut = await answer_while(swarm, sampling, max_tokens=4)
            assert (cut.tokens, cut.finish) == (alone.tokens[:4], "length")
            _, stopped = await answer_while(swarm, sampling, stop=('"a"',))
            assert stopped.finish == "stop" and '"a"' not in stopped.text
            await swarm.freed()

    asyncio.run(main())


@pytest.mark.parametrize("victim", [0, 1])
def test_an_owner_may_die_in_the_middle_of_it(
    victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = RingStage._pass_all_on

    async def unhurried(self: RingStage, *given: Any) -> None:
        await asyncio.sleep(0.005)  # no answer is to be over before whoever asked has seen its first token
        await turn(self, *given)

    monkeypatch.setattr(RingStage, "_pass_all_on", unhurried)

    async def main() -> None:
        async with swarm_of(4, tmp_path, failover=PATIENT, seconds=300) as swarm:
            job = await swarm.serve("llama", 2, byte_level=True)
            await swarm.stand_by(swarm.peers[2], job, 0, 1)
            expected = [await answer_while(swarm, SETTINGS[name]) for name in ("greedy", "everything")]
            # One is under way when the owner dies, without guesses, which could bring its end before; the other goes on at the
            # successor from the beginning.
            owner = swarm.owners[victim].id
            deaths = {1: lambda: swarm.network.kill(owner)}
            _, first = await answer_while(swarm, SETTINGS["greedy"], deaths, guesses=False)
            _, second = await answer_while(swarm, SETTINGS["everything"])
            assert [first.tokens, second.tokens] == [answer.tokens for _, answer in expected]
            assert first.route[victim] == second.route[victim] == swarm.peers[2].id
            await swarm.freed()

    asyncio.run(main())


def test_an_answer_goes_on_at_another_gateway_and_a_complete_one_needs_no_stage(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path, failover=PATIENT, seconds=300) as swarm:
            await swarm.serve("llama", 2, byte_level=True, serve={"end_tokens": (0,)})
            _, whole = await answer_while(swarm, SETTINGS["seeded"])
            assert whole.tokens[-1] != 0, "nothing may follow: the end need not be said"
            for at in (1, len(whole.tokens) // 2, len(whole.tokens) - 1, len(whole.tokens)):
                _, other = await answer_while(swarm, SETTINGS["seeded"], answered=whole.tokens[:at])
                assert (other.tokens, other.text, other.finish) == (whole.tokens, whole.text, "stop")
            assert other.route == ()
            with pytest.raises(RemoteError, match="answered: not the beginning"):
                await answer_while(swarm, SETTINGS["seeded"], answered=tuple(b"[1"))

    asyncio.run(main())


def test_an_end_token_ends_only_what_may_end(tmp_path: Path) -> None:
    number = checked_schema('{"type": "integer", "minimum": 10}')
    end = Sampling(logit_bias=((0, 100.0),))

    async def main() -> None:
        async with swarm_of(2, tmp_path, failover=PATIENT, seconds=300) as swarm:
            await swarm.serve("llama", 1, byte_level=True, serve={"end_tokens": (0,)})
            _, answer = await answer_while(swarm, end, schema=number)
            assert answer.finish == "stop" and int(answer.text) >= 10 and len(answer.text) == 2
            assert answer.tokens == (*answer.text.encode(), 0)

    asyncio.run(main())


def test_a_token_that_was_asked_for_ends_it_in_the_middle(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("llama", 2, byte_level=True)
            _, whole = await answer_while(swarm, SETTINGS["greedy"])
            _, cut = await answer_while(swarm, SETTINGS["greedy"], ends=Ends(stop_token_ids=(ord(","),)))
            before, comma, _ = whole.text.partition(",")
            assert comma and (cut.text, cut.finish) == (before, "stop") and cut.tokens[-1] == ord(",")
            _, last = await answer_while(swarm, SETTINGS["greedy"], ends=Ends(stop_token_ids=(ord("}"),)))
            assert (last.text, last.finish) == (whole.text.removesuffix("}"), "stop")
            await swarm.freed()

    asyncio.run(main())


def test_what_cannot_be_is_one_line_before_a_session_is_opened(tmp_path: Path) -> None:
    bad = checked_schema('{"type": "string", "pattern": "(?=a)"}')

    async def main() -> None:
        async with swarm_of(2, tmp_path, failover=PATIENT, seconds=300) as swarm:
            await swarm.serve("llama", 1, byte_level=True)
            await swarm.serve("gpt2", 1)
            with pytest.raises(RemoteError, match=r"^response_format: regex parse error"):
                await answer_while(swarm, Sampling(), schema=bad, model="llama")
            with pytest.raises(RemoteError, match=r"^response_format: not possible with this model"):
                await swarm.ask(model="gpt2", prompt_ids=(1,), schema=TEXT)
            assert not any(peer.open_sessions for peer in swarm.peers)

    asyncio.run(main())


def test_a_schema_that_takes_too_much_after_its_first_token_is_said_to(tmp_path: Path) -> None:
    many = checked_schema(
        json.dumps({"type": "object", "properties": {f"k{i:04d}": {} for i in range(1500)}})
    )

    async def main() -> None:
        async with swarm_of(3, tmp_path, failover=PATIENT, seconds=300) as swarm:
            await swarm.serve("llama", 2, byte_level=True)
            with pytest.raises(
                RemoteError, match=r"^response_format: the schema takes too much time or memory"
            ):
                await answer_while(swarm, Sampling(), schema=many)
            await swarm.freed()

    asyncio.run(main())


def test_a_last_stage_that_knows_no_schemas_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Opening.from_header.__func__  # type: ignore[attr-defined]

    def forgetful(cls: type[Opening], header: Any, **given: Any) -> Opening:
        return read(cls, {name: value for name, value in header.items() if name != "schema"}, **given)  # type: ignore[no-any-return]

    monkeypatch.setattr(Opening, "from_header", classmethod(forgetful))

    async def main() -> None:
        async with swarm_of(2, tmp_path, failover=PATIENT, seconds=300) as swarm:
            await swarm.serve("llama", 1, byte_level=True)
            with pytest.raises(RemoteError, match=r"stage 0 of llama on .* is too old to know schema"):
                await answer_while(swarm, Sampling())

    asyncio.run(main())


def test_a_last_stage_that_does_not_follow_the_schema_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that it does, and gives the tokens that the model alone would give."""
    liars, made = set[PeerId](), StageRunner._made

    def lying(self: StageRunner, work: Any, *given: Any) -> Any:
        if work.session.opening.route[-1].peer in liars:
            work.session.constraint = None
        return made(self, work, *given)

    monkeypatch.setattr(StageRunner, "_made", lying)

    async def main() -> None:
        async with swarm_of(3, tmp_path, failover=PATIENT, seconds=300) as swarm:
            await swarm.serve("llama", 1, byte_level=True)
            _, honest = await answer_while(swarm, Sampling())
            liars.add(swarm.owners[0].id)
            with pytest.raises(RemoteError, match=r"stage 0 of llama on .* does not follow response_format"):
                await answer_while(swarm, Sampling())
            liars.clear()
            _, answer = await answer_while(swarm, Sampling())
            assert answer.tokens == honest.tokens

    asyncio.run(main())


def test_an_answer_goes_on_after_a_last_stage_that_took_it_for_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies, answered = [3], RingStage._answer

    def hasty(self: RingStage, session: Any, tokens: Any, frames: Any) -> None:
        if tokens[0].position - session.opening.first == lies[0]:
            lies[0] = -1
            tokens = [replace(token, complete=True) for token in tokens]
        answered(self, session, tokens, frames)

    async def main() -> None:
        async with swarm_of(2, tmp_path, failover=PATIENT, seconds=300) as swarm:
            await swarm.serve("llama", 1, byte_level=True)
            _, honest = await answer_while(swarm, Sampling(), guesses=False)
            monkeypatch.setattr(RingStage, "_answer", hasty)
            _, answer = await answer_while(swarm, Sampling(), guesses=False)
            assert answer.tokens == honest.tokens and lies == [-1]

    asyncio.run(main())
