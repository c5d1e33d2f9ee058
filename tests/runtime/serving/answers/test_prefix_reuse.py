"""Chats go on where they were: a later turn runs what is new of it, and has the tokens that a fresh session gives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support.families import POSITIONS, greedy, made
from support.served import Peer, Swarm, swarm_of

from fusion.dag.cutting.cuts import legal_cuts, split
from fusion.runtime.serving.answers.failover import FailoverConfig
from fusion.runtime.serving.answers.gateway_session import GatewaySession
from fusion.runtime.serving.answers.session_pair import SessionPair
from fusion.runtime.serving.answers.task import Task
from fusion.runtime.serving.requests.client import complete
from fusion.runtime.serving.requests.request import Answer, GenerateRequest
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.runtime.serving.ring.prefix import BLOCK_POSITIONS, PrefixHash
from fusion.runtime.serving.ring.session import Opening
from fusion.swarm.transport import PeerId

SERVE = {"vocabulary": 256, "max_sequence": POSITIONS, "prefill_chunk": 50}
PATIENT = FailoverConfig(recover_seconds=20)
HASH = PrefixHash(b"k", "")
HISTORY = [(13 * i) % 256 for i in range(120)]


async def serve(swarm: Swarm, family: str, stages: int, cache: str = "kv", **options: Any) -> Any:
    return await swarm.serve(family, stages, made=made(family, cache), cache=cache, serve=SERVE, **options)


def run(main: Callable[[], Coroutine[Any, Any, None]], *families: str) -> None:
    """With what takes long done before any claim could run out."""
    for family in families or ("llama",):
        made(family)
    asyncio.run(main())


class Chat:
    """Of one client with one gateway; every answer is checked."""

    def __init__(self, swarm: Swarm, gateway: Peer, family: str) -> None:
        self.swarm, self.gateway, self.family = swarm, gateway, family
        self.tokens = list(HISTORY)

    async def turn(self, transport: Any, count: int = 20) -> Answer:
        request = GenerateRequest(prompt_ids=tuple(self.tokens), max_tokens=count)
        answer = await complete(transport, self.gateway.id, request)
        # Beside the loop, which renews claims meanwhile.
        expected, _ = await asyncio.to_thread(greedy, made(self.family)[1], self.tokens, count)
        assert list(answer.tokens) == expected
        self.tokens += [*answer.tokens, 5]
        return answer


def whole_blocks(positions: int) -> int:
    return positions // BLOCK_POSITIONS * BLOCK_POSITIONS


@pytest.mark.parametrize(
    ("family", "stages"),
    [("llama", 3), ("mistral-windowed", 1), pytest.param("gpt2", 2, marks=pytest.mark.slow)],
)
def test_later_turns_run_only_what_is_new(family: str, stages: int, tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(stages + 1, tmp_path, seconds=240) as swarm:
            await serve(swarm, family, stages)
            chat = Chat(swarm, swarm.peers[-1], family)
            async with swarm.client() as transport, swarm.client() as stranger:
                assert (await chat.turn(transport)).cached_tokens == 0
                for _ in range(3):
                    known = len(chat.tokens) - 2  # but for the newest token, and what was said to it
                    assert (await chat.turn(transport)).cached_tokens == whole_blocks(known)
                # Neither another client nor another gateway finds it.
                chat.tokens = list(HISTORY)
                assert (await chat.turn(stranger)).cached_tokens == 0
                chat.tokens, chat.gateway = list(HISTORY), swarm.peers[0]
                assert (await chat.turn(transport)).cached_tokens == 0
            await swarm.freed()

    run(main, family)


def test_a_stage_without_attention_goes_on_where_the_others_do(tmp_path: Path) -> None:
    graph, _ = made("llama")
    cuts = legal_cuts(graph)[:1]
    assert all(node.op != "fusion.cached_attention" for node in split(graph, cuts)[0].graph.nodes)

    async def main() -> None:
        async with swarm_of(3, tmp_path, seconds=240) as swarm:
            await serve(swarm, "llama", 2, cuts=cuts)
            chat = Chat(swarm, swarm.peers[2], "llama")
            async with swarm.client() as transport:
                assert (await chat.turn(transport)).cached_tokens == 0
                known = len(chat.tokens) - 2
                assert (await chat.turn(transport)).cached_tokens == whole_blocks(known)
            await swarm.freed()

    run(main)


def test_a_model_without_a_cache_reads_everything(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path, seconds=240) as swarm:
            await serve(swarm, "llama", 1, cache="recompute")
            chat = Chat(swarm, swarm.peers[1], "llama")
            async with swarm.client() as transport:
                for _ in range(2):
                    assert (await chat.turn(transport, 3)).cached_tokens == 0

    made("llama", "recompute")
    run(main)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stage_that_died_between_two_turns_has_nothing_of_the_first(victim: int, tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(5, tmp_path, failover=PATIENT, seconds=240) as swarm:
            job = await serve(swarm, "llama", 3)
            await swarm.stand_by(swarm.peers[3], job, 0, 1, 2)
            chat = Chat(swarm, swarm.peers[4], "llama")
            async with swarm.client() as transport:
                await chat.turn(transport)
                swarm.network.kill(swarm.owners[victim].id)
                answer = await chat.turn(transport)
                assert answer.cached_tokens == 0 and answer.route[victim] == swarm.peers[3].id
                assert (await chat.turn(transport)).cached_tokens == whole_blocks(len(chat.tokens) - 23)

    run(main)


def test_a_stage_that_dies_in_the_middle_of_a_later_turn(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(5, tmp_path, failover=PATIENT, seconds=240) as swarm:
            job = await serve(swarm, "llama", 3)
            await swarm.stand_by(swarm.peers[3], job, 1)
            chat = Chat(swarm, swarm.peers[4], "llama")
            async with swarm.client() as transport:
                await chat.turn(transport)
                stage = swarm.owners[1].service._hosted[job, 1].stage
                asked = asyncio.create_task(chat.turn(transport, 60))
                while not any(session.ran > 5 for session in stage._sessions):
                    await asyncio.sleep(0)
                swarm.network.kill(swarm.owners[1].id)
                assert (await asked).route[1] == swarm.peers[3].id

    run(main)


def test_a_stage_that_says_it_holds_what_it_does_not_costs_one_more_session(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(4, tmp_path, failover=PATIENT, seconds=240) as swarm:
            job = await serve(swarm, "llama", 3)
            chat = Chat(swarm, swarm.peers[3], "llama")
            async with swarm.client() as transport:
                await chat.turn(transport)
                liar = swarm.owners[1].service._hosted[job, 1].stage
                liar._sessions.memory._runner._plane.clear()
                begin = liar._sessions.memory.begin

                async def lie(session: Any) -> None:
                    await begin(session)
                    session.held = len(session.opening.prefix) // 16 * BLOCK_POSITIONS

                liar._sessions.memory.begin = lie  # type: ignore[method-assign]
                answer = await chat.turn(transport)
                assert answer.cached_tokens == 0 and not swarm.successors.reports
            await swarm.freed()

    run(main)


def test_a_cut_at_every_place_leaves_stages_without_attention_which_hold_everything(tmp_path: Path) -> None:
    """Of a model with its head alone at the end: what it needs is what it is sent."""

    async def main() -> None:
        graph, _ = made("llama")
        async with swarm_of(3, tmp_path, seconds=240) as swarm:
            job = await serve(swarm, "llama", 2, cuts=(len(graph.nodes) - 1,))
            plane = swarm.owners[1].service._hosted[job, 1].loaded.plane
            assert not plane.has_cache
            chat = Chat(swarm, swarm.peers[2], "llama")
            async with swarm.client() as transport:
                await chat.turn(transport)
                assert (await chat.turn(transport)).cached_tokens == 128

    run(main)


def test_memory_that_is_short_costs_the_reuse_and_no_answer(tmp_path: Path) -> None:
    _, module = made("llama")
    weights = sum(p.numel() * 4 for p in module.parameters())
    position = 3 * 2 * 2 * 16 * 4

    async def main() -> None:
        # Room for one session of a chat, and a little.
        async with swarm_of(
            2, tmp_path, memory_bytes=weights + 300 * position, failover=FailoverConfig(), seconds=240
        ) as swarm:
            await serve(swarm, "llama", 1)
            async with swarm.client() as transport:
                chats = [Chat(swarm, swarm.peers[1], "llama") for _ in range(2)]
                chats[1].tokens = [(7 * i) % 256 for i in range(150)]
                for _ in range(2):
                    for chat in chats:
                        await chat.turn(transport)
                assert (await chats[1].turn(transport)).cached_tokens == 128

    run(main)


def test_a_session_that_took_over_and_is_behind_is_kept_as_far_as_it_got() -> None:
    """Beyond that a stage may have guesses that were wrong, and the tokens are those of the session before."""
    closed: list[bytes] = []

    class Sessions:
        def prefixes(self, *_: object) -> PrefixHash:
            return HASH

        async def open(self, opening: Opening, *_: object) -> GatewaySession:
            return GatewaySession(opening, model, asyncio.Queue())

        def close(self, session: GatewaySession, chain: bytes = b"") -> None:
            closed.append(chain)

    model: Any = None
    task = Task(
        model=model,
        prompt=HISTORY,
        answered=(),
        max_tokens=200,
        sampling=Sampling(),
        logits=False,
        tenant=PeerId("us"),
    )

    async def main() -> None:
        pair = SessionPair(task, Sessions(), random.Random(0))  # type: ignore[arg-type]
        await pair.begin(())
        await pair.open_next(())
        assert pair.current is not None and pair.next is not None
        pair.known += [3] * 100
        pair.current.reached, pair.next.reached = len(pair.known) - 1, len(HISTORY) + 10
        pair.promote()
        pair.drop_current()
        assert closed == [HASH.chain(pair.known[:-1]), HASH.chain(pair.known[: len(HISTORY) + 10])]
        assert len(closed[0]) > len(closed[1]) > 0

    asyncio.run(main())
