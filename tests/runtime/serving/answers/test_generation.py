"""Answers outlive the peers that give them: the same tokens, whoever vanishes, freezes or leaves, and when."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.served import VOCABULARY, Peer, Swarm, reference, seeded_reference, swarm_of

from fusion.runtime.job.errors import JobFailed
from fusion.runtime.serving.answers import moves
from fusion.runtime.serving.answers.failover import FailoverConfig
from fusion.runtime.serving.answers.session_pair import SessionPair
from fusion.runtime.serving.requests.client import generate
from fusion.runtime.serving.requests.request import Answer, GenerateRequest
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.runtime.serving.ring.session import Hop
from fusion.runtime.serving.ring.stage import RingStage
from fusion.swarm.errors import RemoteError
from fusion.swarm.transport import PeerId

PROMPT = (1, 2, 3, 4, 5, 6, 7)
SEEDED = Sampling(temperature=1.1, top_k=30, top_p=0.95, seed=7)
PENALISED = Sampling(
    repetition_penalty=1.4, frequency_penalty=0.9, presence_penalty=0.4, logit_bias=((9, 2.0),)
)
PENALISED_SEEDED = replace(PENALISED, temperature=1.2, min_p=0.02, seed=7)
PATIENT = FailoverConfig(recover_seconds=20)
ALERT = FailoverConfig(recover_seconds=20, quiet_seconds=0.1, ping_seconds=0.05)


async def answer_while(
    swarm: Swarm, gateway: Peer, tokens: int, faults: dict[int, Callable[[], Any]], **fields: Any
) -> Answer:
    """Ask for `tokens` tokens; after the token with that index, each fault happens."""
    request = GenerateRequest(prompt_ids=PROMPT, max_tokens=tokens, **fields)
    async with swarm.client() as transport, aclosing(generate(transport, gateway.id, request)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Answer):
                return piece
            if piece.index in faults:
                happened = faults[piece.index]()
                if asyncio.iscoroutine(happened):
                    await happened
    raise AssertionError("no answer")


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        *(pytest.param(sampling, marks=pytest.mark.slow) for sampling in (SEEDED, PENALISED)),
        PENALISED_SEEDED,
    ],
    ids=["greedy", "seeded", "penalised", "penalised-seeded"],
)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_any_stage_may_die_at_any_token(victim: int, sampling: Sampling, tmp_path: Path) -> None:
    expected = (
        reference("llama", PROMPT, 40)
        if sampling == Sampling()
        else seeded_reference("llama", PROMPT, 40, sampling)
    )
    at = random.Random(f"{victim}{sampling.seed}").randrange(39)

    async def main() -> None:
        async with swarm_of(6, tmp_path, failover=PATIENT) as swarm:
            job = await swarm.serve("llama", 3)
            gateway, successor = swarm.peers[5], swarm.peers[3]
            await swarm.stand_by(successor, job, 0, 1, 2)
            old = swarm.owners[victim].id
            answer = await answer_while(
                swarm, gateway, 40, {at: lambda: swarm.network.kill(old)}, sampling=sampling
            )
            assert list(answer.tokens) == expected
            assert answer.route[victim] == successor.id
            assert [hop for i, hop in enumerate(answer.route) if i != victim] == [
                peer.id for i, peer in enumerate(swarm.owners) if i != victim
            ]
            assert {(stage, peer) for stage, peer, _ in swarm.successors.reports} == {(victim, old)}
            await swarm.freed()

    asyncio.run(main())


def test_one_after_another_and_two_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(9, tmp_path, failover=PATIENT) as swarm:
            job = await swarm.serve("gpt2", 3)
            successors = swarm.peers[3:7]
            for stage, successor in zip((0, 2, 1, 0), successors, strict=True):
                await swarm.stand_by(successor, job, stage)
            kill = swarm.network.kill
            faults: dict[int, Callable[[], Any]] = {
                3: lambda: kill(swarm.owners[1].id),
                20: lambda: [kill(swarm.owners[i].id) for i in (0, 2)],
                30: lambda: kill(successors[0].id),
            }
            answer = await answer_while(swarm, swarm.peers[8], 50, faults)
            assert list(answer.tokens) == reference("gpt2", PROMPT, 50)
            assert answer.route == (successors[3].id, successors[2].id, successors[1].id)

    asyncio.run(main())


def test_a_peer_that_ran_two_stages_is_followed_at_both_before_the_answer_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[tuple[PeerId, ...]] = []
    begin = SessionPair.begin

    async def counted(pair: SessionPair, route: tuple[Hop, ...]) -> None:
        opened.append(tuple(hop.peer for hop in route))
        await begin(pair, route)

    monkeypatch.setattr(SessionPair, "begin", counted)

    async def main() -> None:
        async with swarm_of(6, tmp_path, failover=PATIENT) as swarm:
            job = await swarm.serve("llama", 3)
            first, second, third, successor, other, gateway = swarm.peers
            await swarm.stand_by(successor, job, 0)
            await swarm.stand_by(other, job, 2)
            await third.context.leases.release(job, 2)
            await swarm.hold(first, job, 2)
            faults = {9: lambda: swarm.network.kill(first.id)}
            answer = await answer_while(swarm, gateway, 40, faults)
            assert list(answer.tokens) == reference("llama", PROMPT, 40)
            assert opened == [(first.id, second.id, first.id), (successor.id, second.id, other.id)]

    asyncio.run(main())


def test_four_sessions_at_once_report_the_dead_owner_once(tmp_path: Path) -> None:
    prompts = [[(i * 31 + j * 7) % VOCABULARY for j in range(1 + 5 * i)] for i in range(4)]

    async def main() -> None:
        async with swarm_of(5, tmp_path, failover=PATIENT) as swarm:
            job = await swarm.serve("llama", 3)
            await swarm.stand_by(swarm.peers[3], job, 1)
            asked = [asyncio.create_task(swarm.ask(4, prompt_ids=tuple(p), max_tokens=60)) for p in prompts]
            while swarm.owners[2].service._hosted[job, 2].stage.sessions < 4:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.03)
            swarm.network.kill(swarm.owners[1].id)
            answers = await asyncio.gather(*asked)
            assert [list(a.tokens) for a in answers] == [reference("llama", p, 60) for p in prompts]
            assert all(a.route[1] == swarm.peers[3].id for a in answers)
            assert len(swarm.successors.reports) == 1
            await swarm.freed()

    asyncio.run(main())


def test_a_stage_that_dies_while_the_prompt_is_read_or_before_it_is_opened(tmp_path: Path) -> None:
    prompt = tuple((7 * i) % VOCABULARY for i in range(60))

    async def main() -> None:
        async with swarm_of(6, tmp_path, failover=PATIENT) as swarm:
            job = await swarm.serve("llama", 3)
            await swarm.stand_by(swarm.peers[3], job, 1)
            await swarm.stand_by(swarm.peers[4], job, 2)
            assert (await swarm.ask(5, prompt_ids=PROMPT, max_tokens=2)).route  # the route is known now
            swarm.network.kill(swarm.owners[1].id)
            asked = asyncio.create_task(swarm.ask(5, prompt_ids=prompt, max_tokens=9))
            successor = swarm.peers[3].service
            while not successor._hosted or not any(s.ran for s in successor._hosted[job, 1].stage._sessions):
                await asyncio.sleep(0)
            swarm.network.kill(swarm.owners[2].id)
            answer = await asked
            assert list(answer.tokens) == reference("llama", prompt, 9)
            assert answer.route[1:] == (swarm.peers[3].id, swarm.peers[4].id)

    asyncio.run(main())


# --- what must not cost a peer its place


def test_a_link_that_broke_between_healthy_peers_only_costs_a_pause(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(4, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("llama", 3)
            one, two = (peer.id for peer in swarm.owners[:2])

            def cut() -> None:
                swarm.network.partition([one], [two])
                swarm.network.heal()

            answer = await answer_while(swarm, swarm.peers[3], 40, {10: cut, 20: cut})
            assert list(answer.tokens) == reference("llama", PROMPT, 40)
            assert answer.route == tuple(peer.id for peer in swarm.owners)

    asyncio.run(main())


def test_a_stage_that_fails_by_itself_is_tried_again_and_not_reported(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path, failover=PATIENT) as swarm:
            job = await swarm.serve("gpt2", 2)
            plane = swarm.owners[1].service._hosted[job, 1].loaded.plane
            run, failures = plane.run, [2]

            def stumble(*given: Any) -> Any:
                if failures[0]:
                    failures[0] -= 1
                    raise RuntimeError("the device is on fire")
                return run(*given)

            def break_it() -> None:
                plane.run = stumble  # type: ignore[method-assign]

            answer = await answer_while(swarm, swarm.peers[2], 30, {5: break_it})
            assert list(answer.tokens) == reference("gpt2", PROMPT, 30) and not failures[0]
            assert not swarm.successors.reports
            failures[0] = 99
            with pytest.raises(RemoteError, match=r"stage 1 of gpt2 on .* the device is on fire"):
                await swarm.ask(2, prompt_ids=PROMPT, max_tokens=5)

    asyncio.run(main())


# --- silence


def freeze(stage: RingStage, wake: asyncio.Event) -> None:
    """The stage computes and says nothing until it is woken up; what it was told meanwhile it does then."""
    held: list[tuple[Any, Any]] = []
    command, pass_on = stage._gateways._command, stage._pass_all_on

    def later(link: Any, frame: Any) -> None:
        held.append((link, frame))

    async def asleep(turn: Any, outcomes: Any) -> None:
        await wake.wait()
        stage._pass_all_on, stage._gateways._command = pass_on, command  # type: ignore[method-assign]
        while held:
            command(*held.pop(0))
        await pass_on(turn, outcomes)

    stage._gateways._command, stage._pass_all_on = later, asleep  # type: ignore[method-assign]


def test_a_frozen_stage_is_reported_and_goes_on_when_it_wakes_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(4, tmp_path, failover=ALERT) as swarm:
            job = await swarm.serve("llama", 3)
            wake = asyncio.Event()
            stage = swarm.owners[1].service._hosted[job, 1].stage
            asked = asyncio.create_task(
                answer_while(swarm, swarm.peers[3], 40, {10: lambda: freeze(stage, wake)})
            )
            while len(swarm.successors.reports) < 2:  # twice, and it still has its session
                await asyncio.sleep(0.01)
            assert stage.sessions == 1 and not asked.done()
            wake.set()
            answer = await asked
            assert list(answer.tokens) == reference("llama", PROMPT, 40)
            assert answer.route[1] == swarm.owners[1].id
            assert {report[0] for report in swarm.successors.reports} == {1}

    asyncio.run(main())


def test_a_frozen_stage_is_replaced_once_somebody_has_taken_it_over(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(5, tmp_path, failover=ALERT) as swarm:
            job = await swarm.serve("llama", 3)
            await swarm.stand_by(swarm.peers[3], job, 1)
            frozen = swarm.owners[1]
            asked = asyncio.create_task(
                answer_while(
                    swarm,
                    swarm.peers[4],
                    40,
                    {10: lambda: freeze(frozen.service._hosted[job, 1].stage, asyncio.Event())},
                )
            )
            while not swarm.successors.reports:
                await asyncio.sleep(0.01)
            claim = frozen.context.leases.holds(job, 1)
            assert claim is not None
            await swarm.hold(swarm.peers[3], job, 1, over=claim.term)  # its claim has run out, say
            answer = await asked
            assert list(answer.tokens) == reference("llama", PROMPT, 40)
            assert answer.route[1] == swarm.peers[3].id

    asyncio.run(main())


@pytest.mark.heavy
def test_a_slow_stage_is_left_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(4, tmp_path, failover=ALERT) as swarm:
            job = await swarm.serve("gpt2", 3)
            stage = swarm.owners[1].service._hosted[job, 1].stage
            turn = stage._pass_all_on

            async def slowly(*given: Any) -> None:
                await asyncio.sleep(0.4)
                await turn(*given)

            def slow_down() -> None:
                stage._pass_all_on = slowly  # type: ignore[method-assign]

            answer = await answer_while(swarm, swarm.peers[3], 8, {3: slow_down})
            assert list(answer.tokens) == reference("gpt2", PROMPT, 8)
            assert not swarm.successors.reports

    asyncio.run(main())


def test_a_token_that_was_lost_on_the_way_is_made_again(tmp_path: Path) -> None:
    async def main() -> None:
        failover = FailoverConfig(recover_seconds=20, quiet_seconds=0.05, ping_seconds=0.05, rounds=2)
        async with swarm_of(4, tmp_path, failover=failover) as swarm:
            job = await swarm.serve("gpt2", 3)
            stage = swarm.owners[1].service._hosted[job, 1].stage
            turn = stage._pass_all_on

            async def lose_it(*given: Any) -> None:
                stage._pass_all_on = turn  # type: ignore[method-assign]

            def lose_one() -> None:
                stage._pass_all_on = lose_it  # type: ignore[method-assign]

            answer = await answer_while(swarm, swarm.peers[3], 12, {5: lose_one})
            assert list(answer.tokens) == reference("gpt2", PROMPT, 12)
            assert not swarm.successors.reports

    asyncio.run(main())


# --- leaving


@pytest.mark.parametrize(
    ("leaver", "sampling"),
    [
        pytest.param(2, Sampling(), id="2-greedy"),
        pytest.param(1, PENALISED, id="1-penalised", marks=pytest.mark.heavy),
        pytest.param(1, Sampling(), id="1-greedy", marks=pytest.mark.slow),
        pytest.param(2, PENALISED, id="2-penalised", marks=pytest.mark.slow),
    ],
)
def test_a_peer_that_leaves_is_followed_without_a_fault(
    leaver: int, sampling: Sampling, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fusion.runtime.serving.answers")

    async def main() -> None:
        async with swarm_of(5, tmp_path, failover=PATIENT) as swarm:
            job = await swarm.serve("llama", 3)
            old, new = swarm.owners[leaver], swarm.peers[3]
            await swarm.stand_by(new, job, leaver)
            gateway = swarm.peers[4]
            stage, first = (swarm.owners[i].service._hosted[job, i].stage for i in (3 - leaver, 0))
            turn, begin = stage._pass_all_on, first._gateways._commands["open"]

            def begin_late(link: Any, frame: Any) -> None:  # tokens come while the next session is opened
                asyncio.get_running_loop().call_later(0.03, begin, link, frame)

            async def unhurried(*given: Any) -> None:
                await asyncio.sleep(0.005)  # the answer must not be over before it has moved
                await turn(*given)

            stage._pass_all_on = unhurried  # type: ignore[method-assign]
            first._gateways._commands["open"] = begin_late
            faults = {20: lambda: swarm.hand_over(job, leaver, old, new)}
            answer = await answer_while(swarm, gateway, 80, faults, sampling=sampling)
            assert list(answer.tokens) == seeded_reference("llama", PROMPT, 80, sampling)
            assert answer.route[leaver] == new.id
            assert not swarm.successors.reports
            assert not [r for r in caplog.records if "looking for another way" in r.message]
            await asyncio.wait(old.hosting, timeout=10)
            assert not old.open_sessions and not old.service._hosted
            await swarm.freed()

    asyncio.run(main())


def test_a_host_that_is_cancelled_without_a_successor_ends_its_sessions_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(5, tmp_path, failover=PATIENT) as swarm:
            job = await swarm.serve("llama", 3)
            old, new = swarm.owners[1], swarm.peers[3]

            async def move() -> None:
                old.hosting[0].cancel()
                await asyncio.wait(old.hosting)
                await old.context.leases.release(job, 1)
                await swarm.hold(new, job, 1)

            answer = await answer_while(swarm, swarm.peers[4], 40, {9: move})
            assert list(answer.tokens) == reference("llama", PROMPT, 40)
            assert answer.route[1] == new.id

    asyncio.run(main())


def test_an_answer_of_a_job_that_was_stopped_ends_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path, failover=PATIENT) as swarm:
            job = await swarm.serve("llama", 2)

            async def stop() -> None:
                await swarm.publish(job, "llama", 2, state="stopped")
                for stage, peer in enumerate(swarm.owners):
                    peer.hosting[0].cancel()
                    await peer.context.leases.release(job, stage)

            began = asyncio.get_running_loop().time()
            with pytest.raises(RemoteError, match="llama is not served any more: stopped"):
                await answer_while(swarm, swarm.peers[2], 80, {5: stop})
            assert asyncio.get_running_loop().time() - began < PATIENT.recover_seconds / 2

    asyncio.run(main())


def test_of_a_model_that_is_served_no_longer_nobody_follows_a_stage_that_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moves, "MOVE_PAUSE_SECONDS", 0.0)

    class Ended:
        looks = 0

        def avoid(self, *_: object) -> None: ...

        def forget(self, *_: object) -> None: ...

        async def route(self, *_: object) -> None:
            self.looks += 1
            raise JobFailed("toy is not served any more: stopped")

    async def main() -> None:
        routes, unhandled = Ended(), list[Any]()
        asyncio.get_running_loop().set_exception_handler(lambda _, about: unhandled.append(about))
        pair: Any = SimpleNamespace(next=None, remaining=None)
        leaving = moves.Moves(pair, routes, lambda: True, lambda: 0.0, random.Random(0))  # type: ignore[arg-type]
        route = (Hop(PeerId("p"), 1),)
        leaving.leave(SimpleNamespace(model=SimpleNamespace(job="j"), route=route), 0)  # type: ignore[arg-type]
        while leaving.under_way:
            await asyncio.sleep(0)
        await leaving.aclose()
        del leaving
        gc.collect()
        assert routes.looks == moves.MOVE_TRIES and not unhandled

    asyncio.run(main())
