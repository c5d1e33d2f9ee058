"""The ring of stages over the in-memory transport: tokens, order, and what it refuses."""

from __future__ import annotations

import asyncio
import itertools
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.operations import operations
from support.toy_ring import (
    GREEDY,
    HIDDEN,
    JOB,
    SHAPES,
    VOCABULARY,
    Refused,
    ToyPlane,
    make_stages,
    reference,
    ring_of,
)

from fusion.dag.cutting.stage import Edge, Stage
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Graph, Input, Ref, TensorType
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.job.protocol import RING
from fusion.runtime.job.worker import Worker
from fusion.runtime.serving.requests.header_fields import TOKEN_BYTES, pack_tokens
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.runtime.serving.ring.frames import hop_bytes, plan_ring
from fusion.runtime.serving.ring.links import GATEWAY, IDLE_SECONDS, LinkEnds, RingPosition
from fusion.runtime.serving.ring.session import Chunk, Hop, SessionId
from fusion.runtime.serving.ring.stage import RingStage
from fusion.runtime.serving.ring.stage_session import PART_BYTES, StageRunner
from fusion.swarm.errors import StaleTerm, SwarmError
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import PeerId, Stream


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.5, top_k=12, top_p=0.9, seed=5)])
def test_tokens_are_those_of_the_whole_model(shape: str, sampling: Sampling) -> None:
    async def main() -> None:
        stages = SHAPES[shape]
        async with ring_of(stages) as ring:
            for prompt in ([3], [1, 2, 3, 4, 5, 6, 7], list(range(17))):
                tokens = await ring.generate(prompt, 12, sampling=sampling)
                assert tokens == reference(stages, prompt, 12, sampling)
                assert len(set(tokens)) > 3, "an answer that does not vary proves nothing"
            await ring.freed()

    asyncio.run(main())


@pytest.mark.parametrize("shape", ["one", "three", "skip"])
def test_a_model_without_a_cache_is_recomputed_from_the_start_each_time(shape: str) -> None:
    runs: list[tuple[int, int, int]] = []

    async def main() -> None:
        stages = SHAPES[shape]
        async with ring_of(
            stages, cache="recompute", on_run=lambda i, _, start, length: runs.append((i, start, length))
        ) as ring:
            assert await ring.generate([5, 6, 7, 8, 9, 1], 4) == reference(stages, [5, 6, 7, 8, 9, 1], 4)
        assert [run[1:] for run in runs if run[0] == 0] == [(0, 6), (0, 7), (0, 8), (0, 9)]

    asyncio.run(main())


def test_sessions_at_once_do_not_touch_each_other() -> None:
    async def main() -> None:
        stages = SHAPES["skip"]
        async with ring_of(stages) as ring:
            prompts = [[(i * 7 + j) % VOCABULARY for j in range(1 + i * 2)] for i in range(8)]
            answers = await asyncio.gather(*(ring.generate(p, 10) for p in prompts))
            assert answers == [reference(stages, p, 10) for p in prompts]
            await ring.freed()

    asyncio.run(main())


def test_tokens_of_the_only_session_are_computed_between_what_the_loop_does_and_those_of_several_beside_it() -> (
    None
):
    ran: list[tuple[int, threading.Thread]] = []

    async def main() -> None:
        stages = SHAPES["three"]
        async with ring_of(
            stages, on_run=lambda stage, *_: ran.append((stage, threading.current_thread()))
        ) as ring:
            prompt = [1, 2, 3]
            assert await ring.generate(prompt, 20) == reference(stages, prompt, 20)
            here = threading.current_thread()
            for stage in range(3):
                threads = [thread for number, thread in ran if number == stage]
                assert threads[0] is not here, "how long a token takes is not known"
                assert threads.count(here) > 10
            ran.clear()
            both = await asyncio.gather(*(ring.generate([n, 2, 3], 20) for n in range(2)))
            assert both == [reference(stages, [n, 2, 3], 20) for n in range(2)]
            assert sum(thread is not here for _, thread in ran) > len(ran) / 2

    asyncio.run(main())


def test_one_stage_alone_leaves_the_loop_to_others_between_tokens() -> None:
    ran: list[threading.Thread] = []

    async def main() -> None:
        async with ring_of(SHAPES["one"], on_run=lambda *_: ran.append(threading.current_thread())) as ring:
            assert await ring.generate([1, 2, 3], 20) == reference(SHAPES["one"], [1, 2, 3], 20)

    asyncio.run(main())
    assert threading.current_thread() not in ran


def test_links_between_stages_end_once_no_session_needs_them_and_are_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fusion.runtime.serving.ring.links.LOOK_SECONDS", 0.005)

    async def main() -> None:
        stages, prompt, now = SHAPES["skip"], [1, 2, 3], [0.0]
        async with ring_of(stages, clock=lambda: now[0]) as ring:
            sent = [
                ring.rings[0]._streams,
                ring.rings[-1]._streams,
            ]  # what the first stage and the last are sent over
            streams, opening = await ring.connect(), ring.opening(prompt, 4)
            await ring.open(streams, opening)  # and says nothing for a while
            for _ in range(3):
                assert await ring.generate(prompt, 10) == reference(stages, prompt, 10)
                now[0] += 3.0  # less than after which a session is closed
                await asyncio.sleep(0.02)
            assert all(sent)
            await ring.prompt(streams, opening, prompt)
            assert await ring.tokens(streams[-1]) == reference(stages, prompt, 4)
            for stream in streams:
                await stream.send("close", {"session": opening.session})
            await ring.freed()
            now[0] += IDLE_SECONDS
            async with asyncio.timeout(10):
                while any(sent):
                    await asyncio.sleep(0.005)
            assert await ring.generate(prompt, 10) == reference(stages, prompt, 10)
            assert all(sent)

    asyncio.run(main())


def test_a_long_prompt_lets_others_through_between_its_chunks() -> None:
    order: list[tuple[str, int]] = []

    async def main() -> None:
        async with ring_of(
            SHAPES["one"], on_run=lambda _, session, start, length: order.append((session, start))
        ) as ring:
            streams = await ring.connect()
            long, short = list(range(30)), [1]
            openings = [ring.opening(long, 1, session="long"), ring.opening(short, 4, session="short")]
            for opening in openings:
                await ring.open(streams, opening)
            await ring.prompt(streams, openings[0], long)
            await ring.prompt(streams, openings[1], short)
            await ring.tokens(streams[-1])
            await ring.tokens(streams[-1])

    asyncio.run(main())
    last_of_long = max(i for i, (session, _) in enumerate(order) if session == "long")
    assert sum(session == "short" for session, _ in order[:last_of_long]) == 4


def test_chunks_of_a_prompt_overlap_across_stages() -> None:
    third = threading.Event()

    def on_run(stage: int, session: str, start: int, length: int) -> None:
        if stage == 0 and start == 8:
            third.set()
        if stage == 1 and start == 0:
            assert third.wait(10), "stage 1 had the first chunk only after stage 0 had run them all"

    async def main() -> None:
        async with ring_of(SHAPES["two"], on_run=on_run) as ring:
            assert await ring.generate(list(range(14)), 2) == reference(SHAPES["two"], list(range(14)), 2)

    asyncio.run(main())


def test_a_prompt_is_not_cut_where_that_moves_a_bit() -> None:
    async def main(agree: bool) -> list[tuple[int, int]]:
        runs: list[tuple[int, int]] = []

        def on_run(stage: int, session: str, start: int, length: int) -> None:
            runs.append((start, length))

        prompt = [i % 11 for i in range(200)]
        async with ring_of(SHAPES["two"], on_run=on_run, max_sequence=256, prefill_chunk=150) as ring:
            for plane in ring.planes:
                plane.chunk_invariant = agree
            assert await ring.generate(prompt, 1) == reference(SHAPES["two"], prompt, 1)
        return runs

    assert len(asyncio.run(main(agree=True))) > 4
    assert sorted(asyncio.run(main(agree=False))) == [(0, 150), (0, 150), (150, 50), (150, 50)]


def test_an_end_token_stops_the_answer_and_is_its_last() -> None:
    async def main() -> None:
        stages = SHAPES["two"]
        free = reference(stages, [4, 2], 12)
        end = free[5]
        async with ring_of(stages, end_tokens=(end,)) as ring:
            tokens = await ring.generate([4, 2], 12)
        assert tokens == free[: free.index(end) + 1]

    asyncio.run(main())


def test_logits_come_with_each_token_where_asked_for() -> None:
    async def main() -> None:
        async with ring_of(SHAPES["two"]) as ring:
            streams = await ring.connect()
            opening = ring.opening([1, 2], 3, logits=True)
            await ring.open(streams, opening)
            await ring.prompt(streams, opening, [1, 2])
            for _ in range(3):
                frame = await streams[-1].receive()
                logits = torch.frombuffer(bytearray(frame.payload), dtype=torch.float32)
                assert logits.shape == (VOCABULARY,) and int(logits.argmax()) == frame.header["id"]

    asyncio.run(main())


# --- what goes wrong


def test_a_gateway_that_vanishes_frees_its_sessions_and_no_others() -> None:
    async def main() -> None:
        async with ring_of(SHAPES["three"]) as ring:
            lost = MemoryTransport(ring.network, PeerId("lost"))
            theirs, ours = await ring.connect(lost), await ring.connect()
            await ring.open(theirs, ring.opening([1], 40, session="theirs"))
            await ring.prompt(theirs, ring.opening([1], 40, session="theirs"), [1])
            await ring.open(ours, ring.opening([1], 4, session="ours"))
            ring.network.kill(PeerId("lost"))
            async with asyncio.timeout(10):
                while any("theirs" in plane.seen for plane in ring.planes):
                    await asyncio.sleep(0.001)
            assert all("ours" in plane.seen for plane in ring.planes)
            await ring.prompt(ours, ring.opening([1], 4, session="ours"), [1])
            assert await ring.tokens(ours[-1]) == reference(SHAPES["three"], [1], 4)

    asyncio.run(main())


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_stage_that_vanishes_ends_the_session_on_those_beside_it(victim: int) -> None:
    async def main() -> None:
        async with ring_of(SHAPES["three"]) as ring:
            streams = await ring.connect()
            opening = ring.opening([1], 60, session="s")
            await ring.open(streams, opening)
            ring.network.kill(ring.route[victim].peer)
            before = (victim - 1) % 3
            with pytest.raises(Refused, match=f"failed: stage {victim} of toy on .* vanished"):
                await ring.tokens(streams[before])
            with pytest.raises(SwarmError):
                await streams[victim].receive()
            for stream in streams:
                stream.abort()  # what a gateway does next
            await ring.freed()

    asyncio.run(main())


def test_a_stage_that_leaves_says_so() -> None:
    async def main() -> None:
        async with ring_of(SHAPES["one"]) as ring:
            streams = await ring.connect()
            await ring.open(streams, ring.opening([1], 5, session="s"))
            ring.tasks[0].cancel()
            with pytest.raises(Refused, match=r"failed: stage 0 of toy on .* is leaving"):
                await ring.tokens(streams[0])
            with pytest.raises(SwarmError):
                await streams[0].receive()

    asyncio.run(main())


def test_parts_that_wait_for_other_stages_are_bounded_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusion.runtime.serving.ring.openings.PARTS_BYTES", 20 * PART_BYTES)

    async def main() -> None:
        stages, prompt = SHAPES["skip"], list(range(17))
        async with ring_of(stages) as ring:
            stranger = MemoryTransport(ring.network, PeerId("stranger"))

            async def listen(stream: Stream) -> None:
                await asyncio.Event().wait()

            await stranger.serve(RING.name, listen)
            gateway = (await ring.connect(stranger))[3]
            sender = await stranger.open(ring.route[3].peer, RING.name)
            await sender.send("hello", LinkEnds(JOB, 0, 3, ring.route[3].peer).to_header())
            route = (*[Hop(stranger.peer_id, 1)] * 3, ring.route[3])
            names = [SessionId(f"strange {number}") for number in range(4)]
            for name in names:
                opening = replace(ring.opening([1], 60, session=name), route=route)
                await ring.open([gateway], opening)
            # Of each little enough, and nothing of what stage 2 would send.
            for number, name in itertools.product(range(1, 10), names):
                chunk = Chunk(0, 1, sample=False, number=number)
                await sender.send("chunk", {"session": name, **chunk.to_header()}, [bytes(12)])
                if number % 3 == 0:
                    assert await ring.generate(prompt, 4) == reference(stages, prompt, 4)
            failed = await gateway.receive()
            assert (failed.kind, failed.header["reason"]) == ("failed", "full")
            assert await ring.generate(prompt, 4) == reference(stages, prompt, 4)

    asyncio.run(main())


def test_no_memory_is_one_line_for_the_gateway() -> None:
    async def main() -> None:
        async with ring_of(SHAPES["two"]) as ring:
            ring.planes[1].full = True
            streams = await ring.connect()
            with pytest.raises(Refused, match=r"stage 1 of toy on .*no room for another session's cache"):
                await ring.open(streams, ring.opening([1], 5))
            ring.planes[1].full = False
            assert await ring.generate([1], 5) == reference(SHAPES["two"], [1], 5)

    asyncio.run(main())


def test_an_error_in_the_plane_fails_that_session_and_the_stage_goes_on() -> None:
    async def main() -> None:
        async with ring_of(SHAPES["two"]) as ring:
            streams = await ring.connect()
            opening = ring.opening([1], 5, session="s")
            await ring.open(streams, opening)
            ring.planes[0].broken = True
            await ring.prompt(streams, opening, [1])
            with pytest.raises(Refused, match=r"stage 0 of toy on .*the device is on fire"):
                await ring.tokens(streams[0])
            ring.planes[0].broken = False
            assert await ring.generate([1], 5) == reference(SHAPES["two"], [1], 5)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"route": [["p0", 4], ["p1", 6]]}, "term"),
        ({"route": [["p9", 5], ["p1", 6]]}, "term"),
        ({"route": [["p0", 5]]}, "route"),
        ({"route": [["p0", "5"], ["p1", 6]]}, "route"),
        ({"max_tokens": 64}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_length": -3}, "max_tokens"),
        ({"session": ""}, "session"),
        ({"session": 7}, "session"),
        ({"sampling": {"temperature": -1.0}}, "temperature"),
        ({"sampling": None}, "sampling"),
    ],
)
def test_an_opening_that_does_not_fit_is_refused(change: dict[str, Any], reason: str) -> None:
    async def main() -> None:
        async with ring_of(SHAPES["two"]) as ring:
            stream = (await ring.connect())[0]
            await stream.send("open", {**ring.opening([1], 5, session="s").to_header(), **change})
            frame = await stream.receive()
            assert frame.kind == "failed" and reason in frame.header["message"]
            assert not ring.rings[0].sessions

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "prompt", "reason"),
    [
        (
            {"sampling": {"presence_penalty": 1.0}},
            [],
            "penalties, schemas and prompt_logprobs need the 1 tokens",
        ),
        ({"sampling": {"presence_penalty": 1.0}}, [VOCABULARY], "tokens are 0 to 30"),
        ({"sampling": {"presence_penalty": 1.0}, "answered": 1}, [1], "answered"),
        ({"sampling": {"logit_bias": [[VOCABULARY, 1.0]]}}, [], "logit_bias"),
        ({"top_logprobs": 21}, [], "top_logprobs"),
    ],
)
def test_a_last_stage_refuses_settings_that_it_cannot_carry_out(
    change: dict[str, Any], prompt: list[int], reason: str
) -> None:
    async def main() -> None:
        async with ring_of(SHAPES["two"]) as ring:
            stream = (await ring.connect())[-1]
            header = {**ring.opening([1], 5, session="s").to_header(), **change}
            await stream.send("open", header, [pack_tokens(prompt)])
            frame = await stream.receive()
            assert (frame.kind, frame.header["reason"]) == ("failed", "refused")
            assert reason in frame.header["message"] and not ring.rings[-1].sessions

    asyncio.run(main())


@pytest.mark.parametrize("prompt", [[1, 2, 3], [VOCABULARY], [-1], []])
def test_a_prompt_that_was_not_announced_or_is_outside_the_vocabulary_is_refused(prompt: list[int]) -> None:
    async def main() -> None:
        async with ring_of(SHAPES["one"]) as ring:
            streams = await ring.connect()
            opening = ring.opening([1], 5, session="s")
            await ring.open(streams, opening)
            await ring.prompt(streams, opening, prompt)
            with pytest.raises(Refused, match="failed: prompt: "):
                await ring.tokens(streams[0])
            await ring.freed()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("sender", "kind", "header", "size"),
    [
        (0, "chunk", {"start": 0, "length": 2}, 11),  # not the bytes of two positions
        (0, "chunk", {"start": 0, "length": 10**9}, 24),
        (0, "chunk", {"start": -1, "length": 2}, 24),
        (0, "chunk", {"start": 0, "length": 0}, 0),
        (2, "chunk", {"start": 0, "length": 1}, 12),  # the wrong stage
        (0, "chunk", {"start": "0", "length": 2}, 24),
        (0, "surprise", {}, 0),
    ],
)
def test_frames_that_the_plan_does_not_foresee_end_the_stream(
    sender: int, kind: str, header: dict[str, Any], size: int
) -> None:
    async def main() -> None:
        async with ring_of(SHAPES["two"]) as ring:
            await ring.open(await ring.connect(), ring.opening([1, 2], 5, session="s"))
            forger = await ring.network.transports[PeerId("p0")].open(PeerId("p1"), RING.name)
            await forger.send("hello", LinkEnds(JOB, sender, 1, PeerId("p1")).to_header())
            await forger.send(kind, {"session": "s", **header}, [bytes(size)])
            assert (await forger.receive()).kind == "error"
            with pytest.raises(SwarmError):
                await forger.receive()

    asyncio.run(main())


def test_only_the_peers_of_the_route_may_speak_for_its_stages() -> None:
    async def main() -> None:
        async with ring_of(SHAPES["two"]) as ring:
            streams, opening = await ring.connect(), ring.opening([1], 5, session="s")
            await ring.open(streams, opening)
            stranger = MemoryTransport(ring.network, PeerId("stranger"))
            for stage, kind, header, size in (
                (1, "chunk", {"start": 0, "length": 1}, 12),
                (0, "token", {"id": 1, "position": 1}, 0),
            ):
                stream = await stranger.open(ring.route[stage].peer, RING.name)
                await stream.send("hello", LinkEnds(JOB, 1 - stage, stage, PeerId("x")).to_header())
                await stream.send(kind, {"session": "s", **header}, [bytes(size)])
            meddler = await ring.connect(stranger)
            await meddler[0].send("prompt", {"session": "s"}, [pack_tokens([3])])
            assert (await meddler[0].receive()).kind == "failed"
            await ring.prompt(streams, opening, [1])
            assert await ring.tokens(streams[-1]) == reference(SHAPES["two"], [1], 5)

    asyncio.run(main())


def test_a_stage_that_is_not_running_refuses_streams() -> None:
    stages = SHAPES["one"]

    async def main() -> None:
        network = MemoryNetwork()
        transport = MemoryTransport(network, PeerId("p0"))
        position = RingPosition(
            job=JOB,
            name="toy",
            serve=ServeConfig(cache="kv", max_sequence=8, vocabulary=VOCABULARY),
            peer=PeerId("p0"),
            term=1,
        )
        async with Worker() as worker:
            plan = plan_ring(stages, 0)
            stage = RingStage(transport, worker, StageRunner(ToyPlane(stages[0]), plan, 8), plan, position)
            with pytest.raises(StaleTerm, match="not served here now"):
                await stage.attend(await _silent_stream(network), GATEWAY)

    asyncio.run(main())


async def _silent_stream(network: MemoryNetwork) -> Stream:
    async def handler(stream: Stream) -> None:
        await asyncio.Event().wait()

    other = MemoryTransport(network, PeerId("other"))
    await other.serve(RING.name, handler)
    return await MemoryTransport(network, PeerId("asker")).open(PeerId("other"), RING.name)


# --- plans


def test_a_skip_edge_goes_straight_to_its_consumers() -> None:
    plans = [plan_ring(SHAPES["skip"], i) for i in range(4)]
    assert [p.consumer for p in plans[0].outgoing] == [1, 2, 3]
    assert [[p.producer for p in plan.incoming] for plan in plans] == [[], [0], [0, 1], [0, 2]]
    assert all(not parcel.ids for plan in plans for parcel in plan.outgoing)


def test_ids_travel_as_far_as_the_last_stage_that_reads_them() -> None:
    plans = [plan_ring(make_stages(4, ids_at=(0, 2)), i) for i in range(4)]
    assert [p.ids for plan in plans for p in plan.outgoing] == [True, True, False]


def test_a_plan_is_work_in_proportion_to_the_number_of_stages() -> None:
    few, many = make_stages(64), make_stages(512)
    assert operations(lambda: plan_ring(many, 7)) < 10 * operations(lambda: plan_ring(few, 7))
    assert operations(lambda: hop_bytes(many)) < 10 * operations(lambda: hop_bytes(few))


def test_skips_of_every_length_cross_the_cuts_between() -> None:
    hop = 3 * 4  # bytes of a position of an edge
    assert hop_bytes(make_stages(4)) == (hop, hop, hop)
    assert hop_bytes(make_stages(4, skip=True)) == (3 * hop, hop + 2 * hop, hop + hop)
    assert hop_bytes(make_stages(3, ids_at=(0, 2))) == (hop + TOKEN_BYTES, hop + TOKEN_BYTES)


def test_parcels_of_every_dtype_come_back_as_they_were() -> None:
    batch, sequence = symbol("batch"), symbol("sequence")
    dtypes = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "bool"]
    edges = tuple(
        Edge(f"e{i}/0", Ref(f"e{i}"), TensorType((batch, 2, sequence + 1), dtype), 0, (1,), False)
        for i, dtype in enumerate(dtypes)
    )
    inputs = tuple(Input(e.name, e.type) for e in edges)
    stages = (
        Stage(0, Graph((), (), (), ()), (), edges, ()),
        Stage(1, Graph((*inputs, Input("input_ids", HIDDEN)), (), (), ()), edges, (), (0,)),
    )
    parcel = plan_ring(stages, 0).outgoing[0]
    sent = {
        e.name: (torch.arange(8).view(2, 1, 4).transpose(0, 1) % 2).to(getattr(torch, d))
        for e, d in zip(edges, dtypes, strict=True)
    }
    payload = b"".join(parcel.pack(sent, memoryview(pack_tokens([7, 8, 9]))))
    assert len(payload) == parcel.size_bytes(3)
    found: dict[str, torch.Tensor] = {}
    ids = parcel.unpack(memoryview(bytearray(payload)), 3, found)
    assert ids is not None and bytes(ids) == pack_tokens([7, 8, 9])
    assert all(
        torch.equal(found[name], sent[name]) and found[name].dtype == sent[name].dtype for name in sent
    )


def test_models_that_cannot_be_served_this_way_are_refused() -> None:
    odd = TensorType((symbol("batch"), 3), "float32")
    graph = Graph((Input("pixels", odd),), (), (), ())
    with pytest.raises(JobError, match="pixels"):
        plan_ring([Stage(0, graph, (), (), (0,))], 0)
    with pytest.raises(JobError, match="last stage"):
        plan_ring(
            [Stage(0, Graph((), (), (), ()), (), (), (0,)), Stage(1, Graph((), (), (), ()), (), (), ())], 0
        )
