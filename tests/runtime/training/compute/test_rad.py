from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusion.compression.codec import NONE, codec
from fusion.compression.error_feedback import ErrorFeedback
from fusion.dag.cutting.stage import Edge, Stage, TieGroup
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Graph, Input, Ref, TensorType, Variable
from fusion.runtime.job.manifest import CompressionConfig, DataConfig, OptimizerConfig, TrainConfig
from fusion.runtime.job.worker import Worker
from fusion.runtime.planes.learning_rate import SKIPPED
from fusion.runtime.planes.plane import RngKey
from fusion.runtime.training.compute import loss_scale
from fusion.runtime.training.compute.device_calls import DeviceCalls
from fusion.runtime.training.compute.inbox import Inbox, Key, StagePlan
from fusion.runtime.training.compute.loss_scale import LossScaled
from fusion.runtime.training.compute.rad import AHEAD, Rad
from fusion.runtime.training.data.batches import Batches
from fusion.runtime.training.step import faults
from fusion.swarm.directory.records import Digest
from fusion.swarm.errors import FrameError
from fusion.swarm.transport import Buffer, Frame

VALUE = TensorType((symbol("batch"), 3), "float32")
WEIGHT = TensorType((2, 3), "float32")
IN = Edge("a/0", Ref("a"), VALUE, producer=0, consumers=(1,), needs_gradient=True)
OUT = Edge("b/0", Ref("b"), VALUE, producer=1, consumers=(2, 3), needs_gradient=True)
MASK = Edge("c/0", Ref("c"), replace(VALUE, dtype="bool"), producer=1, consumers=(3,), needs_gradient=False)
STAGE = Stage(
    1, Graph((Input("a/0", VALUE),), (Variable("w", WEIGHT),), (), (Ref("b"), Ref("c"))), (IN,), (OUT, MASK), ()
)  # fmt: skip
PLAN = StagePlan(stage=STAGE, stages=4, ties=(TieGroup("w", (0, 1, 3)),), sizes={"batch": 2, "sequence": 4})
CONFIG = TrainConfig(
    steps=3, microbatches=3, microbatch_size=2, sequence=4, seed=9, optimizer=OptimizerConfig(),
    data=DataConfig(kind="tokens", train=Digest("0" * 64)), evaluate_batches=2,
)  # fmt: skip


def frame(kind: str, edge: str, tensor: torch.Tensor, **changes: Any) -> Frame:
    header = {
        "term": 1, "attempt": (1, 1), "step": 0, "microbatch": 0, "edge": edge, "codec": "none", "evaluate": False,
        "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), **changes,
    }  # fmt: skip
    return Frame(kind, header, memoryview(bytearray(b"".join(NONE.encode(tensor).buffers))))


def activation(value: float = 0.0, **changes: Any) -> Frame:
    return frame("activation", "a/0", torch.full((2, 3), value), **changes)


class Recorder:
    """A plane that does arithmetic anyone can check, and remembers the order of its calls."""

    def __init__(self) -> None:
        self.stage = STAGE
        self.calls: list[tuple[str, int]] = []
        self.summed: dict[str, torch.Tensor] = {}

    def forward(
        self, microbatch: int, inputs: Mapping[str, torch.Tensor], rng: RngKey
    ) -> dict[str, torch.Tensor]:
        assert rng == RngKey(9, rng.step, microbatch)
        self.calls.append(("forward", microbatch))
        return {"b/0": inputs["a/0"] * 2, "c/0": inputs["a/0"] > 0}

    def backward(
        self, microbatch: int, gradients: Mapping[str, torch.Tensor], scale: float
    ) -> dict[str, torch.Tensor]:
        assert set(gradients) == {"b/0"} and scale == 1 / 3
        self.calls.append(("backward", microbatch))
        return {"a/0": gradients["b/0"] * 2}

    def evaluate(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**self.forward(0, inputs, RngKey(9, 0, 0)), "result/0": inputs["a/0"].mean()}

    def gradients(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: torch.full((2, 3), 0.1) for name in names}

    def set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        self.summed = dict(gradients)

    def squared_norm(self, skip: frozenset[str]) -> float:
        assert skip == {"w"}  # stage 0 counts it
        return 7.0


Sent = list[tuple[int, str, dict[str, Any], bytes]]


async def started(plane: Recorder, sent: Sent, worker: Worker) -> Rad:
    def send(target: int, kind: str, header: Mapping[str, Any], payload: Sequence[Buffer]) -> None:
        sent.append((target, kind, dict(header), b"".join(payload)))

    calls, batches = DeviceCalls(PLAN, worker), Batches(CONFIG, [], None, None)
    return Rad(PLAN, CONFIG, plane, calls, batches, Inbox(PLAN, CONFIG), send)  # type: ignore[arg-type]


@pytest.mark.parametrize(("seconds", "measured"), [(0.5, 1e12), (2.0, 1e12), (2.0, 0.0)])
def test_a_stage_whose_calls_take_ten_times_what_its_graph_promises_fails(
    seconds: float, measured: float
) -> None:
    """Each call reads the clock as it begins and as it ends; where nobody measured the device nothing is promised."""

    async def main() -> None:
        clock = (seconds * turn for turn in itertools.count())
        async with asyncio.timeout(10), Worker(1) as worker:
            calls = DeviceCalls(PLAN, worker, lambda: next(clock), measured)
            if seconds < 1.0 or not measured:
                for _ in range(20):
                    await calls.run(int)
                return
            for _ in range(2):
                await calls.run(int)
            with pytest.raises(RuntimeError, match="the graph promises"):
                await calls.run(int)

    asyncio.run(main())


def test_a_step_runs_in_schedule_order_and_every_value_goes_once_to_each_that_reads_it() -> None:
    async def main() -> None:
        plane, sent = Recorder(), Sent()
        async with asyncio.timeout(10), Worker(1) as worker:
            rad = await started(plane, sent, worker)
            step = asyncio.ensure_future(rad.step((1, 1), 0))
            await asyncio.sleep(0)
            for m in (2, 0, 1):  # frames come in any order
                rad.inbox.offer(0, activation(float(m), microbatch=m))
                for consumer in (3, 2):
                    grown = torch.full((2, 3), float(10 * m + consumer))
                    rad.inbox.offer(consumer, frame("gradient", "b/0", grown, microbatch=m))
            rad.inbox.offer(3, frame("tie", "w", torch.full((2, 3), 3.0)))
            rad.inbox.offer(0, frame("tie", "w", torch.full((2, 3), 1e8)))
            report = await step
        assert report.squared_norm == 7.0 and report.loss is None and 0 <= report.busy <= 1
        forward = [m for kind, m in plane.calls if kind == "forward"]
        backward = [m for kind, m in plane.calls if kind == "backward"]
        assert forward == backward == [0, 1, 2]
        routes = sorted(
            (target, kind, header["microbatch"], header["edge"]) for target, kind, header, _ in sent
        )
        assert routes == sorted(
            [(t, "activation", m, "b/0") for t in (2, 3) for m in range(3)]
            + [(3, "activation", m, "c/0") for m in range(3)]
            + [(0, "gradient", m, "a/0") for m in range(3)]
            + [(0, "tie", 0, "w"), (3, "tie", 0, "w")]
        )
        for _, kind, header, payload in sent:
            if kind == "gradient":  # consumers 2 and 3 were added up
                wanted = torch.full((2, 3), 2 * (20.0 * header["microbatch"] + 5))
                assert payload == bytes(NONE.encode(wanted).buffers[0])
        # In stage order: (0's + 1's) + 3's, which in float32 is not 0's + (1's + 3's).
        in_order = (torch.tensor(1e8) + torch.tensor(0.1)) + torch.tensor(3.0)
        assert torch.equal(plane.summed["w"], in_order.expand(2, 3))

    asyncio.run(main())


@pytest.mark.parametrize("own", [0, 1, 2])
def test_a_tied_gradient_is_added_up_in_order_and_where_it_arrived(own: int) -> None:
    """What is our own may be on its way to the others still."""

    async def main() -> None:
        plane = Recorder()
        async with asyncio.timeout(10), Worker(1) as worker:
            rad = await started(plane, Sent(), worker)
        parts = [torch.randn(5, 3) * 10**n for n in range(3)]
        wanted, before = (parts[0] + parts[1]) + parts[2], parts[own].clone()
        memory = {part.data_ptr() for n, part in enumerate(parts) if n != own}
        rad._set_gradient("w", parts, parts[own])
        assert torch.equal(plane.summed["w"], wanted) and torch.equal(parts[own], before)
        assert plane.summed["w"].data_ptr() in memory

    asyncio.run(main())


def test_the_next_microbatch_starts_before_the_first_has_come_back() -> None:
    async def main() -> None:
        plane, sent = Recorder(), Sent()
        async with asyncio.timeout(10), Worker(1) as worker:
            rad = await started(plane, sent, worker)
            step = asyncio.ensure_future(rad.step((1, 1), 0))
            await asyncio.sleep(0)
            rad.inbox.offer(0, activation(microbatch=1))
            rad.inbox.offer(0, activation(microbatch=0))
            while len(sent) < 6:
                await asyncio.sleep(0.001)
            assert plane.calls[:2] == [("forward", 0), ("forward", 1)]
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step

    asyncio.run(main())


def test_evaluation_is_forward_only() -> None:
    async def main() -> None:
        plane, sent = Recorder(), Sent()
        async with asyncio.timeout(10), Worker(1) as worker:
            rad = await started(plane, sent, worker)
            run = asyncio.ensure_future(rad.evaluate((1, 1), 4))
            await asyncio.sleep(0)
            for m in range(2):
                rad.inbox.offer(0, activation(float(m), microbatch=m, step=4, evaluate=True))
            assert await run == 0.5
        assert {header["evaluate"] for _, _, header, _ in sent} == {True} and len(sent) == 6

    asyncio.run(main())


def test_evaluation_waits_for_links_that_are_slower_than_the_device() -> None:
    """Nothing comes back that it waits for: all batches were in memory at once, on their way."""
    batches = 12

    async def main() -> None:
        sent, gone = Sent(), asyncio.Event()

        async def room() -> None:
            await gone.wait()

        def send(*frame: Any) -> None:
            sent.append(frame)

        config = replace(CONFIG, evaluate_batches=batches)
        async with asyncio.timeout(10), Worker(1) as worker:
            inbox, read = Inbox(PLAN, config), Batches(config, [], None, None)
            plane: Any = Recorder()
            rad = Rad(PLAN, config, plane, DeviceCalls(PLAN, worker), read, inbox, send, room=room)
            run = asyncio.ensure_future(rad.evaluate((1, 1), 0))
            await asyncio.sleep(0)
            for m in range(batches):
                inbox.offer(0, activation(microbatch=m, evaluate=True))
            while len(sent) < 3 * AHEAD:
                await asyncio.sleep(0.001)
            for _ in range(20):  # turns in which nothing more goes out
                await worker.run(int)
            assert len(sent) == 3 * AHEAD and not run.done()
            gone.set()
            await run
            assert len(sent) == 3 * batches

    asyncio.run(main())


class Scaled(Recorder):
    """A plane that takes updates."""

    def apply(self, learning_rate: float, clip_factor: float) -> None:
        self.calls.append(("apply", 0))

    def discard(self) -> None:
        self.calls.append(("discard", 0))


def test_what_codecs_leave_out_is_scaled_as_gradients_are_and_an_overflow_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was added to gradients of another scale, and what a step without an update had left out with it."""
    monkeypatch.setattr(loss_scale, "GROWTH_STEPS", 1)
    kept = CompressionConfig(kind="uniform", codec="int4", error_feedback=True)
    config = replace(CONFIG, compression=kept, codecs=(("a/0", "int4", "int4"),), precision="fp16")
    gradient = torch.randn(2, 300, generator=torch.Generator().manual_seed(0)).half()

    async def main() -> None:
        async with asyncio.timeout(10), Worker(1) as worker:
            plane: Any = Scaled()
            inbox, read = Inbox(PLAN, config), Batches(config, [], None, None)
            rad = Rad(
                PLAN, config, LossScaled(plane), DeviceCalls(PLAN, worker), read, inbox, lambda *_: None
            )
            codecs = inbox.codecs

            async def step(number: int, clip: float, times: float) -> torch.Tensor:
                await codecs.gradient((1, 1), number, 0, "a/0", gradient * times)
                await rad.apply(0.1, clip)
                return codecs.state()["a/0"]

            left_out = ErrorFeedback()
            left_out.encode("a/0", codec("int4"), gradient)
            left_out.commit()
            grown = await step(0, 1.0, 1.0)  # the scale is doubled after each step
            assert grown.any() and torch.equal(grown, 2 * left_out.state()["a/0"])
            assert torch.equal(await step(1, SKIPPED, 1e4), grown / 2)
            assert plane.calls == [("apply", 0), ("discard", 0)]

    asyncio.run(main())


def test_an_error_of_the_plane_is_raised_as_it_is() -> None:
    class Broken(Recorder):
        def forward(self, *args: Any) -> dict[str, torch.Tensor]:
            raise MemoryError("no room")

    async def main() -> None:
        async with asyncio.timeout(10), Worker(1) as worker:
            rad = await started(Broken(), Sent(), worker)
            step = asyncio.ensure_future(rad.step((1, 1), 0))
            await asyncio.sleep(0)
            rad.inbox.offer(0, activation())
            with pytest.raises(MemoryError, match="no room"):
                await step

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "dtype", "ours"),
    [
        (IndexError("out of range"), "float32", True),
        (IndexError("out of range"), "bool", True),
        (IndexError("out of range"), "int64", False),
        (MemoryError("no room"), "int64", True),
    ],
)
def test_a_stage_does_not_answer_for_an_index_that_another_may_have_sent(
    error: Exception, dtype: str, ours: bool
) -> None:
    edge = replace(IN, type=replace(VALUE, dtype=dtype), needs_gradient=False)
    plan = replace(PLAN, stage=replace(STAGE, receives=(edge,)))
    nothing: Any = None
    rad = Rad(plan, CONFIG, nothing, nothing, nothing, Inbox(plan, CONFIG), nothing)
    assert rad.answers_for(error) is ours


@pytest.mark.parametrize(
    ("activations", "makes", "gradients", "own", "seen"),
    [
        (1.0, 1.0, 1.0, 7.0, ()),
        (math.inf, 1.0, 1.0, 7.0, ()),  # a mask may be
        (math.nan, 1.0, 1.0, 7.0, (faults.RECEIVED, faults.SENT)),
        (1.0, math.nan, 1.0, 7.0, (faults.SENT, faults.GRADIENTS_SENT)),
        (1.0, 1.0, math.inf, 7.0, (faults.GRADIENTS_RECEIVED, faults.GRADIENTS_SENT)),
        (1.0, 1.0, 1.0, math.inf, (faults.GRADIENTS,)),
    ],
)
def test_a_step_with_a_look_says_what_was_not_finite(
    activations: float, makes: float, gradients: float, own: float, seen: tuple[str, ...]
) -> None:
    class Maker(Recorder):
        def forward(self, *args: Any) -> dict[str, torch.Tensor]:
            made = super().forward(*args)
            return {**made, "b/0": made["b/0"] * makes}

        def backward(self, *args: Any) -> dict[str, torch.Tensor]:
            return {"a/0": super().backward(*args)["a/0"] * makes}

        def squared_norm(self, skip: frozenset[str] = frozenset()) -> float:
            return 7.0 if skip else own

    async def main() -> None:
        async with asyncio.timeout(10), Worker(1) as worker:
            rad = await started(Maker(), Sent(), worker)
            for step, look in ((0, True), (1, False)):
                running = asyncio.ensure_future(rad.step((1, 1), step, look=look))
                await asyncio.sleep(0)
                for m in range(3):
                    rad.inbox.offer(0, activation(activations if m == 1 else 1.0, microbatch=m, step=step))
                    for consumer in (3, 2):
                        grown = torch.full((2, 3), gradients)
                        rad.inbox.offer(consumer, frame("gradient", "b/0", grown, microbatch=m, step=step))
                for member in (3, 0):
                    rad.inbox.offer(member, frame("tie", "w", torch.full((2, 3), 3.0), step=step))
                report = await running
                assert report.not_finite == (tuple(sorted(seen)) if look else ())

    asyncio.run(main())


# --- what may arrive


def inbox(attempt: tuple[int, int] = (1, 1), step: int = 0) -> Inbox:
    made = Inbox(PLAN, CONFIG)
    made.advance(attempt, step)
    return made


def test_who_talks_to_whom() -> None:
    assert PLAN.partners == {0, 2, 3}
    lead = replace(PLAN, stage=replace(STAGE, index=0, receives=(), sends=()), ties=())
    assert lead.partners == {1, 2, 3}


@pytest.mark.parametrize(
    ("source", "bad", "says"),
    [
        (2, activation(), "stage 2 has no activation"),
        (0, frame("activation", "z/0", torch.zeros(2, 3)), "no activation 'z/0'"),
        (3, frame("gradient", "c/0", torch.zeros(2, 3)), "no gradient 'c/0'"),
        (2, frame("tie", "w", torch.zeros(2, 3)), "no tie 'w'"),
        (0, frame("activation", "a/0", torch.zeros(2, 4)), "the plan says float32[2, 3]"),
        (0, frame("activation", "a/0", torch.zeros(3, 3)), "the plan says float32[2, 3]"),
        (0, frame("activation", "a/0", torch.zeros(2, 3, dtype=torch.float64)), "the plan says float32"),
        (0, activation(microbatch=3), "no microbatch 3"),
        (0, activation(microbatch=-1), "no microbatch -1"),
        (0, activation(microbatch=2, evaluate=True), "no microbatch 2"),
        (0, frame("tie", "w", torch.zeros(2, 3), microbatch=1), "no microbatch 1"),
        (2, frame("gradient", "b/0", torch.zeros(2, 3), evaluate=True), "evaluation has no gradient"),
        (0, activation(codec="topk"), "codec 'topk'"),
        (0, activation(step=2), "a tensor of step 2"),
        (0, activation(attempt=[1]), "attempt must have 2 values"),
        (0, activation(step="0"), "step must be a whole number"),
        (0, Frame("activation", activation().header, memoryview(b"short")), "24 are right"),
        (0, Frame("rumour", activation().header), "no tensor frame"),
    ],
)  # fmt: skip
def test_a_frame_that_is_not_in_the_plan_is_refused(source: int, bad: Frame, says: str) -> None:
    with pytest.raises(FrameError) as error:
        inbox().offer(source, bad)
    assert says in str(error.value)


KEY = Key("activation", 0, 0, "a/0", 0)


def taken(box: Inbox, key: Key = KEY) -> float | None:
    async def main() -> float | None:
        try:
            async with asyncio.timeout(0.01):
                return float((await box.take(key))[0, 0])
        except TimeoutError:
            return None

    return asyncio.run(main())


def test_a_second_copy_changes_nothing() -> None:
    box = inbox()
    box.offer(0, activation(1.0))
    box.offer(0, activation(2.0))
    assert taken(box) == 1.0 and taken(box) is None


def test_what_belongs_to_an_attempt_that_is_over_is_dropped() -> None:
    box = inbox(attempt=(1, 2))
    box.offer(0, activation(1.0, attempt=(1, 1)))
    assert taken(box) is None
    box.offer(0, activation(2.0, attempt=(1, 2)))
    box.drop()
    assert taken(box) is None


def test_what_is_ahead_of_us_waits_for_us() -> None:
    box = inbox()
    box.offer(0, activation(1.0, step=1))
    box.offer(0, activation(2.0, attempt=(1, 2)))
    box.offer(0, activation(3.0, attempt=(2, 1)))
    with pytest.raises(FrameError, match="began with 0"):
        box.offer(0, activation(attempt=(2, 1), step=1))
    box.advance((1, 1), 1)
    assert taken(box, replace(KEY, step=1)) == 1.0
    box.advance((2, 1), 0)
    assert taken(box) == 3.0


def test_an_owner_that_is_gone_holds_up_no_attempt_with_those_that_it_named() -> None:
    box = inbox()
    box.offer(0, activation(1.0, attempt=(1 << 30, 7), step=2))
    box.offer(3, frame("tie", "w", torch.full((2, 3), 2.0), attempt=(2, 1)))
    box.offer(0, activation(3.0, attempt=(2, 1)))  # by its successor
    box.advance((2, 1), 0)
    assert taken(box) == 3.0 and taken(box, Key("tie", 0, 0, "w", 3)) == 2.0
    assert box._held == {(2, 1): {}}


def test_memory_is_bounded_by_the_plan() -> None:
    box = inbox()
    for turn in range(200):
        for m in range(3):
            box.offer(0, activation(attempt=(1, 2 + turn), microbatch=m))
            box.offer(0, activation(microbatch=m, step=turn % 2))
    assert sum(len(held) for held in box._held.values()) <= 3 * 3
